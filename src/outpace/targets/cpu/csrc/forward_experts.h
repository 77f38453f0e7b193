// A layer's mixture of experts, computed by all threads together.
//
// Tokens choose their experts first (experts.h). Then the products of all chosen experts are shared out as
// if they were one: each expert's weights are read once, for all tokens that chose it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "experts.h"
#include "forward.h"

namespace {

constexpr int64_t SHARE = 32; // blocks of one row that a thread takes at once

inline void ForwardPass::mixture(const Layer &layer, const Worker &worker) {
  const int64_t some = tokens_at_once(layer.mixture, layer.hidden, layer.inner, tokens());
  for (int64_t first = 0; first < tokens(); first += some)
    mixture_of(layer, worker, first, std::min(some, tokens() - first));
  add_to_residual(worker, layer.after_mlp, layer.residual_multiplier);
}

// A mixture of `rows` tokens from `first` on, into worker.output.
inline void ForwardPass::mixture_of(const Layer &layer, const Worker &worker, int64_t first, int64_t rows) {
  const Mixture &mixture = layer.mixture;
  const int64_t hidden = layer.hidden, pairs = rows * mixture.top_k;
  ExpertScratch scratch;
  scratch.lay_out(mixture, hidden, layer.inner, rows, float_scratch());
  route(layer, scratch, worker.normed + first * hidden, rows, worker.size);
  const Routes routes(mixture, scratch.chosen, pairs);
  gather(mixture, scratch, routes, blocks_of(hidden), rows, worker.size);
  const int64_t count = routes.count + (layer.inner > 0);
  multiply_all(2 * count, worker.size, [&](int64_t i) { // gates, and what they are multiplied with
    const bool gate = i % 2 == 0;
    if (i / 2 == routes.count)
      return block_product(quantized_inputs(), rows, hidden, gate ? layer.gate : layer.up,
                           gate ? scratch.shared_gates : scratch.shared_ups);
    const int64_t begin = routes.begins[i / 2];
    return block_product(
        scratch.given + begin * blocks_of(hidden), routes.size(i / 2), hidden,
        of_expert(gate ? mixture.gate : mixture.up, routes.experts[i / 2], mixture.inner, hidden),
        (gate ? scratch.gates : scratch.ups) + begin * mixture.inner);
  });
  activate_and_quantize(layer, scratch, routes, rows, worker.size);
  multiply_all(count, worker.size, [&](int64_t i) {
    if (i == routes.count)
      return block_product(scratch.inside_shared, rows, layer.inner, layer.down, scratch.shared_outputs);
    const int64_t begin = routes.begins[i], inner = mixture.inner;
    return block_product(scratch.inside + begin * blocks_of(inner), routes.size(i), inner,
                         of_expert(mixture.down, routes.experts[i], hidden, inner),
                         scratch.outputs + begin * hidden);
  });
  add_experts(layer, scratch, routes, worker.output + first * hidden, rows, worker.size);
}

inline ActivationBlock *ForwardPass::quantized_inputs() const {
  return reinterpret_cast<ActivationBlock *>(quantized_scratch());
}

// Quantises the inputs of the experts' products, [rows, hidden], and chooses experts for each token.
// The router's own products are of floats, and of so few rows at once that each keeps its bits.
inline void ForwardPass::route(const Layer &layer, const ExpertScratch &scratch, const float *x,
                               int64_t rows, int size) {
  const Mixture &mixture = layer.mixture;
  const int64_t hidden = layer.hidden, outputs = mixture.experts + (mixture.shared.weight != nullptr);
  quantize_inputs(product_of_rows(x, nullptr, rows, hidden, nullptr, 0), team, size);
  int64_t begin, end;
  while (team.take(outputs, 4, size, begin, end))
    for (int64_t r = 0; r < rows; r += INVARIANT_ROWS) {
      const int64_t few = std::min(INVARIANT_ROWS, rows - r), last = std::min(end, mixture.experts);
      if (begin < last)
        multiply_outputs(x + r * hidden, few, hidden, mixture.router, scratch.logits + r * mixture.experts,
                         begin, last);
      if (end > mixture.experts)
        multiply_outputs(x + r * hidden, few, hidden, mixture.shared, scratch.shares + r, 0, 1);
    }
  team.barrier(size);
  while (team.take(rows, 1, size, begin, end))
    for (; begin < end; begin++) {
      choose(mixture, scratch.logits + begin * mixture.experts, scratch.chosen + begin * mixture.top_k,
             scratch.weights + begin * mixture.top_k);
      float &share = scratch.shares[begin];
      share = mixture.shared.weight ? 1.f / (exponential(-share) + 1.f) : 1.f;
    }
  team.barrier(size);
}

// Puts the quantised inputs of the tokens of an expert side by side.
inline void ForwardPass::gather(const Mixture &mixture, const ExpertScratch &scratch, const Routes &routes,
                                int64_t blocks, int64_t rows, int size) {
  const ActivationBlock *from = quantized_inputs(); // [blocks, rows]
  for (int64_t begin, end; team.take(rows * mixture.top_k, 1, size, begin, end);)
    for (; begin < end; begin++) {
      const int64_t place = routes.place[begin], expert = routes.expert_of(place);
      const int64_t start = routes.begins[expert], stride = routes.size(expert);
      ActivationBlock *to = scratch.given + start * blocks + place - start;
      for (int64_t b = 0; b < blocks; b++) to[b * stride] = from[b * rows + begin / mixture.top_k];
    }
  team.barrier(size);
}

// Works on `count` products together with others. at: returns one of them.
template <typename At> inline void ForwardPass::multiply_all(int64_t count, int size, At at) {
  int64_t total = 0, begin, end;
  for (int64_t i = 0; i < count; i++) total += (at(i).outputs + BLOCK_PANEL - 1) / BLOCK_PANEL;
  while (team.take(total, 1, size, begin, end)) {
    int64_t first = 0;
    for (int64_t i = 0; i < count && first < end; i++) {
      const BlockProduct job = at(i);
      const int64_t panels = (job.outputs + BLOCK_PANEL - 1) / BLOCK_PANEL;
      const int64_t from = std::max(begin - first, int64_t(0)), to = std::min(end - first, panels);
      if (from < to) compute_panels(job, from, to);
      first += panels;
    }
  }
  team.barrier(size);
}

// Makes the inputs of the last products, of which a thread takes some of one row.
inline void ForwardPass::activate_and_quantize(const Layer &layer, const ExpertScratch &scratch,
                                               const Routes &routes, int64_t rows, int size) {
  const int64_t inner = layer.mixture.inner, pairs = rows * layer.mixture.top_k;
  const int64_t parts = (blocks_of(inner) + SHARE - 1) / SHARE;
  const int64_t own = (blocks_of(layer.inner) + SHARE - 1) / SHARE;
  auto some = [&](float *gate, const float *up, int64_t width, int64_t part, ActivationBlock *to,
                  int64_t stride) {
    const int64_t from = part * SHARE, last = std::min(from + SHARE, blocks_of(width));
    const int64_t at = from * BLOCK_INPUTS;
    layer.apply_activation(gate + at, up + at, std::min(last * BLOCK_INPUTS, width) - at);
    for (int64_t b = from; b < last; b++)
      quantize_activations(gate, 1, width, b, b + 1, to + b * (stride - 1));
  };
  for (int64_t begin, end; team.take(pairs * parts + rows * own, 1, size, begin, end);)
    for (; begin < end; begin++) {
      if (begin < pairs * parts) {
        const int64_t place = begin / parts, expert = routes.expert_of(place);
        const int64_t start = routes.begins[expert];
        some(scratch.gates + place * inner, scratch.ups + place * inner, inner, begin % parts,
             scratch.inside + start * blocks_of(inner) + place - start, routes.size(expert));
      } else {
        const int64_t left = begin - pairs * parts, row = left / own, at = row * layer.inner;
        some(scratch.shared_gates + at, scratch.shared_ups + at, layer.inner, left % own,
             scratch.inside_shared + row, rows);
      }
    }
  team.barrier(size);
}

// Adds up the outputs of a token's experts, and then that of the shared expert.
inline void ForwardPass::add_experts(const Layer &layer, const ExpertScratch &scratch, const Routes &routes,
                                     float *to, int64_t rows, int size) {
  const int64_t hidden = layer.hidden, chosen = layer.mixture.top_k;
  const int64_t width = SHARE * BLOCK_INPUTS, parts = (hidden + width - 1) / width;
  for (int64_t begin, end; team.take(rows * parts, 1, size, begin, end);)
    for (; begin < end; begin++) {
      const int64_t row = begin / parts, last = std::min((begin % parts + 1) * width, hidden);
      for (int64_t d = begin % parts * width; d < last; d += LANES) {
        floats found = {};
        for (int64_t i = row * chosen; i < (row + 1) * chosen; i++)
          found = fmadd(load<floats>(scratch.outputs + routes.place[i] * hidden + d),
                        broadcast(scratch.weights[i]), found);
        if (layer.inner)
          found = fmadd(load<floats>(scratch.shared_outputs + row * hidden + d),
                        broadcast(scratch.shares[row]), found);
        std::memcpy(to + row * hidden + d, &found, sizeof found);
      }
    }
  team.barrier(size);
}

} // namespace
