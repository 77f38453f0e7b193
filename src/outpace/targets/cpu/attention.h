// Attention of a few queries over the slots of a cache.
//
// Queries that share a key head read the same keys and values, so that several of them go through
// these together: a key that was loaded meets several queries, and a value several scores. A query's
// own sums run in one order whatever goes with it: over dimensions, then over slots. They begin anew
// after every PIECE slots that the query sees, and what these sums have come to is merged in order:
// so several threads may share the slots of a long text, and none of its bits tells.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "steps.h"

namespace {

constexpr int BLOCK = 64;           // slots whose scores are worked out before their values are added
constexpr int64_t PIECE = 8 * BLOCK; // slots whose sums are added up by themselves

// Queries and keys whose products are added up at the same time, and vectors of values.
#if AVX == 512
constexpr int QUERIES = 3, KEYS = 4, VALUES = 8;
#elif AVX == 256
constexpr int QUERIES = 2, KEYS = 4, VALUES = 4;
#else
constexpr int QUERIES = 2, KEYS = 4, VALUES = 8;
#endif

// One query, and its attention so far: softmax and values are rescaled whenever a score is higher.
struct Query {
  float *head;   // [dim + rest]
  float *values; // [dim]: sums weighted by e^(score - highest)
  float highest, weights;
};

// The slots that some queries see, at most BLOCK of them.
struct Slots {
  const float *keys, *values; // [slots, dim]
  const int32_t *seen;
  int count;
  int64_t dim;
  float scaling, cap; // of scores: by which they are multiplied, and their soft bound or 0
  const float *more;  // [slots, rest]: further numbers of the keys
  int64_t rest;
};

using Scores = float[BLOCK + LANES];

// The sums of four vectors: of each the upper half of what is left is added to the lower one until
// one number is left, as in `sum`.
inline void sums_of(const floats (&v)[KEYS], float *to) {
#if AVX == 512
  auto half = [](floats a, floats b) { // eight numbers of each
    __m512 x = __m512(a), y = __m512(b);
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
  };
  __m512 ab = half(v[0], v[1]), cd = half(v[2], v[3]);
  __m512 four = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  __m512 two = _mm512_add_ps(four, _mm512_permute_ps(four, 0x4e));
  __m512 one = _mm512_add_ps(two, _mm512_permute_ps(two, 0xb1));
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, one)));
#else
  for (int u = 0; u < KEYS; u++) to[u] = sum(v[u]);
#endif
}

// The scores of some queries.
template <int COUNT> inline void score(const Query *queries, const Slots &slots, Scores *scores) {
  const int count = slots.count;
  for (int i = 0; i < count; i += KEYS) {
    floats sums[COUNT][KEYS] = {};
    auto add = [&](const float *keys, int64_t dim, int64_t before) {
      const float *k[KEYS];
      for (int u = 0; u < KEYS; u++) k[u] = keys + slots.seen[std::min(i + u, count - 1)] * dim;
      for (int64_t d = 0; d < dim; d += LANES) {
        floats key[KEYS];
#pragma GCC unroll 8
        for (int u = 0; u < KEYS; u++) key[u] = load<floats>(k[u] + d);
#pragma GCC unroll 8
        for (int q = 0; q < COUNT; q++) {
          floats query = load<floats>(queries[q].head + before + d);
#pragma GCC unroll 8
          for (int u = 0; u < KEYS; u++) sums[q][u] = fused(query, key[u], sums[q][u]);
        }
      }
    };
    add(slots.keys, slots.dim, 0);
    if (slots.rest) add(slots.more, slots.rest, slots.dim);
#pragma GCC unroll 8
    for (int q = 0; q < COUNT; q++) {
      sums_of(sums[q], scores[q] + i);
      for (int u = 0; u < KEYS; u++) scores[q][i + u] *= slots.scaling;
    }
  }
}

// Turns scores into weights; returns what those of earlier slots count from here on.
inline float weigh(Query &query, float *scores, int count, float cap) {
  for (int i = count; i % LANES; i++) scores[i] = scores[count - 1];
  if (cap) bound(scores, (count + LANES - 1) / LANES * LANES, 1.f, cap);
  floats most = load<floats>(scores);
  for (int i = LANES; i < count; i += LANES) {
    floats here = load<floats>(scores + i);
    most = here > most ? here : most;
  }
  float highest = query.highest;
  for (int u = 0; u < LANES; u++) highest = std::max(highest, most[u]);
  const float fading = exponential(query.highest - highest);
  query.highest = highest;
  for (int i = 0; i < count; i += LANES) {
    floats e = exponential(load<floats>(scores + i) - highest);
    std::memcpy(scores + i, &e, sizeof e);
  }
  for (int i = count; i % LANES; i++) scores[i] = 0.f;
  floats weights = {};
  for (int i = 0; i < count; i += LANES) weights += load<floats>(scores + i);
  query.weights = query.weights * fading + sum(weights);
  return fading;
}

// Adds SIDE vectors of values, from dimension d on, weighted by scores.
template <int COUNT, int SIDE>
inline void add_values(const Query *queries, const Slots &slots, const Scores *scores,
                       const float *fading, int64_t d) {
  floats sums[COUNT][SIDE];
#pragma GCC unroll 8
  for (int q = 0; q < COUNT; q++)
#pragma GCC unroll 8
    for (int u = 0; u < SIDE; u++)
      sums[q][u] = load<floats>(queries[q].values + d + u * LANES) * fading[q];
  for (int i = 0; i < slots.count; i++) {
    const float *from = slots.values + slots.seen[i] * slots.dim + d;
    floats weights[COUNT];
#pragma GCC unroll 8
    for (int q = 0; q < COUNT; q++) weights[q] = all(scores[q][i]);
#pragma GCC unroll 8
    for (int u = 0; u < SIDE; u++) {
      floats value = load<floats>(from + u * LANES);
#pragma GCC unroll 8
      for (int q = 0; q < COUNT; q++) sums[q][u] = fused(value, weights[q], sums[q][u]);
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < COUNT; q++)
#pragma GCC unroll 8
    for (int u = 0; u < SIDE; u++)
      std::memcpy(queries[q].values + d + u * LANES, &sums[q][u], sizeof sums[q][u]);
}

template <int COUNT> void attend(Query *queries, const Slots &slots) {
  alignas(64) Scores scores[COUNT];
  float fading[COUNT];
  score<COUNT>(queries, slots, scores);
  for (int q = 0; q < COUNT; q++) fading[q] = weigh(queries[q], scores[q], slots.count, slots.cap);
  int64_t d = 0;
  for (; d + VALUES * LANES <= slots.dim; d += VALUES * LANES)
    add_values<COUNT, VALUES>(queries, slots, scores, fading, d);
  for (; d + VALUES / 2 * LANES <= slots.dim; d += VALUES / 2 * LANES)
    add_values<COUNT, VALUES / 2>(queries, slots, scores, fading, d);
  for (; d < slots.dim; d += LANES) add_values<COUNT, 1>(queries, slots, scores, fading, d);
}

// Goes on with queries that see the same slots, one or more of these.
inline void attend(Query *queries, int64_t count, const Slots &slots) {
  for (; count >= QUERIES; count -= QUERIES, queries += QUERIES) attend<QUERIES>(queries, slots);
#if AVX == 512
  if (count == 2) attend<2>(queries, slots), count = 0;
#endif
  if (count) attend<1>(queries, slots);
}

// Adds what a query has seen of further slots. With `more` it began anew there.
inline void merge(Query &into, const Query &more, int64_t dim) {
  if (more.weights == 0.f) return; // it sees none of them
  const float highest = std::max(into.highest, more.highest);
  const float fading = exponential(into.highest - highest);
  const float share = exponential(more.highest - highest);
  for (int64_t d = 0; d < dim; d += LANES) {
    floats value = load<floats>(into.values + d) * fading;
    value = fused(load<floats>(more.values + d), all(share), value);
    std::memcpy(into.values + d, &value, sizeof value);
  }
  into.weights = into.weights * fading + more.weights * share;
  into.highest = highest;
}

// What a query has seen, in the end.
inline void conclude(const Query &query, int64_t dim) {
  const float weights = query.weights;
  for (int64_t d = 0; d < dim; d += LANES) {
    floats value = load<floats>(query.values + d) / weights;
    std::memcpy(query.values + d, &value, sizeof value);
  }
}

} // namespace
