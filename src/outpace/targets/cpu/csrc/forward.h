// A forward pass through decoder layers, on several threads: what each thread holds, the order of the
// steps, the MLP, and what follows the last layer.
//
// Where there are few tokens each thread adds up the hidden states of all of them, and normalises them, for
// itself: that takes less time than waiting for another thread. Of many tokens each thread does that for
// some: what all threads held for themselves would grow with their number.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kv_cache.h"
#include "latent_attention.h"
#include "products.h"
#include "recurrence.h"
#include "scratch.h"
#include "team.h"

namespace {

// What follows the last layer: a norm, or none, and the logits of each row's last tokens, or none.
struct Ending {
  const Norm *norm;
  const Linear *heads; // of some parts of the vocabulary, one after another
  int64_t head_count;
  float *logits; // one head's [rows, keep, outputs] after another's
  int64_t keep;
  float scale, cap; // by which logits are multiplied, and their soft bound; 0: none
  float *states;    // the output of each layer, [tokens, hidden], if that is wanted
  int64_t stride;   // how far the next layer's are
};

// What one thread of a pass works on.
struct Worker {
  int number, size;       // its own number, and how many threads there are
  bool holds_all;         // whether it has the hidden states of all tokens for itself
  int64_t first, last;    // the tokens whose hidden states it adds up and normalises
  float *hidden, *normed; // hidden states of all tokens, and the same normalised: [tokens, hidden]
  // Shared by all threads: what is added to the residual stream, and what products make before that.
  float *output, *work;
  float *scratch;       // for attention
  float *split_results; // of all threads; null where a row's slots are not shared out
};

struct ForwardPass {
  const Layer *layers;
  int64_t count;
  const Pass &pass;
  float *x; // [tokens, hidden]: what comes in, and then what comes out, where there is no head
  const KVCache &cache;
  Ending ending;
  StatePointers reading; // of the layers that keep a state
  Threads threads;
  Team team = {};

  int64_t tokens() const { return pass.rows * pass.columns; }

  void compute();

private:
  Worker begin(int size, int number) const;
  void layer(int64_t index, const Worker &worker);
  void mlp(const Layer &layer, const Worker &worker);
  void end(Worker worker);

  // What mixes tokens (forward_mixers.h).
  void attention(int64_t index, const Worker &worker);
  const float *attend(int64_t index, const Worker &worker);
  const float *attend_latents(int64_t index, const Worker &worker);
  const float *recurrence(int64_t index, const Worker &worker);
  void join_embeddings(const Layer &layer, const Worker &worker, float *to);
  void normalise_together(const Attention &job, int size);
  void attend_heads(const Attention &job, int size);
  void attend_splits(const Attention &job, int size);
  CacheVectors keys_of(int64_t index) const;
  CacheVectors values_of(int64_t index) const;

  // Mixtures of experts (forward_experts.h).
  void mixture(const Layer &layer, const Worker &worker);
  void mixture_of(const Layer &layer, const Worker &worker, int64_t first, int64_t rows);
  void route(const Layer &layer, const ExpertScratch &scratch, const float *x, int64_t rows, int size);
  void gather(const Mixture &mixture, const ExpertScratch &scratch, const Routes &routes, int64_t blocks,
              int64_t rows, int size);
  template <typename At> void multiply_all(int64_t count, int size, At at);
  void activate_and_quantize(const Layer &layer, const ExpertScratch &scratch, const Routes &routes,
                             int64_t rows, int size);
  void add_experts(const Layer &layer, const ExpertScratch &scratch, const Routes &routes, float *to,
                   int64_t rows, int size);
  ActivationBlock *quantized_inputs() const;

  // Steps that all of these share.
  void wait_if_shared(const Worker &worker);
  void write(const Worker &worker, float *to) const;
  void write_layer_output(int64_t index, const Worker &worker) const;
  void normalise_hidden(const Worker &worker, const Norm &norm);
  void normalise_rows(const Norm &norm, float *x, int64_t n, int size);
  void add_to_residual(const Worker &worker, const Norm &norm, float factor) const;
  void product(const float *in, float *out, int64_t k, const Linear *linears, int64_t number, int size);
  void activated_product(float *gate, const float *up, float *out, const Layer &layer, int size);
  void scale_logits(const Product &job, int size);
  Product product_of_rows(const float *in, float *out, int64_t rows, int64_t k, const Linear *linears,
                          int64_t number) const;
  float *quantized_scratch() const;
  float *float_scratch() const;
};

inline void ForwardPass::compute() {
  const Worker worker = begin(threads.size_here(), team.join());
  const int64_t hidden = layers->hidden, at = worker.first * hidden;
  std::memcpy(worker.hidden + at, x + at, (worker.last - worker.first) * hidden * sizeof(float));
  for (int64_t i = 0; i < count; i++) {
    layer(i, worker);
    if (i + 1 < count) write_layer_output(i, worker);
  }
  end(worker);
}

inline Worker ForwardPass::begin(int size, int number) const {
  const int64_t all = tokens(), floats = all * layers->hidden;
  const bool by_itself = holds_all_states(all, threads.count);
  float *output = float_scratch() + mixture_scratch(layers, count, all), *work = output + floats;
  float *hidden = work + all * product_scratch(layers, count) + (by_itself ? number * 2 * floats : 0);
  const int64_t first = by_itself ? 0 : all * number / size;
  const int64_t last = by_itself ? all : all * (number + 1) / size;
  const int64_t copies = by_itself ? threads.count : 1;
  float *tiles = work + all * product_scratch(layers, count) + copies * 2 * floats;
  float *shared = tiles + threads.count * attention_scratch(layers, count);
  if (!split_scratch(layers, count, pass.rows, pass.columns, pass.view)) shared = nullptr;
  tiles += number * attention_scratch(layers, count);
  return {number, size, by_itself, first, last, hidden, hidden + floats, output, work, tiles, shared};
}

// Where threads share the hidden states, waits until all of them have those of their tokens.
inline void ForwardPass::wait_if_shared(const Worker &worker) {
  if (!worker.holds_all) team.barrier(worker.size);
}

// Writes the hidden states that this thread answers for.
inline void ForwardPass::write(const Worker &worker, float *to) const {
  const int64_t at = worker.first * layers->hidden;
  if (!worker.holds_all || !worker.number)
    std::memcpy(to + at, worker.hidden + at, (worker.last - worker.first) * layers->hidden * sizeof(float));
}

inline void ForwardPass::write_layer_output(int64_t index, const Worker &worker) const {
  if (ending.states) write(worker, ending.states + index * ending.stride);
}

// Quantised activations begin with a line of the cache.
inline float *ForwardPass::quantized_scratch() const {
  uintptr_t line = alignof(ActivationBlock), at = reinterpret_cast<uintptr_t>(pass.scratch);
  return reinterpret_cast<float *>((at + line - 1) / line * line);
}

inline float *ForwardPass::float_scratch() const {
  return quantized_scratch() + tokens() * ::quantized_scratch(layers, count);
}

inline Product ForwardPass::product_of_rows(const float *in, float *out, int64_t rows, int64_t k,
                                            const Linear *linears, int64_t number) const {
  return {in,  out, rows, k, linears, number, reinterpret_cast<ActivationBlock *>(quantized_scratch()),
          true};
}

// The hidden states of all tokens, normalised.
inline void ForwardPass::normalise_hidden(const Worker &worker, const Norm &norm) {
  const int64_t hidden = layers->hidden;
  for (int64_t r = worker.first; r < worker.last; r++)
    normalise(norm, worker.hidden + r * hidden, hidden, worker.normed + r * hidden);
  wait_if_shared(worker);
}

// Adds the output of attention or of an MLP to the residual stream, through a norm if there is one. Nobody
// waits here: a thread normalises itself what it has added up.
inline void ForwardPass::add_to_residual(const Worker &worker, const Norm &norm, float factor) const {
  const int64_t hidden = layers->hidden;
  for (int64_t r = worker.first; r < worker.last; r++) {
    const float *output = worker.output + r * hidden;
    if (norm.kind) { // which has no parallel part after it, that would need what is there
      normalise(norm, output, hidden, worker.normed + r * hidden);
      output = worker.normed + r * hidden;
    }
    add(worker.hidden + r * hidden, output, factor, hidden);
  }
}

inline void ForwardPass::product(const float *in, float *out, int64_t k, const Linear *linears,
                                 int64_t number, int size) {
  Product job = product_of_rows(in, out, tokens(), k, linears, number);
  if (job.in_blocks()) quantize_inputs(job, team, size);
  multiply(job, team, size);
  team.barrier(size);
}

// gate: [tokens, inner], which becomes the input of the last product; up: the same, or null;
// out: [tokens, hidden].
inline void ForwardPass::activated_product(float *gate, const float *up, float *out, const Layer &layer,
                                           int size) {
  const int64_t all = tokens(), inner = layer.inner;
  Product job = product_of_rows(gate, out, all, inner, &layer.down, 1);
  auto activated = [&](int64_t at, int64_t width) {
    layer.apply_activation(gate + at, up ? up + at : nullptr, width);
  };
  int64_t begin, end;
  if (job.in_blocks()) {
    while (team.take(blocks_of(inner), GRAIN, size, begin, end)) {
      int64_t first = begin * BLOCK_INPUTS, width = std::min(end * BLOCK_INPUTS, inner) - first;
      for (int64_t t = 0; t < all; t++) activated(t * inner + first, width);
      quantize_activations(gate, all, inner, begin, end, job.quantized);
    }
  } else {
    while (team.take(all * inner, 64 * LANES, size, begin, end)) activated(begin, end - begin);
  }
  team.barrier(size);
  multiply(job, team, size);
  team.barrier(size);
}

inline void ForwardPass::normalise_rows(const Norm &norm, float *x, int64_t n, int size) {
  for (int64_t begin, end; team.take(tokens(), 1, size, begin, end);)
    for (; begin < end; begin++) normalise(norm, x + begin * n, n, x + begin * n);
  team.barrier(size);
}

inline void ForwardPass::layer(int64_t index, const Worker &worker) {
  if (layers[index].has_attention) attention(index, worker);
  if (layers[index].has_mlp) mlp(layers[index], worker);
}

inline void ForwardPass::mlp(const Layer &layer, const Worker &worker) {
  if (!layer.parallel || !layer.has_attention) normalise_hidden(worker, layer.before_mlp);
  if (layer.mixture.experts) return mixture(layer, worker);
  float *gate = worker.work, *up = layer.gated() ? gate + tokens() * layer.inner : nullptr;
  const Linear *first = layer.gated() ? &layer.gate : &layer.up;
  product(worker.normed, gate, layer.hidden, first, layer.gated() ? 2 : 1, worker.size);
  activated_product(gate, up, worker.output, layer, worker.size);
  add_to_residual(worker, layer.after_mlp, layer.residual_multiplier);
}

inline void ForwardPass::end(Worker worker) {
  const int64_t hidden = layers->hidden, keep = ending.keep;
  if (ending.norm) normalise_hidden(worker, *ending.norm), std::swap(worker.hidden, worker.normed);
  write_layer_output(count - 1, worker);
  if (!ending.heads) return write(worker, x);
  wait_if_shared(worker);
  if (worker.holds_all || !worker.number)
    for (int64_t a = 0; a < pass.rows; a++)
      std::memmove(worker.hidden + a * keep * hidden,
                   worker.hidden + ((a + 1) * pass.columns - keep) * hidden, keep * hidden * sizeof(float));
  wait_if_shared(worker);
  Product job = product_of_rows(worker.hidden, ending.logits, pass.rows * keep, hidden, ending.heads,
                                ending.head_count);
  if (job.in_blocks()) quantize_inputs(job, team, worker.size);
  multiply(job, team, worker.size);
  if (ending.scale != 1.f || ending.cap) scale_logits(job, worker.size);
}

inline void ForwardPass::scale_logits(const Product &job, int size) {
  int64_t total = 0, begin, end;
  for (int64_t i = 0; i < job.count; i++) total += job.rows * job.linears[i].outputs;
  team.barrier(size);
  while (team.take(total, 64 * LANES, size, begin, end))
    soft_cap(job.y + begin, end - begin, ending.scale, ending.cap);
}

} // namespace
