// Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). The cache holds two vectors for a token:
// a latent, which the keys and values of all heads are made from, and a key that is rotated to the
// token's position, which all heads share.
//
// Making keys and values of all slots anew in each pass would take longer than all else. Instead a
// query is multiplied with the weight that makes keys, the other way round, and then meets the latents
// themselves; and what a head has seen of the latents is multiplied with the weight that makes values.
// So here are products the other way round, y[k] = sum over n of x[n] w[n, k], with weights as they are
// held: in rows, in panels, in blocks. They are all of floats, also those of blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "attention.h"
#include "block_products.h"
#include "lanes.h"
#include "part.h"

namespace {

// The sizes of a head.
struct Latent {
  int64_t size;          // of a latent; 0: there are none
  int64_t nope, rope; // numbers of a query: those without a position come first
  int64_t value;

  int64_t query() const { return nope + rope; }
};

constexpr int64_t MOST_NOPE = 256; // as in Python
// Rows that meet weights together.
#if AVX == 512
constexpr int AT_A_TIME = 4;
#else
constexpr int AT_A_TIME = 2;
#endif

// Calls for some rows at a time.
template <typename Each> inline void each_rows(int64_t rows, Each each) {
  int64_t row = 0;
  for (; row + AT_A_TIME <= rows; row += AT_A_TIME) each(std::integral_constant<int, AT_A_TIME>{}, row);
  for (; row < rows; row++) each(std::integral_constant<int, 1>{}, row);
}

// x: [rows, count]; w: rows of weights, k apart; y: rows `apart`. k: a multiple of LANES.
template <typename W, int IN, int SIDE>
inline void back_of_rows(const float *x, const W *w, int64_t count, int64_t k, float *y, int64_t apart) {
  floats sums[IN][SIDE] = {};
  for (int64_t n = 0; n < count; n++)
#pragma GCC unroll 4
    for (int s = 0; s < SIDE; s++) {
      const floats wide = widen(w + n * k + s * LANES);
#pragma GCC unroll 4
      for (int r = 0; r < IN; r++) sums[r][s] = fused(all(x[r * count + n]), wide, sums[r][s]);
    }
  for (int r = 0; r < IN; r++)
    for (int s = 0; s < SIDE; s++) store(sums[r][s], y + r * apart + s * LANES);
}

// The same of weights in panels of LANES outputs.
template <typename W, int IN>
inline void back_of_panels(const float *x, const W *w, int64_t count, int64_t k, float *y, int64_t apart) {
  for (int64_t at = 0; at < k; at += KEYS) {
    floats sums[IN][KEYS] = {};
    for (int64_t n = 0; n < count; n += LANES)
#pragma GCC unroll 4
      for (int u = 0; u < KEYS; u++) {
        const floats wide = widen(w + n * k + (at + u) * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < IN; r++) sums[r][u] = fused(load<floats>(x + r * count + n), wide, sums[r][u]);
      }
    for (int r = 0; r < IN; r++) sums_of(sums[r], y + r * apart + at);
  }
}

template <typename W>
void floats_transposed(const Part &part, const float *x, int64_t rows, int64_t k, float *y, int64_t apart) {
  const W *w = static_cast<const W *>(part.weight);
  const int64_t count = part.outputs;
  each_rows(rows, [&](auto in, int64_t row) {
    constexpr int IN = decltype(in)::value;
    const float *from = x + row * count;
    float *to = y + row * apart;
    if (part.laid_out) return back_of_panels<W, IN>(from, w, count, k, to, apart);
    int64_t at = 0;
    for (; at + 4 * LANES <= k; at += 4 * LANES) back_of_rows<W, IN, 4>(from, w + at, count, k, to + at, apart);
    for (; at < k; at += LANES) back_of_rows<W, IN, 1>(from, w + at, count, k, to + at, apart);
  });
}

// A chunk of all panels of a weight in blocks.
template <int BITS, bool LIFTED> struct TransposedChunk {
  static constexpr int PARTS = is_halved(BITS) ? 2 : 1; // of a block, with scales of their own

  int64_t panels, blocks;
  int middle; // the u of zero
  const uint8_t *codes[MOST_NOPE / WIDTH];
  Scales scales[MOST_NOPE / WIDTH];

  // x: [IN, panels WIDTH]; y: from the chunk's first input on, rows `apart`.
  template <int IN> void add(const float *x, float *y, int64_t apart) const {
    for (int64_t b = 0; b < blocks; b++) {
      groups<IN>(std::make_integer_sequence<int, GROUPS / PARTS>{}, x, b, y + b * SMALL, apart);
      if constexpr (PARTS == 2)
        groups<IN, GROUPS / 2>(std::make_integer_sequence<int, GROUPS / 2>{}, x, b, y + b * SMALL, apart);
    }
  }

  // Groups of four inputs from FIRST on, which share their scales.
  template <int IN, int FIRST = 0, int... GROUP>
  void groups(std::integer_sequence<int, GROUP...>, const float *x, int64_t b, float *y,
              int64_t apart) const {
    const int64_t at = PARTS * b + (FIRST > 0);
    floats lifted[IN] = {};
    if constexpr (LIFTED) {
      each_slice<IN>(x, [&](int64_t p, int64_t slice, const floats(&in)[IN]) {
        for (int r = 0; r < IN; r++)
          lifted[r] = fused(in[r], load<floats>(scales[p].lift[at] + slice), lifted[r]);
      });
      for (int r = 0; r < IN && PARTS == 2; r++) lifted[r] *= -32.f; // as `Scales` has it
    }
    (group<IN, FIRST + GROUP>(x, b, at, lifted, y, apart), ...);
  }

  template <int IN, int G>
  void group(const float *x, int64_t b, int64_t at, const floats (&lifted)[IN], float *y,
             int64_t apart) const {
    floats sums[IN][KEYS];
    for (int r = 0; r < IN; r++)
      for (int u = 0; u < KEYS; u++) sums[r][u] = lifted[r];
    each_slice<IN>(x, [&](int64_t p, int64_t slice, const floats(&in)[IN]) {
      const bytes four = codes_of<BITS, G>(codes[p] + b * bits_of(BITS) * VECTOR + 4 * slice);
      const floats scale = load<floats>(scales[p].scale[at] + slice);
      floats scaled[IN];
#pragma GCC unroll 4
      for (int r = 0; r < IN; r++) scaled[r] = in[r] * scale;
#pragma GCC unroll 4
      for (int u = 0; u < KEYS; u++) {
        const floats w = __builtin_convertvector((ints(four) >> 8 * u & 255) - middle, floats);
#pragma GCC unroll 4
        for (int r = 0; r < IN; r++) sums[r][u] = fused(scaled[r], w, sums[r][u]);
      }
    });
    for (int r = 0; r < IN; r++) sums_of(sums[r], y + r * apart + 4 * G);
  }

  // Calls for as many outputs as fit into a vector, with what meets them.
  template <int IN, typename Each> void each_slice(const float *x, Each each) const {
    for (int64_t p = 0; p < panels; p++)
      for (int64_t slice = 0; slice < WIDTH; slice += LANES) {
        floats in[IN];
        for (int r = 0; r < IN; r++) in[r] = load<floats>(x + (r * panels + p) * WIDTH + slice);
        each(p, slice, in);
      }
  }
};

inline void blocks_transposed(const Part &part, const float *x, int64_t rows, int64_t k, float *y,
                              int64_t apart) {
  const Form &form = FORMS[part.kind - BLOCKED];
  const uint8_t *chunk = static_cast<const uint8_t *>(part.weight);
  by_code(form, [&](auto code) {
    TransposedChunk<code.BITS, code.LIFTED> product;
    product.panels = part.outputs / WIDTH, product.middle = code.BITS == 3 ? 8 * form.middle : form.middle;
    for (int64_t from = 0; from < blocks_of(k); from += CHUNK, chunk += chunk_bytes(form, CHUNK)) {
      product.blocks = std::min(CHUNK, blocks_of(k) - from);
      for (int64_t p = 0; p < product.panels; p++) {
        product.codes[p] = chunk + p * panel_bytes(form, blocks_of(k));
        widen_scales(form, product.codes[p] + code_bytes(form, product.blocks), product.blocks,
                     product.scales[p]);
      }
      each_rows(rows, [&](auto in, int64_t row) {
        product.template add<decltype(in)::value>(x + row * part.outputs,
                                                  y + row * apart + from * SMALL, apart);
      });
    }
  });
}

// y[r, k] = sum over n of x[r, n] w[n, k]. x: [rows, outputs of the part]; y: rows `apart`. Integers
// with a scale for each output: x has been multiplied with these.
inline void multiply_transposed(const Part &part, const float *x, int64_t rows, int64_t k, float *y,
                                int64_t apart) {
  if (part.in_blocks()) return blocks_transposed(part, x, rows, k, y, apart);
  switch (part.kind) {
  case 0: return floats_transposed<float>(part, x, rows, k, y, apart);
  case 1: return floats_transposed<bfloat16>(part, x, rows, k, y, apart);
  case 2: return floats_transposed<int8_t>(part, x, rows, k, y, apart);
#ifdef HALVES
  case 3: return floats_transposed<_Float16>(part, x, rows, k, y, apart);
#endif
  }
}

} // namespace
