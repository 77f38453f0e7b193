// Products of many rows with weights in quantised blocks, by AMX: the bits of `block_products.h`, sooner.
//
// AMX multiplies a tile of up to 16 rows of activations, 32 inputs deep, with the codes of 16 outputs
// in one instruction. Its integer sums are exact, as all are, and meet the scales by the same steps in
// the same order. But codes must be spread to bytes in memory first, and sums come back through
// memory, and so it does not pay for a few rows.
#pragma once

#include "block_products.h"

#if defined(__AMX_INT8__) && defined(DOTS_VNNI512) && defined(__linux__)
#define DOTS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#ifdef DOTS_AMX

constexpr int64_t FEWEST = 32;  // rows for which tiles are worth it
constexpr int64_t TALLEST = 16; // rows of a tile
constexpr int64_t MET = 64;     // rows that meet all panels of a thread before the next rows come

// Asks the system for the tiles' registers, which each process must do once. Returns whether it may
// use them.
inline bool tiles_granted() {
  constexpr int ASK = 0x1023, TILES = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, ASK, TILES) == 0;
  return granted;
}

// The shapes of this thread's tile registers: 0 are activations, 1 are weights, 2 are sums.
struct alignas(64) Shapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {}; // of a row
  uint8_t rows[16] = {};

  // rows: of activations. inputs: which share a scale.
  Shapes(int64_t tall, int64_t inputs) {
    bytes[0] = uint16_t(inputs), rows[0] = uint8_t(tall);
    bytes[1] = VECTOR, rows[1] = uint8_t(inputs / 4);
    bytes[2] = VECTOR, rows[2] = uint8_t(tall);
  }
};

// Sets the shapes for as long as it lives.
struct Tiles {
  explicit Tiles(const Shapes &shapes) {
    asm volatile("" : : "r"(&shapes) : "memory"); // g++ does not know that all of it is read
    _tile_loadconfig(&shapes);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles &) = delete;
};

// Multiplies the activations of some rows, a `Rounded` each, with codes of 16 outputs.
// sums: [rows, WIDTH].
inline void multiply_tile(const int8_t *x, const uint8_t *codes, int32_t *sums) {
  _tile_zero(2);
  _tile_loadd(0, x, sizeof(Rounded));
  _tile_loadd(1, codes, VECTOR);
  _tile_dpbsud(2, 0, 1);
  _tile_stored(2, sums, VECTOR);
}

// A chunk of a panel meets rows.
template <int BITS, bool LIFTED> struct TiledChunk {
  static constexpr int PARTS = is_halved(BITS) ? 2 : 1; // of a block, with scales of their own
  static constexpr int64_t INPUTS = SMALL / PARTS;

  const BlockProduct &job;
  const int64_t from, blocks; // of the chunk
  Scales scales;
  alignas(64) uint8_t codes[CHUNK][GROUPS][VECTOR];
  alignas(64) int32_t found[CHUNK][PARTS][TALLEST][WIDTH];

  // Spreads the codes, and calls for those that come next.
  TiledChunk(const BlockProduct &job, const uint8_t *packed, int64_t from)
      : job(job), from(from), blocks(std::min(CHUNK, job.blocks - from)) {
    const int64_t step = chunk_bytes(job.form, CHUNK) / CHUNK;
    widen_scales(job.form, packed + code_bytes(job.form, blocks), blocks, scales);
    for (int64_t b = 0; b < blocks; b++) {
      call_for<BITS>(packed + b * step);
      unpack(std::make_integer_sequence<int, GROUPS>{}, packed + b * bits_of(BITS) * VECTOR, codes[b]);
    }
    asm volatile("" ::: "memory"); // the compiler does not know that tiles read memory
  }

  template <int... GROUP>
  void unpack(std::integer_sequence<int, GROUP...>, const uint8_t *at,
              uint8_t (&to)[GROUPS][VECTOR]) const {
    auto put = [&](auto which) {
      constexpr int G = decltype(which)::value;
      bytes unpacked = codes_of<BITS, G>(at);
      std::memcpy(to[G], &unpacked, sizeof unpacked);
    };
    (put(std::integral_constant<int, GROUP>{}), ...);
  }

  // Finds the integer sums of as many rows as a tile has. x: the first of them, in this chunk.
  void multiply(const Rounded *x) {
    for (int64_t b = 0; b < blocks; b++)
      for (int part = 0; part < PARTS; part++)
        multiply_tile(x[b * job.rows].codes + part * INPUTS, codes[b][part * INPUTS / 4],
                      found[b][part][0]);
  }

  // Those of row number r of the tile. in: that row.
  floats dot(int64_t b, int part, int64_t r, const Rounded &in) const {
    ints sum = load<ints>(found[b][part][r]);
    if constexpr (!LIFTED) sum += less_at<BITS>(in, less_of(job.form) + part) - ints{};
    return __builtin_convertvector(sum, floats);
  }

  // Adds what was found for IN rows, of which x is the first, number r of the tile.
  template <int IN> void scale(int64_t r, const Rounded *x, float *sums) const {
    floats sum[IN];
#pragma GCC unroll 8
    for (int i = 0; i < IN; i++) sum[i] = load<floats>(sums + i * WIDTH);
    for (int64_t b = 0; b < blocks; b++, x += job.rows) {
      const floats first = load<floats>(scales.scale[PARTS * b]);
      const floats second = load<floats>(PARTS == 2 ? scales.scale[2 * b + 1] : scales.lift[b]);
#pragma GCC unroll 8
      for (int i = 0; i < IN; i++)
        if constexpr (PARTS == 2) {
          floats half = first * dot(b, 0, r + i, x[i]);
          for (int part = 0; LIFTED && part < 2; part++)
            half = lift_half(scales.lift + 2 * b, 0, part, x[i], half);
          sum[i] = add_halves(half, dot(b, 1, r + i, x[i]), second, x[i], sum[i]);
        } else {
          sum[i] = add_scaled(dot(b, 0, r + i, x[i]), first, x[i], sum[i]);
          if constexpr (LIFTED) sum[i] = add_lift(second, x[i], sum[i]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < IN; i++) store(sum[i], sums + i * WIDTH);
  }

  // Adds what the chunk gives to the sums of `count` rows from `row` on, `tall` at a time. The last
  // tile may begin within the one before it, whose rows are not added again.
  void add(int64_t row, int64_t count, int64_t tall, float *sums) {
    for (int64_t next = 0; next < count; next += tall) {
      const int64_t first = std::min(next, count - tall), end = first + tall;
      const Rounded *x = job.x + from * job.rows + row;
      multiply(x + first);
      int64_t r = next;
      for (; r + 8 <= end; r += 8) scale<8>(r - first, x + r, sums + r * WIDTH);
      for (; r < end; r++) scale<1>(r - first, x + r, sums + r * WIDTH);
    }
  }
};

// All panels from `begin` to `end` meet the same rows before the next rows come, whose activations
// stay in the second cache meanwhile.
template <int BITS, bool LIFTED>
void compute_tiled(const BlockProduct &job, int64_t begin, int64_t end) {
  const int64_t size = panel_bytes(job.form, job.blocks), whole = chunk_bytes(job.form, CHUNK);
  alignas(64) float sums[MET * WIDTH];
  for (int64_t row = 0; row < job.rows; row += MET) {
    const int64_t count = std::min(MET, job.rows - row);
    const int64_t tiles = (count + TALLEST - 1) / TALLEST, tall = (count + tiles - 1) / tiles;
    const Tiles shapes({tall, TiledChunk<BITS, LIFTED>::INPUTS});
    for (int64_t panel = begin; panel < end; panel++) {
      const uint8_t *packed = job.panels + panel * size;
      std::memset(sums, 0, count * WIDTH * sizeof(float));
      for (int64_t from = 0; from < job.blocks; from += CHUNK, packed += whole)
        TiledChunk<BITS, LIFTED>(job, packed, from).add(row, count, tall, sums);
      finish_panel(job, panel, row, count, sums);
    }
  }
}

inline void compute_tiled(const BlockProduct &job, int64_t begin, int64_t end) {
  by_code(job.form, [&](auto code) { compute_tiled<code.BITS, code.LIFTED>(job, begin, end); });
}

#endif

// Computes the outputs of the panels from `begin` to `end`.
inline void compute(const BlockProduct &job, int64_t begin, int64_t end) {
#ifdef DOTS_AMX
  if (job.rows >= FEWEST && tiles_granted()) return compute_tiled(job, begin, end);
#endif
  for (; begin < end; begin++) compute_panel(job, begin);
}

} // namespace
