// Products of quantised activations with weights in blocks.
//
// Within a block all sums are integers, which are exact in any order (block_dots.h). Between blocks sums
// are floats, each added by one rounded multiplication and addition, in the order of the blocks. So an
// output of a row has the same bits whatever rows share the product, on any number of threads, and on all
// processors that round such a step once (AVX2, AVX-512, ARM).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "block_dots.h"
#include "gguf_blocks.h"
#include "lanes.h"

namespace {

// Rows of a tile, at most, and its vectors of outputs. Sums of integers stay in registers, and
// activations that two vectors share are loaded once.
#if AVX == 512
constexpr int BLOCK_TILE_ROWS = 8, TILE_VECTORS = 1;
#elif AVX == 256
constexpr int BLOCK_TILE_ROWS = 4, TILE_VECTORS = 2;
#else
constexpr int BLOCK_TILE_ROWS = 4, TILE_VECTORS = 1;
#endif
constexpr int64_t ROWS_PER_CHUNK = 32; // rows that use a chunk while it is in the nearest cache

// Bytes between what is worked on and what is prefetched. Panels follow one another, so that it is of the
// next panel at the end of a panel. On Xeons with AMX lines come in two steps: from PREFETCH_FAR into the
// second cache, where more of them can be under way, and from there into the first one.
#ifdef __AMX_INT8__
constexpr int64_t PREFETCH_AHEAD = 2048, PREFETCH_FAR = 16384;
#else
constexpr int64_t PREFETCH_AHEAD = 6144, PREFETCH_FAR = 0;
#endif

// Scales of a chunk of a panel, as floats.
struct Scales {
  alignas(64) float scale[2 * CHUNK_BLOCKS][BLOCK_PANEL]; // of each block, or of each half
  alignas(64) float min[2 * CHUNK_BLOCKS][BLOCK_PANEL];   // the same; of halves -1/32 of it
};

inline floats load_halves(const uint8_t *halves) {
#if AVX == 512
  return _mm512_cvtph_ps(load<__m256i>(halves));
#elif AVX == 256
  return _mm256_cvtph_ps(load<__m128i>(halves));
#else
  floats found;
  for (int lane = 0; lane < LANES; lane++) found[lane] = half_to_float(load_half(halves + 2 * lane));
  return found;
#endif
}

// As `e8m0_to_float_half`.
inline floats load_e8m0(const uint8_t *exponents) {
  floats found;
  for (int lane = 0; lane < LANES; lane++) found[lane] = e8m0_to_float_half(exponents[lane]);
  return found;
}

inline void store(floats value, float *to) { std::memcpy(to, &value, sizeof value); }

inline void load_scales(const BlockFormat &format, const uint8_t *at, int64_t blocks, Scales &to) {
  for (int64_t first = 0; first < BLOCK_PANEL; first += LANES) {
    if (!format.has_sub_scales) {
      const uint8_t *from = at + (format.has_e8m0_scales() ? 1 : 2) * first;
      for (int64_t b = 0; format.has_e8m0_scales() && b < blocks; b++, from += BLOCK_PANEL)
        store(load_e8m0(from), to.scale[b] + first);
      for (int64_t b = 0; !format.has_e8m0_scales() && b < blocks; b++, from += 2 * BLOCK_PANEL) {
        store(load_halves(from), to.scale[b] + first);
        if (format.has_min) from += 2 * BLOCK_PANEL, store(load_halves(from), to.min[b] + first);
      }
      continue;
    }
    floats scale = load_halves(at + 2 * first) * format.scale_unit, min = {};
    const uint8_t *sub_scales = at + 2 * BLOCK_PANEL;
    if (format.has_min) min = -load_halves(sub_scales + 2 * first), sub_scales += 2 * BLOCK_PANEL;
    for (int64_t half = 0; format.has_half_scales() && half < 2 * blocks;
         half++, sub_scales += BLOCK_PANEL) {
      if (!format.has_min) {
        floats one = widen(reinterpret_cast<const int8_t *>(sub_scales + first));
        store(scale * one * (code_type(format) == 3 ? 0.125f : 1.f), to.scale[half] + first);
        continue;
      }
      lanes<uint8_t> both = load<lanes<uint8_t>>(sub_scales + first), low = both & 15, high = both >> 4;
      store(scale * widen(reinterpret_cast<const int8_t *>(&low)), to.scale[half] + first);
      store(min * widen(reinterpret_cast<const int8_t *>(&high)) * (-1.f / 32), to.min[half] + first);
    }
    for (int64_t b = 0; !format.has_half_scales() && b < blocks;
         b++, sub_scales += format.sub_scales() * BLOCK_PANEL) {
      floats one = widen(reinterpret_cast<const int8_t *>(sub_scales + first));
      if (format.sub_scales() == 1) {
        store(scale * one, to.scale[b] + first);
        continue;
      }
      floats two = widen(reinterpret_cast<const int8_t *>(sub_scales + BLOCK_PANEL + first));
      store(scale * one, to.scale[b] + first), store(min * two, to.min[b] + first);
    }
  }
}

// What a block adds to an output of a row. These are all the steps that round, and all ways to the
// integer sums take them, in the order of the blocks. dot: the integer sum of the block; half: that of
// its first half, times the scale of that half, with the mins of both halves.
inline floats add_scaled(floats dot, floats scale, const ActivationBlock &in, floats to) {
  return fmadd(dot, scale * broadcast(in.scale), to);
}

inline floats add_min(floats min, const ActivationBlock &in, floats to) {
  return fmadd(min, broadcast(in.scaled_sum), to);
}

// mins: of both halves, from the first one on. part: number of the half.
inline floats add_half_min(const float (*mins)[BLOCK_PANEL], int64_t at, int part,
                           const ActivationBlock &in, floats half) {
  return fmadd(load<floats>(mins[part] + at), broadcast(float(unpack_correction(in.corrections[4 + part]))),
               half);
}

inline floats add_halves(floats half, floats dot, floats scale, const ActivationBlock &in, floats to) {
  return fmadd(fmadd(scale, dot, half), broadcast(in.scale), to);
}

// Prefetches the lines of a block that lies ahead of `from`, and one of its scales.
template <int CODE> inline void prefetch_block(const uint8_t *from) {
  constexpr int LINES = bits_of(CODE) + 1;
#pragma GCC unroll 9
  for (int line = 0; line < LINES; line++) {
    if (PREFETCH_FAR) __builtin_prefetch(from + PREFETCH_FAR + 64 * line, 0, 2);
    __builtin_prefetch(from + PREFETCH_AHEAD + 64 * line);
  }
}

// What the integer sum of a half of a block begins with, or of the whole of it. which: of `correction_of`.
template <int CODE> inline int32_t correction_at(const ActivationBlock &in, int which) {
  return is_8_bit(CODE) && has_half_scales_of(CODE) ? 4 * in.corrections[which] : in.corrections[which];
}

// Adds a chunk's part to the sums of ROWS rows of TILE_VECTORS slices of a panel. A slice is as many
// outputs as fit into a vector.
template <int CODE, bool HAS_MIN, int ROWS> struct BlockTile {
  const uint8_t *codes; // from the first slice on
  const Scales &scales;
  const ActivationBlock *x; // rows lie side by side, blocks `stride` apart
  int64_t stride, blocks;
  int correction;  // which of `ActivationBlock::corrections`
  bool prefetches; // whether the codes are read for the first time, so that those ahead are prefetched
  int64_t step;    // bytes of a block with its scales
  float *sums;     // [ROWS, BLOCK_PANEL], from the first slice on

  template <int... GROUP>
  inline void group(std::integer_sequence<int, GROUP...>, const uint8_t *at, const ActivationBlock *in,
                    Dots<CODE, HAS_MIN> (&dots)[ROWS][TILE_VECTORS]) const {
    auto add = [&](auto which) {
      constexpr int G = decltype(which)::value;
      bytes weights[TILE_VECTORS];
#pragma GCC unroll 2
      for (int s = 0; s < TILE_VECTORS; s++) weights[s] = load_codes<CODE, G>(at + 4 * LANES * s);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int s = 0; s < TILE_VECTORS; s++) dots[r][s].template add<G>(weights[s], in[r].codes + 4 * G);
    };
    (add(std::integral_constant<int, GROUP>{}), ...);
  }

  // Calls for each row and vector.
  template <typename Each> static inline void each(Each each) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int s = 0; s < TILE_VECTORS; s++) each(r, s);
  }

  void begin(Dots<CODE, HAS_MIN> (&dots)[ROWS][TILE_VECTORS], const ActivationBlock *in, int which) const {
    each([&](int r, int s) {
      if constexpr (HAS_MIN || (is_8_bit(CODE) && SIGNED))
        dots[r][s].begin();
      else
        dots[r][s].begin(correction_at<CODE>(in[r], which));
    });
  }

  static floats at_slice(const float *of_panel, int64_t slice, int s) {
    return load<floats>(of_panel + slice + s * LANES);
  }

  void compute(int64_t slice) const {
    floats found[ROWS][TILE_VECTORS];
    each([&](int r, int s) { found[r][s] = load<floats>(sums + r * BLOCK_PANEL + s * LANES); });
    const ActivationBlock *in = x;
    const uint8_t *at = codes;
    for (int64_t b = 0; b < blocks; b++, in += stride, at += bits_of(CODE) * GROUP_BYTES) {
      if (prefetches) prefetch_block<CODE>(codes + b * step);
      auto scale = [&](int64_t which, int s) { return at_slice(scales.scale[which], slice, s); };
      Dots<CODE, HAS_MIN> dots[ROWS][TILE_VECTORS];
      begin(dots, in, correction);
      if constexpr (has_half_scales_of(CODE)) {
        floats half[ROWS][TILE_VECTORS];
        group(std::integer_sequence<int, 0, 1, 2, 3>{}, at, in, dots);
        each([&](int r, int s) {
          half[r][s] = scale(2 * b, s) * dots[r][s].floated();
          for (int part = 0; HAS_MIN && part < 2; part++)
            half[r][s] = add_half_min(scales.min + 2 * b, slice + s * LANES, part, in[r], half[r][s]);
        });
        begin(dots, in, correction + 1);
        group(std::integer_sequence<int, 4, 5, 6, 7>{}, at, in, dots);
        each([&](int r, int s) {
          found[r][s] =
              add_halves(half[r][s], dots[r][s].floated(), scale(2 * b + 1, s), in[r], found[r][s]);
        });
      } else {
        group(std::make_integer_sequence<int, GROUPS>{}, at, in, dots);
        each([&](int r, int s) {
          found[r][s] = add_scaled(dots[r][s].floated(), scale(b, s), in[r], found[r][s]);
          if constexpr (HAS_MIN)
            found[r][s] = add_min(at_slice(scales.min[b], slice, s), in[r], found[r][s]);
        });
      }
    }
    each([&](int r, int s) { store(found[r][s], sums + r * BLOCK_PANEL + s * LANES); });
  }
};

// A linear layer whose weight is in blocks, and its inputs.
struct BlockProduct {
  const ActivationBlock *x; // [blocks, rows]
  int64_t rows, blocks;
  const uint8_t *panels;
  const float *bias; // or null
  int64_t outputs;
  float *y; // [rows, outputs]
  BlockFormat format;
};

template <int CODE, bool HAS_MIN, int ROWS>
void add_tile(const BlockProduct &job, const uint8_t *codes, const Scales &scales, int64_t row,
              int64_t from, int64_t blocks, float *sums) {
  const int64_t step = chunk_bytes(job.format, CHUNK_BLOCKS) / CHUNK_BLOCKS;
  for (int64_t slice = 0; slice < BLOCK_PANEL; slice += TILE_VECTORS * LANES)
    BlockTile<CODE, HAS_MIN, ROWS>{codes + 4 * slice, scales, job.x + from * job.rows + row,
                                   job.rows,          blocks, correction_of(job.format),
                                   !row && !slice,    step,   sums + slice}
        .compute(slice);
}

// Adds a chunk's part to the sums of `count` rows of a panel.
template <int CODE, bool HAS_MIN>
void add_chunk(const BlockProduct &job, const uint8_t *codes, const Scales &scales, int64_t row,
               int64_t count, int64_t from, int64_t blocks, float *sums) {
  for (int64_t tiles = (count + BLOCK_TILE_ROWS - 1) / BLOCK_TILE_ROWS; tiles; tiles--) {
    int64_t take = (count + tiles - 1) / tiles; // as even as can be
    switch (take) {
    case 1: add_tile<CODE, HAS_MIN, 1>(job, codes, scales, row, from, blocks, sums); break;
    case 2: add_tile<CODE, HAS_MIN, 2>(job, codes, scales, row, from, blocks, sums); break;
    case 3: add_tile<CODE, HAS_MIN, 3>(job, codes, scales, row, from, blocks, sums); break;
    case 4: add_tile<CODE, HAS_MIN, 4>(job, codes, scales, row, from, blocks, sums); break;
#if AVX == 512
    case 5: add_tile<CODE, HAS_MIN, 5>(job, codes, scales, row, from, blocks, sums); break;
    case 6: add_tile<CODE, HAS_MIN, 6>(job, codes, scales, row, from, blocks, sums); break;
    case 7: add_tile<CODE, HAS_MIN, 7>(job, codes, scales, row, from, blocks, sums); break;
    default: add_tile<CODE, HAS_MIN, 8>(job, codes, scales, row, from, blocks, sums);
#endif
    }
    row += take, sums += take * BLOCK_PANEL, count -= take;
  }
}

inline void add_chunk(const BlockProduct &job, const uint8_t *codes, const Scales &scales, int64_t row,
                      int64_t count, int64_t from, int64_t blocks, float *sums) {
  dispatch_code(job.format, [&](auto code) {
    add_chunk<code.CODE, code.HAS_MIN>(job, codes, scales, row, count, from, blocks, sums);
  });
}

inline void write_panel(const BlockProduct &job, int64_t panel, int64_t row, int64_t count,
                        const float *sums) {
  int64_t first = panel * BLOCK_PANEL, width = std::min(BLOCK_PANEL, job.outputs - first);
  for (int64_t r = 0; r < count; r++) {
    float *to = job.y + (row + r) * job.outputs + first;
    for (int64_t o = 0; o < width; o++)
      to[o] = job.bias ? sums[r * BLOCK_PANEL + o] + job.bias[first + o] : sums[r * BLOCK_PANEL + o];
  }
}

// Up to ROWS_PER_CHUNK rows use a chunk of a panel before the next one is read.
inline void compute_panel(const BlockProduct &job, int64_t panel) {
  const int64_t size = panel_bytes(job.format, job.blocks), whole = chunk_bytes(job.format, CHUNK_BLOCKS);
  alignas(64) float sums[ROWS_PER_CHUNK * BLOCK_PANEL];
  for (int64_t row = 0; row < job.rows; row += ROWS_PER_CHUNK) {
    const int64_t count = std::min(ROWS_PER_CHUNK, job.rows - row);
    const uint8_t *chunk = job.panels + panel * size;
    std::memset(sums, 0, count * BLOCK_PANEL * sizeof(float));
    for (int64_t from = 0; from < job.blocks; from += CHUNK_BLOCKS, chunk += whole) {
      const int64_t blocks = std::min(CHUNK_BLOCKS, job.blocks - from);
      Scales scales;
      load_scales(job.format, chunk + code_bytes(job.format, blocks), blocks, scales);
      add_chunk(job, chunk, scales, row, count, from, blocks, sums);
    }
    write_panel(job, panel, row, count, sums);
  }
}

} // namespace
