// What mixes the tokens of a layer, computed by all threads together: attention over keys and values, over
// latents, or a recurrence.
//
// Here is what threads share out, and where they wait for each other; what each of them computes is in
// attention.h, latent_attention.h and recurrence.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "forward.h"
#include "latent_attention.h"
#include "recurrence.h"

namespace {

inline void ForwardPass::attention(int64_t index, const Worker &worker) {
  const Layer &layer = layers[index];
  normalise_hidden(worker, layer.before_attention);
  const float *attended = layer.recurrence.kind ? recurrence(index, worker)
                          : layer.latent.size   ? attend_latents(index, worker)
                                                : attend(index, worker);
  product(attended, worker.output, layer.attended_width(), &layer.output, 1, worker.size);
  add_to_residual(worker, layer.after_attention, layer.residual_multiplier);
}

inline CacheVectors ForwardPass::keys_of(int64_t index) const {
  float *scales = cache.kind == FLOAT32 ? nullptr : cache.key_scales[index];
  return {cache.keys[index], scales, cache.kind, layers[index].dim};
}

inline CacheVectors ForwardPass::values_of(int64_t index) const {
  const Layer &layer = layers[index];
  float *scales = cache.kind == FLOAT32 ? nullptr : cache.value_scales[index];
  return {cache.values[index], scales, cache.kind, layer.latent.size ? layer.latent.rope : layer.dim};
}

// Writes the embedding of each token, normalised, and its hidden state after it, [tokens, 2 hidden].
inline void ForwardPass::join_embeddings(const Layer &layer, const Worker &worker, float *to) {
  const int64_t hidden = layer.hidden;
  for (int64_t begin, end; team.take(tokens(), 1, worker.size, begin, end);)
    for (int64_t r = begin; r < end; r++) {
      float *both = to + r * 2 * hidden;
      normalise(layer.embedding_norm, pass.embeddings + r * hidden, hidden, both);
      std::memcpy(both + hidden, worker.normed + r * hidden, hidden * sizeof(float));
    }
  team.barrier(worker.size);
}

// Returns the outputs of the heads of all tokens, [tokens, heads dim].
inline const float *ForwardPass::attend(int64_t index, const Worker &worker) {
  const Layer &layer = layers[index];
  const int64_t query_width = layer.query_width(), key_width = layer.kv_heads * layer.dim;
  float *new_keys = worker.work + tokens() * query_width, *new_values = new_keys + tokens() * key_width;
  float *result = new_values + tokens() * key_width, *in = worker.normed;
  if (layer.reads_embeddings) {
    in = result + tokens() * layer.attended_width();
    join_embeddings(layer, worker, in);
  }
  product(in, worker.work, layer.attention_inputs(), &layer.query, 3, worker.size);
  Attention attention{
      &layer, &pass,          worker.work,         new_keys, new_values, keys_of(index), values_of(index),
      result, worker.scratch, worker.split_results};
  if (layer.norm_over_heads) normalise_together(attention, worker.size);
  attend_heads(attention, worker.size);
  return result;
}

// All heads of a token are normalised as one vector: those of queries, and those of keys.
inline void ForwardPass::normalise_together(const Attention &job, int size) {
  const Layer &layer = *job.layer;
  const int64_t query_width = layer.heads * layer.dim, key_width = layer.kv_heads * layer.dim;
  for (int64_t begin, end; team.take(tokens(), 1, size, begin, end);)
    for (int64_t r = begin; r < end; r++) {
      normalise(layer.query_norm, job.queries + r * query_width, query_width,
                job.queries + r * query_width);
      normalise(layer.key_norm, job.keys + r * key_width, key_width, job.keys + r * key_width);
    }
  team.barrier(size);
}

// Attention over few tokens is shared out by rows and heads, over many by tokens too. By slots it is
// where there are fewer rows and heads than keep all threads busy to the end.
inline void ForwardPass::attend_heads(const Attention &job, int size) {
  const int64_t kv_heads = job.layer->kv_heads, heads = pass.rows * kv_heads;
  const bool many = pass.columns > TILE_TOKENS;
  const bool by_splits = job.split_results && heads % size && heads < 4 * size;
  const bool ready = job.layer->latent.size; // whether queries are rotated and keys are cached
  const int64_t tiles = many ? (pass.columns + TILE_TOKENS - 1) / TILE_TOKENS : 1;
  int64_t begin, end;
  if ((many || by_splits) && !ready) {
    while (team.take(heads, 1, size, begin, end))
      for (; begin < end; begin++) {
        store_keys_and_values(job, begin / kv_heads, begin % kv_heads);
        if (by_splits) rotate_queries(job, begin / kv_heads, begin % kv_heads, 0, pass.columns);
      }
    team.barrier(size);
  }
  if (by_splits) return attend_splits(job, size);
  while (team.take(heads * tiles, 1, size, begin, end))
    for (; begin < end; begin++) {
      int64_t head = begin / tiles, first = begin % tiles * TILE_TOKENS;
      int64_t row = head / kv_heads, kv_head = head % kv_heads;
      int64_t last = std::min(pass.columns, first + TILE_TOKENS);
      if (!many && !ready) store_keys_and_values(job, row, kv_head);
      if (!ready) rotate_queries(job, row, kv_head, first, last);
      AttentionTile(job, row, kv_head, first, last - first).compute();
    }
  team.barrier(size);
}

inline void ForwardPass::attend_splits(const Attention &job, int size) {
  const int64_t kv_heads = job.layer->kv_heads, heads = pass.rows * kv_heads;
  const int64_t splits = splits_of(pass.view), queries = pass.columns * job.heads_per_kv();
  int64_t begin, end;
  while (team.take(heads * splits, 1, size, begin, end))
    for (; begin < end; begin++) {
      int64_t head = begin / splits;
      SplitResults{job, head / kv_heads, head % kv_heads}.compute(begin % splits);
    }
  team.barrier(size);
  while (team.take(heads * queries, 1, size, begin, end))
    for (; begin < end; begin++) {
      int64_t head = begin / queries;
      SplitResults{job, head / kv_heads, head % kv_heads}.merge_all(begin % queries);
    }
  team.barrier(size);
}

// The same over latents: [tokens, heads value].
inline const float *ForwardPass::attend_latents(int64_t index, const Worker &worker) {
  const Layer &layer = layers[index];
  const int64_t all = tokens(), heads = layer.heads, rank = layer.query_a.outputs;
  const Linear linears[2] = {rank ? layer.query_a : layer.query, layer.key};
  product(worker.normed, worker.work, layer.hidden, linears, 2, worker.size);
  float *latents = worker.work + all * linears[0].outputs, *next = latents + all * layer.key.outputs;
  float *made = worker.work;
  if (rank) {
    normalise_rows(layer.query_norm, worker.work, rank, worker.size);
    made = next, next += all * layer.query_width();
    product(worker.work, made, rank, &layer.query, 1, worker.size);
  }
  float *queries = next, *result = queries + all * heads * layer.query_dim();
  float *values = result + all * heads * layer.dim;
  Attention attention{&layer,           &pass,
                      queries,          latents,
                      nullptr,          keys_of(index),
                      values_of(index), result,
                      worker.scratch,   worker.split_results};
  HeadScratch scratch(layer, worker.scratch);
  const int64_t parts_of_tokens = (all + INVARIANT_ROWS - 1) / INVARIANT_ROWS; // each keeps its bits
  int64_t begin, end;
  while (team.take(all + heads * parts_of_tokens, 1, worker.size, begin, end))
    for (; begin < end; begin++) {
      if (begin < all) {
        store_latent(attention, begin);
        continue;
      }
      const int64_t first = (begin - all) / heads * INVARIANT_ROWS;
      absorb_queries(attention, made, (begin - all) % heads, first, std::min(all, first + INVARIANT_ROWS),
                     scratch);
    }
  team.barrier(worker.size);
  attend_heads(attention, worker.size);
  while (team.take(heads * parts_of_tokens, 1, worker.size, begin, end))
    for (; begin < end; begin++) {
      const int64_t first = begin / heads * INVARIANT_ROWS;
      expand_values(attention, values, begin % heads, first, std::min(all, first + INVARIANT_ROWS),
                    scratch);
    }
  team.barrier(worker.size);
  return values;
}

// The same of a layer that keeps a state.
inline const float *ForwardPass::recurrence(int64_t index, const Worker &worker) {
  const Recurrence &how = layers[index].recurrence;
  product(worker.normed, worker.work, layers->hidden, how.products, how.count, worker.size);
  RecurrentPass job{how, reading.layers[index], reading.parents, pass.columns, {}, worker.work};
  for (int64_t i = 0; i < how.count; job.output += tokens() * how.products[i++].outputs)
    job.products[i] = job.output;
  const bool plain = how.kind == SHORT_CONVOLUTION;
  const int64_t heads = how.heads();
  const int64_t shares = plain ? (how.width + CHANNELS - 1) / CHANNELS : 2 * how.key_heads + heads;
  int64_t begin, end;
  while (team.take(pass.rows * shares, 1, worker.size, begin, end))
    for (; begin < end; begin++) {
      const int64_t row = begin / shares, number = begin % shares, first = number * CHANNELS;
      if (plain)
        convolve(job, row, first, std::min(CHANNELS, how.width - first));
      else
        convolve_head(job, row, number);
    }
  team.barrier(worker.size);
  if (plain) return job.output;
  while (team.take(pass.rows * heads, 1, worker.size, begin, end))
    for (; begin < end; begin++) compute_head(job, begin / heads, begin % heads);
  team.barrier(worker.size);
  if (how.kind == DELTA_RULE) return job.output;
  while (team.take(tokens() * how.key_heads, 1, worker.size, begin, end))
    for (; begin < end; begin++) gate_scan(job, begin / how.key_heads, begin % how.key_heads);
  team.barrier(worker.size);
  return job.output;
}

} // namespace
