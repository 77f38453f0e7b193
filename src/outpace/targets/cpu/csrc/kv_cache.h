// The KV cache: floats, or numbers of 8 bits with a scale for each vector (kv_dtype.py), and how these
// become floats again.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace {

enum { FLOAT32 = 0, INT8 = 1, FP8 = 2 }; // kinds of numbers, as in Python

// The cache of all layers, by layer.
struct KVCache {
  void *const *keys, *const *values;              // [heads, slots, dim]
  float *const *key_scales, *const *value_scales; // [heads, slots], or null
  int64_t kind;
};

// The keys, or the values, of one head, from the first slot of a row on.
struct CacheVectors {
  void *numbers; // [slots, dim]
  float *scales; // [slots], or null
  int64_t kind, dim;

  const uint8_t *eight_bits(int64_t slot) const {
    return static_cast<const uint8_t *>(numbers) + slot * dim;
  }
};

// A float of at most 448 as torch.float8_e4m3fn: a sign, four bits of exponent, three of mantissa.
inline uint8_t to_e4m3(float x) {
  uint32_t bits = load<uint32_t>(&x);
  const uint8_t sign = bits >> 24 & 0x80;
  bits &= 0x7fffffff;
  const float size = load<float>(&bits);
  if (size < 0.015625f) return sign | uint8_t(std::nearbyint(size * 512.f)); // without an exponent
  bits += 0x7ffff + (bits >> 20 & 1); // to the nearest, and to an even one of two
  return sign | uint8_t((bits >> 20) - (120 << 3));
}

// LANES numbers of 8 bits.
template <int KIND> inline floats widen_8_bits(const uint8_t *from) {
  if (KIND == INT8) return widen(reinterpret_cast<const int8_t *>(from));
#if AVX == 512
  __m256i bits = _mm256_cvtepu8_epi16(load<__m128i>(from)), sign = _mm256_set1_epi16(0x80);
  __m256i size = _mm256_slli_epi16(_mm256_andnot_si256(sign, bits), 7);
  __m256i half = _mm256_or_si256(size, _mm256_slli_epi16(_mm256_and_si256(sign, bits), 8));
  return floats(_mm512_cvtph_ps(half)) * 256.f; // float16 has exponents that are 8 larger
#elif AVX == 256
  __m128i bits = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(load<int64_t>(from)));
  __m128i sign = _mm_set1_epi16(0x80), size = _mm_slli_epi16(_mm_andnot_si128(sign, bits), 7);
  __m128i half = _mm_or_si128(size, _mm_slli_epi16(_mm_and_si128(sign, bits), 8));
  return floats(_mm256_cvtph_ps(half)) * 256.f;
#else
  floats wide;
  for (int i = 0; i < LANES; i++) {
    const uint32_t sign = uint32_t(from[i] & 0x80) << 24, rest = from[i] & 0x7f;
    const uint32_t bits = sign | (rest + (120 << 3)) << 20, alone = sign | 0x3f800000;
    wide[i] = rest < 8 ? load<float>(&alone) * float(rest) / 512.f : load<float>(&bits);
  }
  return wide;
#endif
}

template <int KIND> inline void dequantize_vector(const CacheVectors &from, int64_t slot, float *to) {
  const float scale = from.scales[slot];
  const uint8_t *numbers = from.eight_bits(slot);
  for (int64_t d = 0; d < from.dim; d += LANES) {
    floats wide = widen_8_bits<KIND>(numbers + d) * scale;
    std::memcpy(to + d, &wide, sizeof wide);
  }
}

// Writes some slots of 8 bits as floats, [count, dim].
inline void dequantize_vectors(const CacheVectors &from, const int32_t *slots, int count, float *to) {
  for (int i = 0; i < count; i++)
    if (from.kind == INT8)
      dequantize_vector<INT8>(from, slots[i], to + i * from.dim);
    else
      dequantize_vector<FP8>(from, slots[i], to + i * from.dim);
}

// Writes a vector into a slot, with the bits that Python would write.
inline void store_vector(const CacheVectors &to, int64_t slot, const float *x) {
  if (to.kind == FLOAT32) {
    std::memcpy(static_cast<float *>(to.numbers) + slot * to.dim, x, to.dim * sizeof(float));
    return;
  }
  const float largest = to.kind == INT8 ? 127.f : 448.f;
  float most = 0.f, odd = 0.f;
  for (int64_t d = 0; d < to.dim; d++) {
    most = std::max(most, std::fabs(x[d]));
    odd += x[d] - x[d]; // 0, but for numbers that are not finite: then the scale is none either
  }
  const float scale = most / largest + odd, by = scale > 0.f ? scale : 1.f;
  uint8_t *numbers = static_cast<uint8_t *>(to.numbers) + slot * to.dim;
  for (int64_t d = 0; d < to.dim; d++) {
    const float share = std::min(largest, std::max(-largest, x[d] / by));
    numbers[d] = to.kind == INT8 ? uint8_t(int8_t(std::nearbyint(share))) : to_e4m3(share);
  }
  to.scales[slot] = scale;
}

} // namespace
