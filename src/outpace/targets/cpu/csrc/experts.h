// Mixtures of experts: which experts tokens choose, and which tokens an expert computes together.
//
// Only the blocks of experts that some token chose are read, each once for all tokens that chose it. A
// token's choice follows from its own scores. Its sums are those of products of rows, which do not
// depend on the company, and what its experts made is added up in the order in which it chose them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>

#include "block_products.h"
#include "lanes.h"
#include "linear.h"
#include "ops.h"

namespace {

// The numbers of kinds, as in Python.
enum { SOFTMAX = 0, SIGMOID = 1 }; // of scores

constexpr int64_t MOST_EXPERTS = 1024;        // of a layer (as in Python)
constexpr int64_t MOST_PAIRS = 4096;          // of a token and an expert, that are computed at once
constexpr int64_t AT_ONCE = int64_t(1) << 24; // floats that these may need, unless one token does
constexpr float SMALLEST = 1e-20f;            // by which weights are divided at least

// What a layer has instead of an MLP, or next to its own MLP, the shared expert.
struct Mixture {
  Linear router;           // [experts, hidden], in float32
  Linear gate, up, down;   // in blocks: the outputs of one expert after another's
  Linear shared;           // shared_expert_gate: one output, how much the shared expert counts; or none
  const float *correction; // [experts], which counts for the choice only (e_score_correction_bias); or null
  int64_t experts;         // 0: there is no mixture
  int64_t top_k, inner;    // experts of a token; outputs of an expert's gate
  int64_t scoring;
  int64_t norm_topk; // whether a token's weights are divided by their sum
  // A token chooses from the `topk_groups` of `groups` groups of experts whose `best` highest scores have
  // the largest sum.
  int64_t groups, topk_groups, best;
  float scaling; // by which weights are multiplied
};

// Turns a token's logits [experts] into scores, in place.
inline void score(const Mixture &mixture, float *logits) {
  const int64_t count = mixture.experts;
  float highest = logits[0];
  for (int64_t e = 1; e < count; e++) highest = std::max(highest, logits[e]);
  floats total = {};
  for (int64_t e = 0; e < count; e += LANES) {
    const int64_t size = std::min<int64_t>(LANES, count - e);
    floats v = {}, seen = {};
    std::memcpy(&v, logits + e, size * sizeof(float));
    for (int64_t i = 0; i < size; i++) seen[i] = 1.f;
    if (mixture.scoring == SIGMOID) {
      v = 1.f / (exponential(-v) + 1.f);
    } else {
      v = exponential(v - highest) * seen;
      total += v;
    }
    std::memcpy(logits + e, &v, size * sizeof(float));
  }
  if (mixture.scoring == SIGMOID) return;
  const float all_of_them = sum(total);
  for (int64_t e = 0; e < count; e++) logits[e] /= all_of_them;
}

// Rules out the experts of groups that are not kept. choice: [experts].
inline void keep_groups(const Mixture &mixture, float *choice) {
  const int64_t size = mixture.experts / mixture.groups;
  float worth[MOST_EXPERTS], sorted[MOST_EXPERTS];
  for (int64_t g = 0; g < mixture.groups; g++) {
    std::copy(choice + g * size, choice + (g + 1) * size, sorted);
    std::partial_sort(sorted, sorted + mixture.best, sorted + size, std::greater<float>());
    worth[g] = 0.f;
    for (int64_t i = 0; i < mixture.best; i++) worth[g] += sorted[i];
  }
  const float lowest = -std::numeric_limits<float>::infinity();
  bool kept[MOST_EXPERTS] = {};
  for (int64_t i = 0; i < mixture.topk_groups; i++) {
    int64_t most = -1;
    for (int64_t g = 0; g < mixture.groups; g++)
      if (!kept[g] && (most < 0 || worth[g] > worth[most])) most = g;
    kept[most] = true;
  }
  for (int64_t g = 0; g < mixture.groups; g++)
    if (!kept[g]) std::fill(choice + g * size, choice + (g + 1) * size, lowest);
}

// A token's experts, the one with the highest score first, and their weights. logits: [experts],
// which are written over. Of equal scores, and where there are no numbers, the first ones win.
inline void choose(const Mixture &mixture, float *logits, int32_t *chosen, float *weights) {
  score(mixture, logits);
  float choice[MOST_EXPERTS];
  for (int64_t e = 0; e < mixture.experts; e++)
    choice[e] = mixture.correction ? logits[e] + mixture.correction[e] : logits[e];
  if (mixture.groups > 1) keep_groups(mixture, choice);
  bool taken[MOST_EXPERTS] = {};
  float total = 0.f;
  for (int64_t i = 0; i < mixture.top_k; i++) {
    int64_t most = -1;
    for (int64_t e = 0; e < mixture.experts; e++)
      if (!taken[e] && (most < 0 || choice[e] > choice[most])) most = e;
    taken[most] = true;
    chosen[i] = int32_t(most);
    weights[i] = logits[most];
    total += weights[i];
  }
  const float divisor = mixture.norm_topk ? std::max(total, SMALLEST) : 1.f;
  for (int64_t i = 0; i < mixture.top_k; i++) weights[i] = weights[i] / divisor * mixture.scaling;
}

// Pairs of a token and an expert in the order of the experts, and within these of the tokens.
struct Routes {
  int64_t count = 0;                // experts that some token chose
  int32_t experts[MOST_EXPERTS];    // these
  int32_t begins[MOST_EXPERTS + 1]; // where their pairs begin
  int32_t place[MOST_PAIRS];        // of the pair of token t and its choice i: t chosen + i

  // chosen: [pairs].
  Routes(const Mixture &mixture, const int32_t *chosen, int64_t pairs) {
    int32_t next[MOST_EXPERTS] = {};
    for (int64_t p = 0; p < pairs; p++) next[chosen[p]]++;
    int32_t begin = 0;
    for (int64_t e = 0; e < mixture.experts; e++) {
      const int32_t size = next[e];
      next[e] = begin;
      if (!size) continue;
      experts[count] = int32_t(e), begins[count++] = begin;
      begin += size;
    }
    begins[count] = begin;
    for (int64_t p = 0; p < pairs; p++) place[p] = next[chosen[p]]++;
  }

  int64_t size(int64_t i) const { return begins[i + 1] - begins[i]; }

  // The number among them of the expert of a pair at some place.
  int64_t expert_of(int64_t place) const {
    return std::upper_bound(begins, begins + count, int32_t(place)) - begins - 1;
  }
};

// One expert's outputs of a layer that holds those of all experts. inputs: of the layer.
inline Linear of_expert(const Linear &whole, int64_t expert, int64_t outputs, int64_t inputs) {
  return slice_outputs(whole, expert * outputs, outputs, inputs);
}

// The memory that some tokens need in a mixture. Quantised numbers, whole lines of the cache, come first.
struct ExpertScratch {
  ActivationBlock *given;                            // inputs of the first products
  ActivationBlock *inside, *inside_shared;           // inputs of the last ones
  float *logits, *weights, *shares;                  // [tokens, experts], [tokens, top_k], [tokens]
  int32_t *chosen;                                   // [tokens, top_k]
  float *gates, *ups, *outputs;                      // [pairs, inner], twice; [pairs, hidden]
  float *shared_gates, *shared_ups, *shared_outputs; // [tokens, shared inner], twice; [tokens, hidden]

  // shared: outputs of the gate of the shared expert; 0: there is none. Returns the floats.
  int64_t lay_out(const Mixture &mixture, int64_t hidden, int64_t shared, int64_t tokens, float *at) {
    const float *first = at;
    const int64_t pairs = tokens * mixture.top_k;
    auto quantized = [&](int64_t rows, int64_t inputs) {
      ActivationBlock *found = reinterpret_cast<ActivationBlock *>(at);
      at += rows * blocks_of(inputs) * int64_t(sizeof(ActivationBlock) / sizeof(float));
      return found;
    };
    auto floats_for = [&](int64_t count) {
      float *found = at;
      at += (count + LINE_FLOATS - 1) / LINE_FLOATS * LINE_FLOATS;
      return found;
    };
    given = quantized(pairs, hidden), inside = quantized(pairs, mixture.inner);
    inside_shared = quantized(tokens, shared);
    logits = floats_for(tokens * mixture.experts), weights = floats_for(pairs);
    shares = floats_for(tokens), chosen = reinterpret_cast<int32_t *>(floats_for(pairs));
    gates = floats_for(pairs * mixture.inner), ups = floats_for(pairs * mixture.inner);
    outputs = floats_for(pairs * hidden);
    shared_gates = floats_for(tokens * shared), shared_ups = floats_for(tokens * shared);
    shared_outputs = floats_for(shared ? tokens * hidden : 0);
    return at - first;
  }

  static constexpr int64_t LINE_FLOATS = sizeof(ActivationBlock) / sizeof(float);
};

// How many tokens go through a mixture at once.
inline int64_t tokens_at_once(const Mixture &mixture, int64_t hidden, int64_t shared, int64_t tokens) {
  ExpertScratch space;
  const int64_t each = space.lay_out(mixture, hidden, shared, 1, nullptr);
  const int64_t most = std::min(AT_ONCE / each, MOST_PAIRS / mixture.top_k);
  return std::max(int64_t(1), std::min(tokens, most));
}

// A product with one linear layer of an expert.
inline BlockProduct block_product(const ActivationBlock *x, int64_t rows, int64_t inputs,
                                  const Linear &linear, float *y) {
  return {x,
          rows,
          blocks_of(inputs),
          static_cast<const uint8_t *>(linear.weight),
          linear.bias,
          linear.outputs,
          y,
          BLOCK_FORMATS[linear.kind - FIRST_BLOCK_KIND]};
}

} // namespace
