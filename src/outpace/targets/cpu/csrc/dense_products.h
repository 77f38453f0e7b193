// Dense products: y[r, n] = sum over k of x[r, k] w[n, k], of float32 inputs with weights that are not in
// quantised blocks.
//
// Decoding reads every weight for one token, and scoring a draft should read it once too. So the weights
// of a few outputs are loaded into registers together, and are multiplied with all rows before the next
// ones are loaded. Weights lie in rows, as embeddings need them, or in panels, which is faster. The order
// of a sum does not depend on how many rows share the call, up to INVARIANT_ROWS; of weights in panels it
// never does.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "linear.h"

namespace {

constexpr int TILE_ROWS = 6;           // rows of a tile, at most
constexpr int COMPUTE_BOUND_ROWS = 4;  // rows from which on all weights in rows are prefetched
constexpr int64_t PREFETCH_HEAD = 256; // weights of an output that are prefetched otherwise
constexpr int64_t INVARIANT_ROWS = 64; // rows that have the same bits however many (as in Python)
constexpr int64_t K_BLOCK = 512;       // inputs that are added up before the sums of earlier ones are added
constexpr int64_t PANEL = LANES;       // outputs whose weights lie together
constexpr int64_t ACCUMULATORS = 12;   // vectors of sums that a tile of panels has at once

// -- weights in rows -------------------------------------------------------------------------------

inline float scaled_and_biased(float sum, const Linear &linear, int64_t output) {
  if (linear.scale) sum *= linear.scale[output];
  return linear.bias ? sum + linear.bias[output] : sum;
}

// Adds LANES inputs to the sums of a tile. x: rows of length k; w: outputs `stride` apart.
template <typename W, int OUTPUTS, int ROWS>
inline void add_step(const float *x, const W *w, int64_t k, int64_t stride, floats (&sums)[ROWS][OUTPUTS]) {
  floats wide[OUTPUTS];
#pragma GCC unroll 8
  for (int o = 0; o < OUTPUTS; o++) {
    wide[o] = widen(w + o * stride);
    if (ROWS > 1) keep_in_register(wide[o]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    floats in = load<floats>(x + r * k);
    if (OUTPUTS > 1) keep_in_register(in);
#pragma GCC unroll 8
    for (int o = 0; o < OUTPUTS; o++) sums[r][o] = fmadd(wide[o], in, sums[r][o]);
  }
}

// OUTPUTS outputs of ROWS rows. spread: from one output to the next.
template <typename W, int OUTPUTS, int ROWS>
inline void compute_tile(const float *x, int64_t k, const Linear &linear, float *y, int64_t output,
                         int64_t spread) {
  constexpr int64_t LINE = 64 / sizeof(W); // weights that come from memory together
  const W *w = static_cast<const W *>(linear.weight) + output * k;
  // Processors see by themselves that weights are read in order, but only after a while, and not far
  // ahead. So those of the next outputs are prefetched: their beginning, or all if arithmetic takes
  // so long that nothing would be under way meanwhile.
  const int64_t ahead =
      ROWS >= COMPUTE_BOUND_ROWS || sizeof(W) < 4 ? 0 : std::max(k - PREFETCH_HEAD, int64_t(0));
  floats sums[ROWS][OUTPUTS] = {};
  int64_t at = 0;
  for (; at + LINE <= k; at += LINE) {
    if (at >= ahead)
      for (int o = 0; o < OUTPUTS; o++) __builtin_prefetch(w + (o * spread + 1) * k + at - ahead);
#pragma GCC unroll 2
    for (int64_t l = 0; l < LINE; l += LANES)
      add_step<W, OUTPUTS, ROWS>(x + at + l, w + at + l, k, spread * k, sums);
  }
  for (; at + LANES <= k; at += LANES) add_step<W, OUTPUTS, ROWS>(x + at, w + at, k, spread * k, sums);
  for (int r = 0; r < ROWS; r++)
    for (int o = 0; o < OUTPUTS; o++) {
      float found = sum(sums[r][o]);
      for (int64_t rest = at; rest < k; rest++)
        found += to_float(w[o * spread * k + rest]) * x[r * k + rest];
      y[r * linear.outputs + output + o * spread] = scaled_and_biased(found, linear, output + o * spread);
    }
}

// All rows for outputs from `output` on, OUTPUTS at a time; returns where it stopped. Those that go
// together are far apart, because memory is faster if it is read on in several places at once.
template <typename W, int OUTPUTS>
inline int64_t multiply_rows(const float *x, int64_t rows, int64_t k, const Linear &linear, float *y,
                             int64_t output, int64_t end) {
  const int64_t spread = (end - output) / OUTPUTS;
  for (int64_t last = output + spread; output < last; output++) {
    int64_t row = 0;
    for (int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS; tiles; tiles--) {
      int64_t take = (rows - row + tiles - 1) / tiles; // as even as can be
      const float *from = x + row * k;
      float *to = y + row * linear.outputs;
      switch (take) {
      case 1: compute_tile<W, OUTPUTS, 1>(from, k, linear, to, output, spread); break;
      case 2: compute_tile<W, OUTPUTS, 2>(from, k, linear, to, output, spread); break;
      case 3: compute_tile<W, OUTPUTS, 3>(from, k, linear, to, output, spread); break;
      case 4: compute_tile<W, OUTPUTS, 4>(from, k, linear, to, output, spread); break;
      case 5: compute_tile<W, OUTPUTS, 5>(from, k, linear, to, output, spread); break;
      default: compute_tile<W, OUTPUTS, TILE_ROWS>(from, k, linear, to, output, spread);
      }
      row += take;
    }
  }
  return output + (OUTPUTS - 1) * spread;
}

// -- weights in panels -----------------------------------------------------------------------------

#if AVX
// Writes eight rows of eight numbers as columns; to: rows PANEL apart.
inline void transpose_8x8(const __m256 (&row)[8], float *to) {
  __m256 pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
      fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xEE);
    }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(to + i * PANEL, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * PANEL, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
  }
}
#endif

// Packs weights of `width` outputs, rows of length k, one input after another.
template <typename W> void pack_panel(const W *w, int64_t k, int64_t width, int64_t depth, float *panel) {
  int64_t done = 0;
#if AVX
  for (; width == PANEL && done + LANES <= depth; done += LANES)
    for (int64_t o = 0; o < PANEL; o += 8) {
      float wide[8][LANES];
      for (int i = 0; i < 8; i++) {
        floats weights = widen(w + (o + i) * k + done);
        std::memcpy(wide[i], &weights, sizeof weights);
      }
      for (int part = 0; part < LANES; part += 8) {
        __m256 rows[8];
        for (int i = 0; i < 8; i++) rows[i] = load<__m256>(wide[i] + part);
        transpose_8x8(rows, panel + (done + part) * PANEL + o);
      }
    }
#endif
  for (int64_t o = 0; o < width; o++)
    for (int64_t at = done; at < depth; at++) panel[at * PANEL + o] = to_float(w[o * k + at]);
}

void scale_and_bias(int64_t rows, const Linear &linear, float *y, int64_t begin, int64_t end) {
  if (!linear.scale && !linear.bias) return;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t o = begin; o < end; o++)
      y[r * linear.outputs + o] = scaled_and_biased(y[r * linear.outputs + o], linear, o);
}

// Some inputs of some rows, the weights that these are multiplied with, and the sums that the products
// are added to.
template <typename W> struct PanelTile {
  const float *x;   // rows of length k
  int64_t k, depth; // inputs: of a row, and of the tile
  const W *panel;   // the first one
  int64_t panel_stride;
  float *sums;                    // of the first row and panel
  int64_t row_stride, sum_stride; // of sums: between rows, between panels
  bool begin;                     // whether there are no sums yet
};

// Works on ROWS rows and PANELS panels. Memory is read in PANELS places at once, which is how it is
// fastest; of inputs and weights, whatever there is less of stays in registers.
template <typename W, int ROWS, int PANELS> void add_panel_tile(const PanelTile<W> &tile) {
  const auto [x, k, depth, panel, panel_stride, sums, row_stride, sum_stride, begin] = tile;
  floats found[PANELS][ROWS] = {};
  for (int64_t at = 0; at < depth; at++) {
    const W *w = panel + at * PANEL;
    if (ROWS < PANELS) {
      floats in[ROWS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) keep_in_register(in[r] = broadcast(x[r * k + at]));
#pragma GCC unroll 8
      for (int p = 0; p < PANELS; p++) {
        floats wide = widen(w + p * panel_stride);
        if (ROWS > 1) keep_in_register(wide);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) found[p][r] = fmadd(in[r], wide, found[p][r]);
      }
    } else {
      floats wide[PANELS];
#pragma GCC unroll 8
      for (int p = 0; p < PANELS; p++) keep_in_register(wide[p] = widen(w + p * panel_stride));
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        floats in = broadcast(x[r * k + at]);
        if (PANELS > 1) keep_in_register(in);
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++) found[p][r] = fmadd(in, wide[p], found[p][r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      float *to = sums + r * row_stride + p * sum_stride;
      floats total = found[p][r];
      if (!begin) total += load<floats>(to);
      std::memcpy(to, &total, sizeof total);
    }
}

// The same for any number of rows.
template <typename W, int PANELS> void add_panel_tiles(PanelTile<W> tile, int64_t rows) {
  for (int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS; tiles; tiles--) {
    int64_t take = (rows + tiles - 1) / tiles; // as even as can be
    switch (take) {
    case 1: add_panel_tile<W, 1, PANELS>(tile); break;
    case 2: add_panel_tile<W, 2, PANELS>(tile); break;
    case 3: add_panel_tile<W, 3, PANELS>(tile); break;
    case 4: add_panel_tile<W, 4, PANELS>(tile); break;
    case 5: add_panel_tile<W, 5, PANELS>(tile); break;
    default: add_panel_tile<W, TILE_ROWS, PANELS>(tile);
    }
    rows -= take;
    tile.x += take * tile.k;
    tile.sums += take * tile.row_stride;
  }
}

// Takes PANELS panels at once while there are as many, far apart, so that each place in memory is read
// on for long; returns where it stopped. ROWS: 0 where their number is not known before.
template <typename W, int ROWS, int PANELS>
int64_t panels_side_by_side(const float *x, int64_t rows, int64_t k, const Linear &linear, float *y,
                            int64_t output, int64_t end) {
  const W *w = static_cast<const W *>(linear.weight);
  const int64_t spread = (end - output) / PANEL / PANELS * PANEL;
  for (int64_t last = output + spread; output < last; output += PANEL)
    for (int64_t from = 0; from < k; from += K_BLOCK) {
      PanelTile<W> tile{x + from,
                        k,
                        std::min(K_BLOCK, k - from),
                        w + output * k + from * PANEL,
                        spread * k,
                        y + output,
                        linear.outputs,
                        spread,
                        !from};
      if constexpr (ROWS > 0)
        add_panel_tile<W, ROWS, PANELS>(tile);
      else
        add_panel_tiles<W, PANELS>(tile, rows);
    }
  return output + (PANELS - 1) * spread;
}

// Weights that lie in panels already; outputs in whole panels.
template <typename W>
void multiply_panels(const float *x, int64_t rows, int64_t k, const Linear &linear, float *y, int64_t begin,
                     int64_t end) {
  int64_t output = begin;
  switch (rows) {
  case 1: output = panels_side_by_side<W, 1, ACCUMULATORS / 2>(x, rows, k, linear, y, output, end); break;
  case 2: output = panels_side_by_side<W, 2, ACCUMULATORS / 2>(x, rows, k, linear, y, output, end); break;
  case 3: output = panels_side_by_side<W, 3, ACCUMULATORS / 3>(x, rows, k, linear, y, output, end); break;
  case 4: output = panels_side_by_side<W, 4, ACCUMULATORS / 4>(x, rows, k, linear, y, output, end); break;
  default: output = panels_side_by_side<W, 0, ACCUMULATORS / TILE_ROWS>(x, rows, k, linear, y, output, end);
  }
  panels_side_by_side<W, 0, 1>(x, rows, k, linear, y, output, end);
  scale_and_bias(rows, linear, y, begin, end);
}

// Up to two panels of outputs of many rows, as prompts have. The weights are packed so that they
// stay in the nearest cache while all rows go by. The order of sums is another than that of few rows.
template <typename W>
void multiply_many_rows(const float *x, int64_t rows, int64_t k, const Linear &linear, float *y,
                        int64_t output, int64_t width) {
  constexpr int64_t WIDE = 2 * PANEL;
  const W *w = static_cast<const W *>(linear.weight) + output * k;
  alignas(64) float panels[2 * K_BLOCK * PANEL] = {}, padded[TILE_ROWS * WIDE] = {};
  y += output;
  for (int64_t from = 0; from < k; from += K_BLOCK) {
    int64_t depth = std::min(K_BLOCK, k - from), row = 0;
    for (int64_t o = 0; o < width; o += PANEL)
      pack_panel(w + o * k + from, k, std::min(PANEL, width - o), depth, panels + o * K_BLOCK);
    for (int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS; tiles; tiles--) {
      int64_t take = (rows - row + tiles - 1) / tiles; // as even as can be
      const float *in = x + row * k + from;
      float *to = y + row * linear.outputs;
      bool fits = width == WIDE; // else what is beyond would be overwritten
      float *sums = fits ? to : padded;
      int64_t stride = fits ? linear.outputs : WIDE;
      for (int64_t r = 0; !fits && r < take; r++)
        std::memcpy(sums + r * WIDE, to + r * linear.outputs, width * sizeof(float));
      add_panel_tiles<float, 2>({in, k, depth, panels, K_BLOCK * PANEL, sums, stride, PANEL, !from}, take);
      for (int64_t r = 0; !fits && r < take; r++)
        std::memcpy(to + r * linear.outputs, sums + r * WIDE, width * sizeof(float));
      row += take;
    }
  }
  scale_and_bias(rows, linear, y - output, output, output + width);
}

// -- all of these ----------------------------------------------------------------------------------

template <typename W>
void multiply_outputs(const float *x, int64_t rows, int64_t k, const Linear &linear, float *y,
                      int64_t begin, int64_t end) {
  if (linear.in_panels) return multiply_panels<W>(x, rows, k, linear, y, begin, end);
  if (rows > INVARIANT_ROWS) {
    for (; begin < end; begin += 2 * PANEL)
      multiply_many_rows<W>(x, rows, k, linear, y, begin, std::min(2 * PANEL, end - begin));
    return;
  }
  int64_t o = begin, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, tallest = (rows + tiles - 1) / tiles;
  // As many outputs as leave a tile's sums, weights and input in registers.
  if (4 * tallest + 5 <= REGISTERS) o = multiply_rows<W, 4>(x, rows, k, linear, y, o, end);
  if (3 * tallest + 4 <= REGISTERS) o = multiply_rows<W, 3>(x, rows, k, linear, y, o, end);
  o = multiply_rows<W, 2>(x, rows, k, linear, y, o, end);
  multiply_rows<W, 1>(x, rows, k, linear, y, o, end);
}

// The outputs of one linear layer from `begin` to `end`.
void multiply_outputs(const float *x, int64_t rows, int64_t k, const Linear &linear, float *y,
                      int64_t begin, int64_t end) {
  switch (linear.kind) {
  case 0: return multiply_outputs<float>(x, rows, k, linear, y, begin, end);
  case 1: return multiply_outputs<bfloat16>(x, rows, k, linear, y, begin, end);
  case 2: return multiply_outputs<int8_t>(x, rows, k, linear, y, begin, end);
#ifdef HAS_FLOAT16
  case 3: return multiply_outputs<_Float16>(x, rows, k, linear, y, begin, end);
#endif
  }
}

} // namespace
