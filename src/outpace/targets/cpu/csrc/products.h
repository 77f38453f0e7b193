// Products of the same rows with several linear layers, shared out among the threads of a team.
//
// The weight of each layer may be in rows, in panels or in blocks. Threads share out the outputs and
// never the rows, so that each weight is read by one thread, once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "block_amx.h"
#include "dense_products.h"
#include "linear.h"
#include "team.h"

namespace {

constexpr int64_t GRAIN = 4; // blocks of activations that a thread takes at once, at least

struct Product {
  const float *x; // [rows, K]
  float *y;       // one layer's [rows, outputs] after another's
  int64_t rows, k;
  const Linear *linears;
  int64_t count;
  ActivationBlock *quantized;   // [blocks of 32 inputs, rows]: room, if a layer is in blocks
  bool batch_invariant = false; // whether rows have the same bits however many, also of weights in rows

  bool in_blocks() const {
    return std::any_of(linears, linears + count, [](const Linear &linear) { return linear.in_blocks(); });
  }
};

// Quantises the inputs of a product, together with other threads.
void quantize_inputs(const Product &job, Team &team, int size) {
  for (int64_t begin, end; team.take(blocks_of(job.k), GRAIN, size, begin, end);)
    quantize_activations(job.x, job.rows, job.k, begin, end, job.quantized);
  team.barrier(size);
}

// The outputs from `begin` to `end` of a layer in blocks: of the panels that begin there.
void multiply_block_outputs(const Product &job, const Linear &linear, float *y, int64_t begin,
                            int64_t end) {
  compute_panels({job.quantized, job.rows, blocks_of(job.k), static_cast<const uint8_t *>(linear.weight),
                  linear.bias, linear.outputs, y, BLOCK_FORMATS[linear.kind - FIRST_BLOCK_KIND]},
                 (begin + BLOCK_PANEL - 1) / BLOCK_PANEL, (end + BLOCK_PANEL - 1) / BLOCK_PANEL);
}

// Where a panel begins, there or after: layers that came before may end within one.
int64_t up_to_panel(int64_t output) { return (output + PANEL - 1) / PANEL * PANEL; }

// Works on a product together with others. A share is as many panels as are taken
// side by side. Inputs of weights in blocks have been quantised before.
void multiply(const Product &job, Team &team, int size) {
  int64_t total = 0, begin, end;
  for (int64_t i = 0; i < job.count; i++) total += job.linears[i].outputs;
  int64_t grain = PANEL * (ACCUMULATORS / std::clamp<int64_t>(job.rows, 2, TILE_ROWS));
  if (job.in_blocks()) grain = BLOCK_PANEL;
  while (team.take(total, grain, size, begin, end)) {
    int64_t first = 0;
    for (int64_t i = 0; i < job.count; first += job.linears[i++].outputs) {
      const Linear &linear = job.linears[i];
      int64_t from = std::max(begin - first, int64_t(0));
      int64_t to = std::min(end - first, linear.outputs);
      float *y = job.y + job.rows * first;
      if (linear.in_blocks()) {
        if (from < to) multiply_block_outputs(job, linear, y, from, to);
        continue;
      }
      if (linear.in_panels) from = up_to_panel(from), to = up_to_panel(to);
      const int64_t some = job.batch_invariant && !linear.in_panels ? INVARIANT_ROWS : job.rows;
      for (int64_t r = 0; from < to && r < job.rows; r += some)
        multiply_outputs(job.x + r * job.k, std::min(some, job.rows - r), job.k, linear,
                         y + r * linear.outputs, from, to);
    }
  }
}

} // namespace
