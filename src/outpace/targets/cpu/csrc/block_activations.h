// Activations quantised to 8 bits, for products with weights in blocks (Q8_1, in llama.cpp's words).
//
// Each row is quantised by itself, in blocks of 32 inputs with a scale of their own. With a block goes what
// has to be taken from the integer sums of its codes with unsigned weights. Which instructions make these
// sums is decided here, because it decides how such corrections are held.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "block_formats.h"
#include "lanes.h"

namespace {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define DOTS_VNNI512
#elif defined(__AVXVNNI__) && AVX == 256
#define DOTS_VNNI256
#elif AVX == 512 && defined(__AVX512BW__)
#define DOTS_AVX512
#elif AVX == 256
#define DOTS_AVX2
#elif defined(__ARM_FEATURE_DOTPROD)
#define DOTS_ARM
#endif

using ints = lanes<int32_t>;
typedef uint8_t bytes __attribute__((vector_size(4 * LANES)));

// 32 activations of a row: a line of the cache.
struct alignas(64) ActivationBlock {
  int8_t codes[BLOCK_INPUTS];
  float scale;      // what a code of 1 stands for
  float scaled_sum; // scale * sum of the codes
  // What sums with unsigned weights begin with (`pack_correction`): -12, -8, -16 and -128 times the sum of
  // the codes, and -32 times those of the first and the second half.
  int32_t corrections[6];
};

// Which of the corrections is that of a kind of blocks.
inline int correction_of(const BlockFormat &format) {
  if (format.has_half_scales())
    return 4; // codes of 3 bits are read times 8; where zero is 128 it is 4 times that
  switch (format.zero_point) {
  case 8: return 1;
  case 16: return 2;
  case 128: return 3;
  default: return 0;
  }
}

// The corrections of the sum of a group's first two products and of that of its last two: added up, or,
// where products are added up in 16 bits, each in a half of its own.
inline int32_t pack_correction(int32_t first, int32_t second) {
#if defined(DOTS_AVX512) || defined(DOTS_AVX2)
  return int32_t(uint32_t(second) << 16 | (uint32_t(first) & 0xffff));
#else
  return first + second;
#endif
}

// The sum of both.
inline int32_t unpack_correction(int32_t both) {
#if defined(DOTS_AVX512) || defined(DOTS_AVX2)
  return int16_t(both) + (both >> 16);
#else
  return both;
#endif
}

inline ints maximum(ints a, ints b) { return a > b ? a : b; }

// The largest of all lanes.
inline int32_t reduce_max(ints v) {
#if AVX == 512
  return _mm512_reduce_max_epi32(__m512i(v));
#else
  int32_t part[LANES];
  std::memcpy(part, &v, sizeof part);
  return *std::max_element(part, part + LANES);
#endif
}

// Sums of the codes of each half of a block: of the first two of each group of four, and of its last
// two.
struct HalfSums {
  int32_t even[2], odd[2];
};

// Writes the lowest bytes of 32 numbers as the codes of a block; returns their sums.
inline HalfSums store_codes(const ints (&numbers)[BLOCK_INPUTS / LANES], int8_t *to) {
  HalfSums sums = {};
#if AVX
#if AVX == 512
  const __m256i codes = _mm256_set_m128i(_mm512_cvtepi32_epi8(__m512i(numbers[1])),
                                         _mm512_cvtepi32_epi8(__m512i(numbers[0])));
#else
  auto low = [&](int which) { return __m256i(numbers[which] & 0xff); };
  const __m256i packed =
      _mm256_packus_epi16(_mm256_packus_epi32(low(0), low(1)), _mm256_packus_epi32(low(2), low(3)));
  const __m256i codes = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#endif
  std::memcpy(to, &codes, sizeof codes);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
  const __m256i firsts = _mm256_madd_epi16(pairs, _mm256_set1_epi32(1));
  const __m256i lasts = _mm256_madd_epi16(pairs, _mm256_set1_epi32(1 << 16));
  __m256i both = _mm256_hadd_epi32(firsts, lasts);
  both = _mm256_hadd_epi32(both, both);
  sums.even[0] = _mm256_extract_epi32(both, 0), sums.odd[0] = _mm256_extract_epi32(both, 1);
  sums.even[1] = _mm256_extract_epi32(both, 4), sums.odd[1] = _mm256_extract_epi32(both, 5);
#else
  for (int64_t v = 0; v < BLOCK_INPUTS / LANES; v++) {
    auto codes = __builtin_convertvector(numbers[v], lanes<int8_t>);
    std::memcpy(to + v * LANES, &codes, sizeof codes);
  }
  for (int64_t i = 0; i < BLOCK_INPUTS; i++) (i % 4 < 2 ? sums.even : sums.odd)[i / 16] += to[i];
#endif
  return sums;
}

// x: 32 floats. The largest is rounded to 127 or -127. No number, or an infinite one, makes the scale
// such, and with it all outputs of the row.
inline void quantize_block(const float *x, ActivationBlock &to) {
  const float rounder = 12582912.f; // 1.5 * 2^23: adding it rounds to an integer
  ints most = {};
  for (int64_t i = 0; i < BLOCK_INPUTS; i += LANES) // as integers: those of larger numbers are larger
    most = maximum(most, load<ints>(x + i) & 0x7fffffff);
  int32_t found = reduce_max(most);
  float highest;
  std::memcpy(&highest, &found, sizeof highest);
  const bool small = highest < 1e-30f;
  const float steps = small ? 0.f : 127.f / highest;
  to.scale = small ? 0.f : highest / 127.f;
  ints numbers[BLOCK_INPUTS / LANES];
  for (int64_t v = 0; v < BLOCK_INPUTS / LANES; v++) {
    floats moved = load<floats>(x + v * LANES) * steps + rounder;
    numbers[v] = load<ints>(&moved) - 0x4b400000;
  }
  const auto [even, odd] = store_codes(numbers, to.codes);
  const int32_t evens = even[0] + even[1], odds = odd[0] + odd[1], sum = evens + odds;
  to.scaled_sum = to.scale * float(sum);
  to.corrections[0] = pack_correction(-12 * evens, -12 * odds);
  to.corrections[1] = pack_correction(-8 * evens, -8 * odds);
  to.corrections[2] = pack_correction(-16 * evens, -16 * odds);
  to.corrections[3] = -128 * sum;
  to.corrections[4] = pack_correction(-32 * even[0], -32 * odd[0]);
  to.corrections[5] = pack_correction(-32 * even[1], -32 * odd[1]);
}

// Quantises blocks of all rows. x: rows of length k; to: [blocks, rows].
inline void quantize_activations(const float *x, int64_t rows, int64_t k, int64_t begin, int64_t end,
                                 ActivationBlock *to) {
  for (int64_t b = begin; b < end; b++)
    for (int64_t r = 0; r < rows; r++) {
      const float *from = x + r * k + b * BLOCK_INPUTS;
      const int64_t left = k - b * BLOCK_INPUTS;
      if (left >= BLOCK_INPUTS) {
        quantize_block(from, to[b * rows + r]);
        continue;
      }
      float last[BLOCK_INPUTS] = {}; // only here: filling it takes longer than rounding does
      std::memcpy(last, from, left * sizeof(float));
      quantize_block(last, to[b * rows + r]);
    }
}

} // namespace
