// Attention of one layer: keys and values of new tokens go into the cache, and queries go through the slots
// that their tokens see.
//
// Queries go through these slots in their order, wherever they are: so a token gets the same bits when it
// is decoded alone and when it is scored among drafts, in a chain or in a tree. Where a text is long and
// threads are idle, its slots are split among them (split KV, as in FlashDecoding).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention_kernel.h"
#include "kv_cache.h"
#include "layer.h"
#include "ops.h"

namespace {

constexpr int TILE_TOKENS = 8;        // tokens that go through the cache together
constexpr int MOST_HEADS_PER_KV = 64; // query heads that may share a key head (as in Python)

// The slots that a token sees, in blocks, and how far it has gone through them.
struct SeenSlots {
  const uint8_t *mask; // [view], or null
  int64_t view;        // slots that it may see
  int64_t next;
  int32_t seen[SLOT_BLOCK]; // the current block
  int count;

  // How many of the eight slots from the next one on it sees, if there are eight and `most` allows.
  int64_t of_eight(int64_t most) const {
    if (next + 8 > view || most < 8) return -1;
    return mask ? int64_t(load<uint64_t>(mask + next) * 0x0101010101010101u >> 56) : 8;
  }

  // Goes on to the next slots that it sees, at most SLOT_BLOCK.
  void next_block() {
    for (count = 0; next < view && count < SLOT_BLOCK;) {
      const int64_t eight = of_eight(SLOT_BLOCK - count);
      if (eight == 8)
        for (int i = 0; i < 8; i++) seen[count++] = int32_t(next++);
      else if (!eight)
        next += 8;
      else if (!mask || mask[next])
        seen[count++] = int32_t(next++);
      else
        next++;
    }
  }

  // Leaves out the next slots that it sees, this many.
  void skip(int64_t left) {
    while (next < view && left) {
      const int64_t eight = of_eight(left);
      left -= eight < 0 ? !mask || mask[next] : eight;
      next += eight < 0 ? 1 : 8;
    }
  }

  bool sees_the_same(const SeenSlots &other) const {
    return count == other.count && !std::memcmp(seen, other.seen, count * sizeof *seen);
  }
};

// The slots of a block that was copied.
constexpr int32_t IN_ORDER[SLOT_BLOCK] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                          16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                          32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                          48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

// What attention of a layer reads and writes.
struct Attention {
  const Layer *layer;
  const Pass *pass;
  float *queries, *keys, *values; // [tokens, heads query_dim], and [tokens, kv_heads dim] twice
  // [kv_heads, slots, dim], slots of all rows; of latents, these and the keys that all heads share.
  CacheVectors key_cache, value_cache;
  float *result;        // [tokens, heads dim]
  float *scratch;       // of this thread
  float *split_results; // of all threads; null where the slots of a row are not shared out

  // The part of a cache that belongs to a row and a key head.
  CacheVectors head_of_cache(const CacheVectors &cache, int64_t row, int64_t kv_head) const {
    const int64_t slot = pass->firsts[row] + (layer->latent.size ? 0 : kv_head * pass->slots);
    const int64_t bytes = slot * cache.dim * (cache.kind == FLOAT32 ? int64_t(sizeof(float)) : 1);
    return {static_cast<uint8_t *>(cache.numbers) + bytes, cache.scales ? cache.scales + slot : nullptr,
            cache.kind, cache.dim};
  }

  // Slots that a row's tokens may see: those of a short row do not depend on how long others are.
  int64_t view(int64_t row) const { return std::min(pass->view, pass->starts[row] + pass->columns); }

  // Query heads that share a key head.
  int64_t heads_per_kv() const { return layer->heads / layer->kv_heads; }

  // Query head h of those that share a key head, and where its output goes.
  float *query_of(int64_t row, int64_t kv_head, int64_t t, int64_t h) const {
    return queries + head_of(row, kv_head, t, h) * layer->query_dim();
  }
  float *result_of(int64_t row, int64_t kv_head, int64_t t, int64_t h) const {
    return result + head_of(row, kv_head, t, h) * layer->dim;
  }
  int64_t head_of(int64_t row, int64_t kv_head, int64_t t, int64_t h) const {
    return (row * pass->columns + t) * layer->heads + kv_head * heads_per_kv() + h;
  }

  // Writes the output of a query that has gone through all slots. head: the query itself.
  void write_output(const Query &query, const float *head) const {
    divide_by_weights(query, layer->dim);
    for (int64_t d = 0; layer->gated_heads && d < layer->dim; d += LANES) {
      const floats gate = load<floats>(head + layer->dim + d);
      const floats value = load<floats>(query.values + d) / (exponential(-gate) + 1.f);
      std::memcpy(query.values + d, &value, sizeof value);
    }
  }
};

int64_t splits_of(int64_t view) { return (view + SPLIT_SLOTS - 1) / SPLIT_SLOTS; }

// Rotates a head of token r to its position.
void rotate_head(const Attention &job, float *head, int64_t r) {
  if (job.layer->rotary == NO_ROTARY) return;
  const Angles &angles = job.pass->angles[job.layer->angles];
  const int64_t at = (angles.positions ? angles.positions[r] : r) * angles.dim;
  const int64_t dim = job.layer->latent.size ? job.layer->latent.rope : job.layer->dim;
  if ((job.layer->rotary == HALVES_HALF_TABLE ? 2 : 1) * angles.dim > dim) return;
  apply_rotary(head, angles.cosines + at, angles.sines + at, angles.dim, job.layer->rotary);
}

// Normalises one of the heads of a token, unless all of them are normalised together.
void normalise_head(const Layer &layer, const Norm &norm, float *head, int64_t number) {
  if (norm.kind && !layer.norm_over_heads)
    normalise(norm, head, layer.dim, head, number * layer.norm_stride);
}

// Puts the keys and values of one row's tokens into the cache.
void store_keys_and_values(const Attention &job, int64_t row, int64_t kv_head) {
  const Layer &layer = *job.layer;
  const Pass &pass = *job.pass;
  const CacheVectors keys = job.head_of_cache(job.key_cache, row, kv_head);
  const CacheVectors values = job.head_of_cache(job.value_cache, row, kv_head);
  for (int64_t t = 0; t < pass.columns; t++) {
    int64_t r = row * pass.columns + t, at = (r * layer.kv_heads + kv_head) * layer.dim;
    normalise_head(layer, layer.key_norm, job.keys + at, kv_head);
    rotate_head(job, job.keys + at, r);
    store_vector(keys, pass.starts[row] + t, job.keys + at);
    store_vector(values, pass.starts[row] + t, job.values + at);
  }
}

// Rotates the queries of one row's tokens from `first` up to `last` that share a key head.
void rotate_queries(const Attention &job, int64_t row, int64_t kv_head, int64_t first, int64_t last) {
  const Layer &layer = *job.layer;
  for (int64_t t = first; t < last; t++)
    for (int64_t h = 0; h < job.heads_per_kv(); h++) {
      float *head = job.query_of(row, kv_head, t, h);
      normalise_head(layer, layer.query_norm, head, kv_head * job.heads_per_kv() + h);
      rotate_head(job, head, row * job.pass->columns + t);
    }
}

// Some tokens of one row, for the query heads that share a key head.
struct AttentionTile {
  const Attention &job;
  const int64_t row, kv_head, first, tokens, dim, heads_per_kv;
  const CacheVectors keys, values;
  SeenSlots seen[TILE_TOKENS];
  Query queries[TILE_TOKENS * MOST_HEADS_PER_KV]; // one token's after another's

  AttentionTile(const Attention &job, int64_t row, int64_t kv_head, int64_t first, int64_t tokens)
      : job(job), row(row), kv_head(kv_head), first(first), tokens(tokens), dim(job.layer->dim),
        heads_per_kv(job.heads_per_kv()), keys(job.head_of_cache(job.key_cache, row, kv_head)),
        values(job.head_of_cache(job.value_cache, row, kv_head)) {}

  // The floats that a thread needs for this: dequantised keys and values, and sums.
  static int64_t scratch(int64_t heads_per_kv, int64_t dim) {
    return (2 * SLOT_BLOCK + TILE_TOKENS * heads_per_kv) * dim;
  }

  float *scratch_for_sums() const { return job.scratch + 2 * SLOT_BLOCK * dim; }

  int64_t size() const { return tokens * heads_per_kv; }

  // Lets the tokens begin after this many slots that they see.
  void begin_at(int64_t slots) {
    const Mask &mask = job.pass->masks[job.layer->mask];
    for (int64_t t = 0; t < tokens; t++) {
      const uint8_t *of_token = mask.seen;
      if (of_token) of_token += row * mask.row_stride + (first + t) * mask.column_stride;
      seen[t].mask = of_token;
      seen[t].view = job.view(row);
      seen[t].next = 0;
      seen[t].skip(slots);
    }
  }

  // Lets the queries begin: with the first slots, whose sums go to where the output goes, or anew, with
  // sums that go to `sums`.
  void begin(float *sums) {
    for (int64_t q = 0; q < size(); q++) {
      const int64_t t = first + q / heads_per_kv, h = q % heads_per_kv;
      float *values = sums ? sums + q * dim : job.result_of(row, kv_head, t, h);
      const float *sink = job.layer->sinks; // one more score of each head, without a value
      if (sink) sink += kv_head * heads_per_kv + h;
      queries[q] = {job.query_of(row, kv_head, t, h), values, -1e30f, 0.f};
      if (sink && !sums) queries[q].max_score = *sink, queries[q].weight_sum = 1.f;
      std::memset(values, 0, dim * sizeof(float));
    }
  }

  // Goes on through the next SPLIT_SLOTS slots that each token sees; returns whether one may see more.
  bool attend_split() {
    bool more = true;
    for (int64_t block = 0; more && block < SPLIT_SLOTS / SLOT_BLOCK; block++) {
      more = false;
      for (int64_t t = 0; t < tokens; t++) {
        seen[t].next_block();
        more |= seen[t].count == SLOT_BLOCK;
      }
      for (int64_t t = 0, next; t < tokens; t = next) {
        for (next = t + 1; next < tokens && seen[next].sees_the_same(seen[t]);) next++;
        if (seen[t].count)
          attend(queries + t * heads_per_kv, (next - t) * heads_per_kv, slot_block(seen[t]));
      }
    }
    return more;
  }

  // The current block of a token: in the cache, or dequantised.
  SlotBlock slot_block(const SeenSlots &token) const {
    const Layer &layer = *job.layer;
    const float *first = static_cast<const float *>(keys.numbers);
    const float *second = static_cast<const float *>(values.numbers);
    const int32_t *slots = token.seen;
    if (keys.kind != FLOAT32) {
      float *wide_keys = job.scratch, *wide_values = job.scratch + SLOT_BLOCK * dim;
      dequantize_vectors(keys, slots, token.count, wide_keys);
      dequantize_vectors(values, slots, token.count, wide_values);
      first = wide_keys, second = wide_values, slots = IN_ORDER;
    }
    if (layer.latent.size) // which are keys and values; the rotated part of the keys comes second
      return {first, first, slots, token.count, dim, layer.scaling, layer.cap, second, layer.latent.rope};
    return {first, second, slots, token.count, dim, layer.scaling, layer.cap, nullptr, 0};
  }

  void compute() {
    Query whole[TILE_TOKENS * MOST_HEADS_PER_KV];
    begin_at(0);
    begin(nullptr);
    bool more = attend_split();
    std::copy(queries, queries + size(), whole);
    while (more) {
      begin(scratch_for_sums());
      more = attend_split();
      for (int64_t q = 0; q < size(); q++) merge_splits(whole[q], queries[q], dim);
    }
    for (int64_t q = 0; q < size(); q++) job.write_output(whole[q], whole[q].head);
  }
};

// What the query heads that share a key head have come to in each split of a row's slots, for all of a
// row's tokens: their sums but for the first split's, which are where the output goes, and after these
// the highest score and the sum of the weights in each split.
struct SplitResults {
  const Attention &job;
  const int64_t row, kv_head;
  const int64_t queries = job.pass->columns * job.heads_per_kv(), dim = job.layer->dim;
  const int64_t splits = splits_of(job.pass->view);

  static int64_t size(int64_t queries, int64_t splits, int64_t dim) { return queries * splits * (dim + 2); }

  float *begin() const {
    return job.split_results + (row * job.layer->kv_heads + kv_head) * size(queries, splits, dim);
  }
  float *sums(int64_t split) const { return begin() + split * queries * dim; }
  float *softmax_state(int64_t split) const {
    return begin() + splits * queries * dim + split * queries * 2;
  }

  void compute(int64_t split) const {
    AttentionTile tile(job, row, kv_head, 0, job.pass->columns);
    tile.begin_at(split * SPLIT_SLOTS);
    tile.begin(split ? sums(split) : nullptr);
    tile.attend_split();
    for (int64_t q = 0; q < queries; q++) {
      softmax_state(split)[2 * q] = tile.queries[q].max_score;
      softmax_state(split)[2 * q + 1] = tile.queries[q].weight_sum;
    }
  }

  void merge_all(int64_t query) const {
    auto of = [&](int64_t split) {
      const float *own = softmax_state(split) + 2 * query;
      return Query{nullptr, sums(split) + query * dim, own[0], own[1]};
    };
    Query whole = of(0);
    const int64_t t = query / job.heads_per_kv(), h = query % job.heads_per_kv();
    whole.values = job.result_of(row, kv_head, t, h);
    for (int64_t split = 1; split < splits; split++) merge_splits(whole, of(split), dim);
    job.write_output(whole, job.query_of(row, kv_head, t, h));
  }
};

} // namespace
