// A linear layer, as all products read it, and slices of its outputs.
//
// Python's `LinearStruct` (weights/weight.py) has the same fields.
#pragma once

#include <cstdint>

#include "block_formats.h"

namespace {

constexpr int64_t FIRST_BLOCK_KIND = 4; // the first of the kinds of weights in blocks (as in Python)

// The weight of a linear layer is a matrix of float32, bfloat16, int8 (with a scale per output) or
// float16, and all arithmetic is in float32; or it is in quantised blocks, in panels of their own
// (block_formats.h).
struct Linear {
  const void *weight; // [outputs, K], or in panels
  const float *scale; // [outputs], or null
  const float *bias;  // [outputs], or null
  int64_t outputs, kind;
  int64_t in_panels; // whether the weight is [outputs / PANEL, K, PANEL] instead of [outputs, K]

  bool in_blocks() const { return kind >= FIRST_BLOCK_KIND; }
};

// Some outputs in a row, as a layer of their own; `first` begins a panel. inputs: of the layer.
inline Linear slice_outputs(Linear whole, int64_t first, int64_t outputs, int64_t inputs) {
  constexpr int64_t BYTES[FIRST_BLOCK_KIND] = {4, 2, 1, 2}; // of a weight
  int64_t before = 0;
  if (whole.in_blocks())
    before =
        first / BLOCK_PANEL * panel_bytes(BLOCK_FORMATS[whole.kind - FIRST_BLOCK_KIND], blocks_of(inputs));
  else
    before = first * inputs * BYTES[whole.kind];
  whole.weight = static_cast<const uint8_t *>(whole.weight) + before;
  if (whole.scale) whole.scale += first;
  if (whole.bias) whole.bias += first;
  whole.outputs = outputs;
  return whole;
}

} // namespace
