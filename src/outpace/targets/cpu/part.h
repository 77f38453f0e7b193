// A linear layer as all products read it.
#pragma once

#include <cstdint>

#include "block_layout.h"

namespace {

constexpr int64_t BLOCKED = 4; // the first of the kinds of weights in blocks (as in Python)

// A linear layer, one of those that the same rows are multiplied with. Its weight is a matrix of
// float32, bfloat16, int8 (with a scale per output) or float16, and all arithmetic is in float32; or
// it is in quantised blocks, laid out in panels of their own (block_layout.h).
struct Part {
  const void *weight; // [outputs, K], or laid out
  const float *scale; // [outputs], or null
  const float *bias;  // [outputs], or null
  int64_t outputs, kind;
  int64_t laid_out; // whether the weight is [outputs / PANEL, K, PANEL] instead of [outputs, K]

  bool in_blocks() const { return kind >= BLOCKED; }
};

// Some outputs in a row, as a layer of their own; `first` begins a panel. inputs: of the layer.
inline Part some_outputs(Part whole, int64_t first, int64_t outputs, int64_t inputs) {
  constexpr int64_t BYTES[BLOCKED] = {4, 2, 1, 2}; // of a weight
  int64_t before = 0;
  if (whole.in_blocks())
    before = first / WIDTH * panel_bytes(FORMS[whole.kind - BLOCKED], blocks_of(inputs));
  else
    before = first * inputs * BYTES[whole.kind];
  whole.weight = static_cast<const uint8_t *>(whole.weight) + before;
  if (whole.scale) whole.scale += first;
  if (whole.bias) whole.bias += first;
  whole.outputs = outputs;
  return whole;
}

} // namespace
