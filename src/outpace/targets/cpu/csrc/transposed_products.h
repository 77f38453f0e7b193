// Products with a weight the other way round: y[r, k] = sum over n of x[r, n] w[n, k].
//
// Latent attention needs them (latent_attention.h): a query is multiplied with the weight that makes keys.
// Weights are read as they are held, in rows, in panels or in blocks, and all sums are of floats, also of
// weights in blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "block_products.h"
#include "lanes.h"
#include "linear.h"

namespace {

constexpr int64_t MOST_NOPE = 256; // numbers of a head without a position, in blocks (as in Python)

// Rows that are multiplied with weights together.
#if AVX == 512
constexpr int ROWS_AT_ONCE = 4;
#else
constexpr int ROWS_AT_ONCE = 2;
#endif

// Calls for some rows at a time.
template <typename Each> inline void each_rows(int64_t rows, Each each) {
  int64_t row = 0;
  for (; row + ROWS_AT_ONCE <= rows; row += ROWS_AT_ONCE)
    each(std::integral_constant<int, ROWS_AT_ONCE>{}, row);
  for (; row < rows; row++) each(std::integral_constant<int, 1>{}, row);
}

// x: [rows, count]; w: rows of length k, a multiple of LANES; y: rows `stride` apart.
template <typename W, int ROWS, int VECTORS>
inline void transposed_rows(const float *x, const W *w, int64_t count, int64_t k, float *y,
                            int64_t stride) {
  floats sums[ROWS][VECTORS] = {};
  for (int64_t n = 0; n < count; n++)
#pragma GCC unroll 4
    for (int s = 0; s < VECTORS; s++) {
      const floats wide = widen(w + n * k + s * LANES);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) sums[r][s] = fmadd(broadcast(x[r * count + n]), wide, sums[r][s]);
    }
  for (int r = 0; r < ROWS; r++)
    for (int s = 0; s < VECTORS; s++) store(sums[r][s], y + r * stride + s * LANES);
}

// The same of weights in panels of LANES outputs.
template <typename W, int ROWS>
inline void transposed_panels(const float *x, const W *w, int64_t count, int64_t k, float *y,
                              int64_t stride) {
  for (int64_t at = 0; at < k; at += SUMS_AT_ONCE) {
    floats sums[ROWS][SUMS_AT_ONCE] = {};
    for (int64_t n = 0; n < count; n += LANES)
#pragma GCC unroll 4
      for (int u = 0; u < SUMS_AT_ONCE; u++) {
        const floats wide = widen(w + n * k + (at + u) * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
          sums[r][u] = fmadd(load<floats>(x + r * count + n), wide, sums[r][u]);
      }
    for (int r = 0; r < ROWS; r++) sums_of(sums[r], y + r * stride + at);
  }
}

template <typename W>
void floats_transposed(const Linear &linear, const float *x, int64_t rows, int64_t k, float *y,
                       int64_t stride) {
  const W *w = static_cast<const W *>(linear.weight);
  const int64_t count = linear.outputs;
  each_rows(rows, [&](auto in, int64_t row) {
    constexpr int ROWS = decltype(in)::value;
    const float *from = x + row * count;
    float *to = y + row * stride;
    if (linear.in_panels) return transposed_panels<W, ROWS>(from, w, count, k, to, stride);
    int64_t at = 0;
    for (; at + 4 * LANES <= k; at += 4 * LANES)
      transposed_rows<W, ROWS, 4>(from, w + at, count, k, to + at, stride);
    for (; at < k; at += LANES) transposed_rows<W, ROWS, 1>(from, w + at, count, k, to + at, stride);
  });
}

// A chunk of all panels of a weight in blocks.
template <int CODE, bool HAS_MIN> struct TransposedChunk {
  static constexpr int PARTS = has_half_scales_of(CODE) ? 2 : 1; // of a block, with scales of their own

  int64_t panels, blocks;
  int zero_point; // the u of zero
  const uint8_t *codes[MOST_NOPE / BLOCK_PANEL];
  Scales scales[MOST_NOPE / BLOCK_PANEL];

  // x: [ROWS, panels BLOCK_PANEL]; y: from the chunk's first input on, rows `stride` apart.
  template <int ROWS> void add(const float *x, float *y, int64_t stride) const {
    for (int64_t b = 0; b < blocks; b++) {
      groups<ROWS>(std::make_integer_sequence<int, GROUPS / PARTS>{}, x, b, y + b * BLOCK_INPUTS, stride);
      if constexpr (PARTS == 2)
        groups<ROWS, GROUPS / 2>(std::make_integer_sequence<int, GROUPS / 2>{}, x, b, y + b * BLOCK_INPUTS,
                                 stride);
    }
  }

  // Groups of four inputs from FIRST on, which share their scales.
  template <int ROWS, int FIRST = 0, int... GROUP>
  void groups(std::integer_sequence<int, GROUP...>, const float *x, int64_t b, float *y,
              int64_t stride) const {
    const int64_t at = PARTS * b + (FIRST > 0);
    floats from_mins[ROWS] = {};
    if constexpr (HAS_MIN) {
      each_slice<ROWS>(x, [&](int64_t p, int64_t slice, const floats(&in)[ROWS]) {
        for (int r = 0; r < ROWS; r++)
          from_mins[r] = fmadd(in[r], load<floats>(scales[p].min[at] + slice), from_mins[r]);
      });
      for (int r = 0; r < ROWS && PARTS == 2; r++) from_mins[r] *= -32.f; // as `Scales` has it
    }
    (group<ROWS, FIRST + GROUP>(x, b, at, from_mins, y, stride), ...);
  }

  template <int ROWS, int G>
  void group(const float *x, int64_t b, int64_t at, const floats (&from_mins)[ROWS], float *y,
             int64_t stride) const {
    floats sums[ROWS][SUMS_AT_ONCE];
    for (int r = 0; r < ROWS; r++)
      for (int u = 0; u < SUMS_AT_ONCE; u++) sums[r][u] = from_mins[r];
    each_slice<ROWS>(x, [&](int64_t p, int64_t slice, const floats(&in)[ROWS]) {
      const bytes four = load_codes<CODE, G>(codes[p] + b * bits_of(CODE) * GROUP_BYTES + 4 * slice);
      const floats scale = load<floats>(scales[p].scale[at] + slice);
      floats scaled[ROWS];
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) scaled[r] = in[r] * scale;
#pragma GCC unroll 4
      for (int u = 0; u < SUMS_AT_ONCE; u++) {
        const floats w = __builtin_convertvector((ints(four) >> 8 * u & 255) - zero_point, floats);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) sums[r][u] = fmadd(scaled[r], w, sums[r][u]);
      }
    });
    for (int r = 0; r < ROWS; r++) sums_of(sums[r], y + r * stride + 4 * G);
  }

  // Calls for as many outputs as fit into a vector, with their numbers of x.
  template <int ROWS, typename Each> void each_slice(const float *x, Each each) const {
    for (int64_t p = 0; p < panels; p++)
      for (int64_t slice = 0; slice < BLOCK_PANEL; slice += LANES) {
        floats in[ROWS];
        for (int r = 0; r < ROWS; r++) in[r] = load<floats>(x + (r * panels + p) * BLOCK_PANEL + slice);
        each(p, slice, in);
      }
  }
};

inline void blocks_transposed(const Linear &linear, const float *x, int64_t rows, int64_t k, float *y,
                              int64_t stride) {
  const BlockFormat &format = BLOCK_FORMATS[linear.kind - FIRST_BLOCK_KIND];
  const uint8_t *chunk = static_cast<const uint8_t *>(linear.weight);
  dispatch_code(format, [&](auto code) {
    TransposedChunk<code.CODE, code.HAS_MIN> product;
    product.panels = linear.outputs / BLOCK_PANEL,
    product.zero_point = code.CODE == 3 ? 8 * format.zero_point : format.zero_point;
    for (int64_t from = 0; from < blocks_of(k);
         from += CHUNK_BLOCKS, chunk += chunk_bytes(format, CHUNK_BLOCKS)) {
      product.blocks = std::min(CHUNK_BLOCKS, blocks_of(k) - from);
      for (int64_t p = 0; p < product.panels; p++) {
        product.codes[p] = chunk + p * panel_bytes(format, blocks_of(k));
        load_scales(format, product.codes[p] + code_bytes(format, product.blocks), product.blocks,
                    product.scales[p]);
      }
      each_rows(rows, [&](auto in, int64_t row) {
        product.template add<decltype(in)::value>(x + row * linear.outputs,
                                                  y + row * stride + from * BLOCK_INPUTS, stride);
      });
    }
  });
}

// x: [rows, outputs]; y: rows `stride` apart. Where weights are integers with a scale for each output, x
// has been multiplied with the scales.
inline void multiply_transposed(const Linear &linear, const float *x, int64_t rows, int64_t k, float *y,
                                int64_t stride) {
  if (linear.in_blocks()) return blocks_transposed(linear, x, rows, k, y, stride);
  switch (linear.kind) {
  case 0: return floats_transposed<float>(linear, x, rows, k, y, stride);
  case 1: return floats_transposed<bfloat16>(linear, x, rows, k, y, stride);
  case 2: return floats_transposed<int8_t>(linear, x, rows, k, y, stride);
#ifdef HAS_FLOAT16
  case 3: return floats_transposed<_Float16>(linear, x, rows, k, y, stride);
#endif
  }
}

} // namespace
