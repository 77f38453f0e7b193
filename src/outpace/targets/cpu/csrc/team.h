// The threads that work on one call, and how they share out its work.
//
// They are torch's own: `Threads` starts a parallel region of its OpenMP. Within it, a `Team` goes through
// phases, in each of which threads take shares of the work until nothing is left, and then wait for each
// other at a barrier.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t SPINS = 4096; // looks at a barrier before others may have the processor

// What OpenMP's compilers turn a parallel region into a call of. It is handed over, so that torch's
// own threads do the work: threads of another pool would fight with them for the cores.
typedef void (*Parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

struct Threads {
  Parallel parallel; // or null
  int (*size)();     // how many threads there are in the region, which may be fewer than asked for
  int count;

  bool several() const { return count > 1 && parallel && size; }

  void run(void (*work)(void *), void *data) const {
    if (several())
      parallel(work, data, unsigned(count), 0);
    else
      work(data);
  }

  // Returns how many there are, asked by one of them.
  int size_here() const { return several() ? size() : 1; }
};

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Threads that go through phases together: what one phase makes, the next one reads.
struct Team {
  alignas(64) int64_t next = 0; // where the work of this phase begins that nobody has taken yet
  alignas(64) int arrived = 0;
  int joined = 0;
  alignas(64) int phase = 0;

  // Returns a number of one's own.
  int join() { return __atomic_fetch_add(&joined, 1, __ATOMIC_RELAXED); }

  // Takes a share of `total`, a multiple of `grain`: much while much is left, and little at the end,
  // so that all get there at the same time. Returns false once there is nothing left.
  bool take(int64_t total, int64_t grain, int size, int64_t &begin, int64_t &end) {
    begin = __atomic_load_n(&next, __ATOMIC_RELAXED);
    do {
      if (begin >= total) return false;
      int64_t fair = (total - begin) / (size > 1 ? 2 * size : 1);
      end = std::min(total, begin + std::max(grain, fair / grain * grain));
    } while (!__atomic_compare_exchange_n(&next, &begin, end, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return true;
  }

  // Ends a phase: returns once all threads are here.
  void barrier(int size) {
    int now = __atomic_load_n(&phase, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == size) {
      arrived = 0;
      next = 0;
      __atomic_store_n(&phase, now + 1, __ATOMIC_RELEASE);
      return;
    }
    for (int64_t looks = 1; __atomic_load_n(&phase, __ATOMIC_ACQUIRE) == now; looks++)
      looks % SPINS ? pause() : std::this_thread::yield();
  }
};
} // namespace
