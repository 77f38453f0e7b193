// The memory that a pass works in: how many floats each part of it takes, and all of them together.
//
// Python allocates what `scratch_floats` says, and `ForwardPass::begin` (forward.h) divides it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "experts.h"
#include "latent_attention.h"
#include "layer.h"

namespace {

constexpr int64_t MOST_COPIES = 1024;           // hidden states that threads may hold each for itself
constexpr int64_t MOST_SPLIT_RESULTS = 1 << 24; // floats of a layer

// Whether each thread holds the hidden states of all tokens for itself.
inline bool holds_all_states(int64_t tokens, int64_t threads) { return tokens * threads <= MOST_COPIES; }

// The floats per token that the products of any of these layers need.
inline int64_t product_scratch(const Layer *layers, int64_t count) {
  int64_t most = 0;
  for (const Layer *at = layers; at < layers + count; at++)
    most = std::max({most, at->scratch_per_token(), 2 * at->inner});
  return most;
}

// The floats that attention needs on each thread.
inline int64_t attention_scratch(const Layer *layers, int64_t count) {
  int64_t most = 0;
  for (const Layer *at = layers; at < layers + count; at++)
    if (!at->recurrence.kind)
      most = std::max(
          {most, AttentionTile::scratch(at->heads / at->kv_heads, at->dim), HeadScratch::size(*at)});
  return most;
}

// The floats of `SplitResults` of a layer; 0 where there is one split, where many columns are shared
// out anyhow, or where they would take too much memory: then rows and heads alone are shared out.
inline int64_t split_scratch(const Layer *layers, int64_t count, int64_t rows, int64_t columns,
                             int64_t view) {
  if (columns > TILE_TOKENS || view <= SPLIT_SLOTS) return 0;
  int64_t most = 0;
  for (const Layer *at = layers; at < layers + count; at++)
    most = std::max(most, SplitResults::size(rows * columns * at->heads, splits_of(view), at->dim));
  return most > MOST_SPLIT_RESULTS ? 0 : most;
}

// The floats per token that the quantised activations of any of them take.
inline int64_t quantized_scratch(const Layer *layers, int64_t count) {
  int64_t most = 0;
  for (const Layer *at = layers; at < layers + count; at++)
    most = std::max({most, at->attention_inputs(), at->query_a.outputs, at->attended_width(), at->inner});
  return blocks_of(most) * int64_t(sizeof(ActivationBlock) / sizeof(float));
}

// The floats that a mixture of any of them needs.
inline int64_t mixture_scratch(const Layer *layers, int64_t count, int64_t tokens) {
  int64_t most = 0;
  for (const Layer *at = layers; at < layers + count; at++)
    if (at->mixture.experts) {
      const int64_t some = tokens_at_once(at->mixture, at->hidden, at->inner, tokens);
      most = std::max(most, ExpertScratch{}.lay_out(at->mixture, at->hidden, at->inner, some, nullptr));
    }
  return most;
}

// The floats of all kinds for a pass over some tokens, each of which may see `view` slots, on n
// threads. One line of the cache more is needed to begin with one.
inline int64_t scratch_floats(const Layer *layers, int64_t count, int64_t rows, int64_t columns,
                              int64_t view, int threads) {
  const int64_t tokens = rows * columns;
  const int64_t held = 1 + 2 * (holds_all_states(tokens, threads) ? threads : 1);
  return tokens *
             (quantized_scratch(layers, count) + product_scratch(layers, count) + held * layers->hidden) +
         mixture_scratch(layers, count, tokens) + threads * attention_scratch(layers, count) +
         split_scratch(layers, count, rows, columns, view);
}

} // namespace
