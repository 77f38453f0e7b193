// Attention of a few queries over a few slots of the cache: online softmax, as in FlashAttention.
//
// Queries that share a key head read the same keys and values, so that several of them go through these
// together: a key that was loaded is multiplied with several queries, and a value with several weights. A
// query's own sums run in one order whatever goes with it: over dimensions, then over slots. They begin
// anew after every SPLIT_SLOTS slots that the query sees, and the sums of such splits are merged in order:
// so several threads may share the slots of a long text, and no bit depends on it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "ops.h"

namespace {

constexpr int SLOT_BLOCK = 64; // slots whose scores are computed before their values are added
constexpr int64_t SPLIT_SLOTS = 8 * SLOT_BLOCK; // slots whose sums are added up by themselves (split KV)

// Queries whose products are added up at the same time, and vectors of values.
#if AVX == 512
constexpr int QUERIES = 3, VALUES = 8;
#elif AVX == 256
constexpr int QUERIES = 2, VALUES = 4;
#else
constexpr int QUERIES = 2, VALUES = 8;
#endif

// One query, and its attention so far: softmax and values are rescaled whenever a score is higher.
struct Query {
  float *head;   // [dim + rope_dim]
  float *values; // [dim]: sums weighted by e^(score - max_score)
  float max_score, weight_sum;
};

// The slots that some queries see, at most SLOT_BLOCK of them.
struct SlotBlock {
  const float *keys, *values; // [slots, dim]
  const int32_t *seen;
  int count;
  int64_t dim;
  float scaling, cap;     // of scores: by which they are multiplied, and their soft bound or 0
  const float *rope_keys; // [slots, rope_dim]: further numbers of the keys
  int64_t rope_dim;
};

constexpr int KEYS = SUMS_AT_ONCE; // whose scores are computed together

using Scores = float[SLOT_BLOCK + LANES];

// The scores of some queries.
template <int COUNT>
inline void compute_scores(const Query *queries, const SlotBlock &slots, Scores *scores) {
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
          for (int u = 0; u < KEYS; u++) sums[q][u] = fmadd(query, key[u], sums[q][u]);
        }
      }
    };
    add(slots.keys, slots.dim, 0);
    if (slots.rope_dim) add(slots.rope_keys, slots.rope_dim, slots.dim);
#pragma GCC unroll 8
    for (int q = 0; q < COUNT; q++) {
      sums_of(sums[q], scores[q] + i);
      for (int u = 0; u < KEYS; u++) scores[q][i + u] *= slots.scaling;
    }
  }
}

// Turns scores into weights; returns by what those of earlier slots are multiplied from here on.
inline float online_softmax(Query &query, float *scores, int count, float cap) {
  for (int i = count; i % LANES; i++) scores[i] = scores[count - 1];
  if (cap) soft_cap(scores, (count + LANES - 1) / LANES * LANES, 1.f, cap);
  floats most = load<floats>(scores);
  for (int i = LANES; i < count; i += LANES) {
    floats here = load<floats>(scores + i);
    most = here > most ? here : most;
  }
  float max_score = query.max_score;
  for (int u = 0; u < LANES; u++) max_score = std::max(max_score, most[u]);
  const float rescale = exponential(query.max_score - max_score);
  query.max_score = max_score;
  for (int i = 0; i < count; i += LANES) {
    floats e = exponential(load<floats>(scores + i) - max_score);
    std::memcpy(scores + i, &e, sizeof e);
  }
  for (int i = count; i % LANES; i++) scores[i] = 0.f;
  floats weights = {};
  for (int i = 0; i < count; i += LANES) weights += load<floats>(scores + i);
  query.weight_sum = query.weight_sum * rescale + sum(weights);
  return rescale;
}

// Adds VECTORS vectors of values, from dimension d on, weighted by scores.
template <int COUNT, int VECTORS>
inline void add_values(const Query *queries, const SlotBlock &slots, const Scores *scores,
                       const float *rescale, int64_t d) {
  floats sums[COUNT][VECTORS];
#pragma GCC unroll 8
  for (int q = 0; q < COUNT; q++)
#pragma GCC unroll 8
    for (int u = 0; u < VECTORS; u++)
      sums[q][u] = load<floats>(queries[q].values + d + u * LANES) * rescale[q];
  for (int i = 0; i < slots.count; i++) {
    const float *from = slots.values + slots.seen[i] * slots.dim + d;
    floats weight[COUNT];
#pragma GCC unroll 8
    for (int q = 0; q < COUNT; q++) weight[q] = broadcast(scores[q][i]);
#pragma GCC unroll 8
    for (int u = 0; u < VECTORS; u++) {
      floats value = load<floats>(from + u * LANES);
#pragma GCC unroll 8
      for (int q = 0; q < COUNT; q++) sums[q][u] = fmadd(value, weight[q], sums[q][u]);
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < COUNT; q++)
#pragma GCC unroll 8
    for (int u = 0; u < VECTORS; u++)
      std::memcpy(queries[q].values + d + u * LANES, &sums[q][u], sizeof sums[q][u]);
}

template <int COUNT> void attend(Query *queries, const SlotBlock &slots) {
  alignas(64) Scores scores[COUNT];
  float rescale[COUNT];
  compute_scores<COUNT>(queries, slots, scores);
  for (int q = 0; q < COUNT; q++)
    rescale[q] = online_softmax(queries[q], scores[q], slots.count, slots.cap);
  int64_t d = 0;
  for (; d + VALUES * LANES <= slots.dim; d += VALUES * LANES)
    add_values<COUNT, VALUES>(queries, slots, scores, rescale, d);
  for (; d + VALUES / 2 * LANES <= slots.dim; d += VALUES / 2 * LANES)
    add_values<COUNT, VALUES / 2>(queries, slots, scores, rescale, d);
  for (; d < slots.dim; d += LANES) add_values<COUNT, 1>(queries, slots, scores, rescale, d);
}

// Goes on with queries that see the same slots, one or more of these.
inline void attend(Query *queries, int64_t count, const SlotBlock &slots) {
  for (; count >= QUERIES; count -= QUERIES, queries += QUERIES) attend<QUERIES>(queries, slots);
#if AVX == 512
  if (count == 2) attend<2>(queries, slots), count = 0;
#endif
  if (count) attend<1>(queries, slots);
}

// Adds what a query has come to in a further split, where it began anew.
inline void merge_splits(Query &into, const Query &more, int64_t dim) {
  if (more.weight_sum == 0.f) return; // it sees none of them
  const float max_score = std::max(into.max_score, more.max_score);
  const float rescale = exponential(into.max_score - max_score);
  const float share = exponential(more.max_score - max_score);
  for (int64_t d = 0; d < dim; d += LANES) {
    floats value = load<floats>(into.values + d) * rescale;
    value = fmadd(load<floats>(more.values + d), broadcast(share), value);
    std::memcpy(into.values + d, &value, sizeof value);
  }
  into.weight_sum = into.weight_sum * rescale + more.weight_sum * share;
  into.max_score = max_score;
}

// Turns the sums of a query into its output.
inline void divide_by_weights(const Query &query, int64_t dim) {
  const float weight_sum = query.weight_sum;
  for (int64_t d = 0; d < dim; d += LANES) {
    floats value = load<floats>(query.values + d) / weight_sum;
    std::memcpy(query.values + d, &value, sizeof value);
  }
}

} // namespace
