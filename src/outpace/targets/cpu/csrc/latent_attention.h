// Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), before and after queries go through the
// cache.
//
// The cache holds two vectors for a token: a latent, which the keys and values of all heads are made
// from, and a key that is rotated to the token's position, which all heads share. Making keys and values
// of all slots anew in each pass would take longer than all else. Instead a query is multiplied with the
// weight that makes keys, the other way round ("absorbed"), and attention is over the latents themselves;
// what comes out is multiplied with the weight that makes values.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "block_amx.h"
#include "dense_products.h"
#include "experts.h"
#include "transposed_products.h"

namespace {

// Puts the latent of token r into the cache, and the key that all heads share.
void store_latent(const Attention &job, int64_t r) {
  const Layer &layer = *job.layer;
  const int64_t row = r / job.pass->columns, slot = job.pass->starts[row] + r % job.pass->columns;
  float *latent = job.keys + r * layer.key.outputs, *shared = latent + layer.dim;
  normalise(layer.key_norm, latent, layer.dim, latent);
  rotate_head(job, shared, r);
  store_vector(job.head_of_cache(job.key_cache, row, 0), slot, latent);
  store_vector(job.head_of_cache(job.value_cache, row, 0), slot, shared);
}

// What a thread needs for a product of one head of up to INVARIANT_ROWS tokens.
struct HeadScratch {
  ActivationBlock *quantized;
  float *in, *out;

  HeadScratch(const Layer &layer, float *at) {
    const uintptr_t line = alignof(ActivationBlock), here = reinterpret_cast<uintptr_t>(at);
    quantized = reinterpret_cast<ActivationBlock *>((here + line - 1) / line * line);
    in = reinterpret_cast<float *>(quantized + INVARIANT_ROWS * blocks_of(most(layer.latent)));
    out = in + INVARIANT_ROWS * most(layer.latent);
  }

  static int64_t most(const Latent &latent) { return std::max({latent.size, latent.nope, latent.value}); }

  // Multiplies `in`, [rows, inputs], into `out`, [rows, outputs].
  void multiply(const Linear &linear, int64_t rows, int64_t inputs) const {
    if (!linear.in_blocks()) return multiply_outputs(in, rows, inputs, linear, out, 0, linear.outputs);
    quantize_activations(in, rows, inputs, 0, blocks_of(inputs), quantized);
    compute_panels(block_product(quantized, rows, inputs, linear, out), 0, linear.outputs / BLOCK_PANEL);
  }

  static int64_t size(const Layer &layer) {
    if (!layer.latent.size) return 0;
    const int64_t numbers = most(layer.latent);
    return ExpertScratch::LINE_FLOATS * (1 + INVARIANT_ROWS * blocks_of(numbers)) +
           2 * INVARIANT_ROWS * numbers;
  }
};

// Makes the queries of one head for latents. made: the plain ones, [tokens, heads query].
void absorb_queries(const Attention &job, const float *made, int64_t head, int64_t first, int64_t last,
                    const HeadScratch &scratch) {
  const Layer &layer = *job.layer;
  const Latent &latent = layer.latent;
  const bool own_key_b = layer.key_b.weight; // which is the other way round already
  const Linear keys =
      own_key_b ? slice_outputs(layer.key_b, head * latent.size, latent.size, latent.nope)
                : slice_outputs(layer.value, head * (latent.nope + latent.value), latent.nope, latent.size);
  float *queries = job.queries + (first * layer.heads + head) * layer.query_dim();
  const int64_t stride = layer.heads * layer.query_dim();
  for (int64_t t = first; t < last; t++) {
    const float *own = made + t * layer.query_width() + head * latent.query();
    float *nope = scratch.in + (t - first) * latent.nope;
    for (int64_t n = 0; n < latent.nope; n++)
      nope[n] = keys.scale && !own_key_b ? own[n] * keys.scale[n] : own[n];
    float *rope = queries + (t - first) * stride + latent.size;
    std::copy(own + latent.nope, own + latent.query(), rope);
    rotate_head(job, rope, t);
  }
  if (!own_key_b) return multiply_transposed(keys, scratch.in, last - first, latent.size, queries, stride);
  scratch.multiply(keys, last - first, latent.nope);
  for (int64_t r = 0; r < last - first; r++)
    std::copy_n(scratch.out + r * latent.size, latent.size, queries + r * stride);
}

// Turns what attention of one head has made of latents into what it makes of values. to: [tokens, heads
// value].
void expand_values(const Attention &job, float *to, int64_t head, int64_t first, int64_t last,
                   const HeadScratch &scratch) {
  const Layer &layer = *job.layer;
  const Latent &latent = layer.latent;
  const int64_t rows = last - first, before = layer.key_b.weight ? 0 : latent.nope;
  const Linear values =
      slice_outputs(layer.value, head * (before + latent.value) + before, latent.value, latent.size);
  for (int64_t r = 0; r < rows; r++)
    std::copy_n(job.result + ((first + r) * layer.heads + head) * latent.size, latent.size,
                scratch.in + r * latent.size);
  scratch.multiply(values, rows, latent.size);
  for (int64_t r = 0; r < rows; r++)
    std::copy_n(scratch.out + r * latent.value, latent.value,
                to + (first + r) * layer.attended_width() + head * latent.value);
}

} // namespace
