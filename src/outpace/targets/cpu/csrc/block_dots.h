// Codes of weights in registers, and the integer sums of their products with activations (dot products).
//
// Codes are unpacked to bytes, four inputs of as many outputs as fit into a vector. Their products are
// added up by vpdpbusd (VNNI), maddubs (AVX2, AVX-512), sdot (ARM) or plain C++: the sums are exact, so
// that all of them give the same.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "block_activations.h"
#include "block_formats.h"
#include "lanes.h"

namespace {

typedef uint16_t words __attribute__((vector_size(4 * LANES)));

// The number by which templates know a kind of codes: its bits, and its table.
constexpr int code_type(int bits, Table table) { return bits + 16 * table; }
constexpr int code_type(const BlockFormat &format) { return code_type(format.bits, format.table); }
constexpr int bits_of(int code) { return code % 16; }
// Whether u has 8 bits.
constexpr bool is_8_bit(int code) {
  const int table = code / 16;
  return code == 8 || table == IQ4_TABLE || table == IQ3_XXS_TABLE || table == IQ2_TABLE;
}
// Whether the halves of a block have scales of their own.
constexpr bool has_half_scales_of(int code) {
  return bits_of(code) == 2 || bits_of(code) == 3 || bits_of(code) == 6;
}

// What templates know of a kind of blocks. Further template parameters CODE and HAS_MIN are these.
template <int BITS_AND_TABLE, bool WITH_MIN> struct CodeType {
  static constexpr int CODE = BITS_AND_TABLE;
  static constexpr bool HAS_MIN = WITH_MIN;
};

// Calls with the `CodeType` of a kind.
template <typename Act> inline void dispatch_code(const BlockFormat &format, Act act) {
  switch (2 * code_type(format) + format.has_min) {
  case 2 * code_type(4, FP4_TABLE): return act(CodeType<code_type(4, FP4_TABLE), false>{});
  case 2 * code_type(4, IQ4_TABLE): return act(CodeType<code_type(4, IQ4_TABLE), false>{});
  case 2 * code_type(4, IQ3_S_TABLE): return act(CodeType<code_type(4, IQ3_S_TABLE), false>{});
  case 2 * code_type(4, IQ3_XXS_TABLE): return act(CodeType<code_type(4, IQ3_XXS_TABLE), false>{});
  case 2 * code_type(3, IQ2_TABLE): return act(CodeType<code_type(3, IQ2_TABLE), false>{});
  case 2 * code_type(3, IQ1_TABLE): return act(CodeType<code_type(3, IQ1_TABLE), false>{});
  case 5: return act(CodeType<2, true>{});
  case 6: return act(CodeType<3, false>{});
  case 8: return act(CodeType<4, false>{});
  case 9: return act(CodeType<4, true>{});
  case 10: return act(CodeType<5, false>{});
  case 11: return act(CodeType<5, true>{});
  case 12: return act(CodeType<6, false>{});
  default: return act(CodeType<8, false>{});
  }
}

// Looks up codes, each in the lower half of a byte.
inline bytes lookup(const uint8_t *table, bytes codes) {
#if AVX == 512 && defined(__AVX512BW__)
  const __m512i all_four = _mm512_broadcast_i32x4(load<__m128i>(table));
  return bytes(_mm512_shuffle_epi8(all_four, __m512i(codes)));
#elif AVX == 256
  const __m256i both = _mm256_broadcastsi128_si256(load<__m128i>(table));
  return bytes(_mm256_shuffle_epi8(both, __m256i(codes)));
#elif defined(__aarch64__)
  return bytes(vqtbl1q_u8(vld1q_u8(table), uint8x16_t(codes)));
#else
  for (int i = 0; i < 4 * LANES; i++) codes[i] = table[codes[i]];
  return codes;
#endif
}

// Bits move up by `left`, or down where that is negative.
template <int LEFT> inline words shifted(words bits) {
  if constexpr (LEFT >= 0)
    return bits << LEFT;
  else
    return bits >> -LEFT;
}

// The codes of a group of four inputs, of as many outputs as fit into a vector; those of 3 bits times
// 8, so that the u of zero is 32 as it is of codes of 6 bits. at: the block's first vector, from the
// slice on.
template <int CODE, int GROUP> inline bytes load_codes(const uint8_t *at) {
  if constexpr (CODE == 8) return load<bytes>(at + GROUP * GROUP_BYTES);
  if constexpr (CODE == 6) {
    auto vector = [&](int which) { return load<words>(at + (GROUP / 4 * 3 + which) * GROUP_BYTES); };
    if constexpr (GROUP % 4 < 3) return bytes(vector(GROUP % 4) & 0x3f3f);
    return bytes((vector(0) >> 6 & 0x0303) | (vector(1) >> 4 & 0x0c0c) | (vector(2) >> 2 & 0x3030));
  }
  if constexpr (bits_of(CODE) < 4) {
    constexpr int UP = CODE == 3 ? 3 : 0;
    words low = shifted<UP - 2 * (GROUP % 4)>(load<words>(at + GROUP / 4 * GROUP_BYTES)) & (0x0303 << UP);
    if constexpr (bits_of(CODE) == 3)
      low |= shifted<UP + 2 - GROUP>(load<words>(at + 2 * GROUP_BYTES)) & (0x0404 << UP);
    if constexpr (CODE >= 16) return lookup(CODE_TABLES[CODE / 16], bytes(low));
    return bytes(low);
  }
  words low = load<words>(at + GROUP % 4 * GROUP_BYTES);
  if constexpr (GROUP >= 4) low >>= 4;
  low &= 0x0f0f;
  if constexpr (CODE == 5) {
    words fifth = load<words>(at + 4 * GROUP_BYTES);
    if constexpr (GROUP < 4) fifth <<= 4 - GROUP;
    if constexpr (GROUP > 4) fifth >>= GROUP - 4;
    low |= fifth & 0x1010;
  }
  if constexpr (CODE >= 16) return lookup(CODE_TABLES[CODE / 16], bytes(low));
  return bytes(low);
}

// Four activations in all lanes.
inline ints broadcast_four(const int8_t *codes) {
  int32_t bits;
  std::memcpy(&bits, codes, sizeof bits);
  return bits - ints{};
}

// Adds up the products of codes of weights with activations, four to a lane.
// begin: with one of `ActivationBlock::corrections`, where the kind of blocks has no min.
#if defined(DOTS_VNNI512) || defined(DOTS_VNNI256)
constexpr bool SIGNED = false; // whether 128 is taken from codes of 8 bits, which are signed then
template <int CODE, bool HAS_MIN> struct Dots {
  ints sum;
  void begin() { sum = ints{}; }
  void begin(int32_t correction) { sum = correction - ints{}; }
  template <int GROUP> void add(bytes weights, const int8_t *x) {
#ifdef DOTS_VNNI512
    sum = ints(_mm512_dpbusd_epi32(__m512i(sum), __m512i(weights), __m512i(broadcast_four(x))));
#else
    sum = ints(_mm256_dpbusd_avx_epi32(__m256i(sum), __m256i(weights), __m256i(broadcast_four(x))));
#endif
  }
  floats floated() const { return __builtin_convertvector(sum, floats); }
};
#elif defined(DOTS_AVX512) || defined(DOTS_AVX2)
// Products are added up in 16 bits first, two of a group's to a lane, as long as these suffice. Where
// there is no min, that is all groups of 4 and 5 bits (small floats are as large as 16 * 12 * 127
// together), and the four that share a scale of codes of 3 and 6 bits: sums that begin with a
// correction, modulo 2^16, end as 8 * 32 * 127 at most. Otherwise it is all groups of 4 bits
// (8 * 2 * 15 * 127), and four of 5 bits and of 2, which share a scale. Codes of 8 bits would not do in
// pairs, unless they are signed and the sign goes to the activations: 2 * 128 * 127 is below 2^15.
constexpr bool SIGNED = true;
template <int CODE, bool HAS_MIN> struct Dots {
  static constexpr bool CORRECTED = !is_8_bit(CODE) && !HAS_MIN;
  static constexpr int FITTING = bits_of(CODE) == 4 ? 8 : CODE == 5 ? (HAS_MIN ? 4 : 8) : 4;
  static constexpr int LONG = is_8_bit(CODE) ? 1 : FITTING;
#ifdef DOTS_AVX512
  typedef __m512i wide;
  static wide pairs(wide a, wide b) { return _mm512_maddubs_epi16(a, b); }
  static wide plus16(wide a, wide b) { return _mm512_add_epi16(a, b); }
  static wide fours(wide a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
  static wide magnitude(wide a) { return _mm512_abs_epi8(a); }
  static wide with_sign(wide x, wide w) {
    return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
  }
#else
  typedef __m256i wide;
  static wide pairs(wide a, wide b) { return _mm256_maddubs_epi16(a, b); }
  static wide plus16(wide a, wide b) { return _mm256_add_epi16(a, b); }
  static wide fours(wide a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
  static wide magnitude(wide a) { return _mm256_abs_epi8(a); }
  static wide with_sign(wide x, wide w) { return _mm256_sign_epi8(x, w); }
#endif
  // Says that a sum is needed before the next group begins. Otherwise the compiler computes the
  // products of all groups first, which are more than there are registers, and adds them up later.
  template <typename Sum> static void settle(Sum &sum) {
#ifdef DOTS_AVX2
    asm volatile("" : "+x"(sum));
#endif
  }
  ints sum;
  wide part;
  void begin() { sum = ints{}; }
  void begin(int32_t correction) { part = wide(correction - ints{}); }
  template <int GROUP> void add(bytes weights, const int8_t *x) {
    wide in = wide(broadcast_four(x)), w = wide(weights);
    if constexpr (is_8_bit(CODE)) {
      w = wide(weights ^ 0x80);
      in = with_sign(in, w);
      w = magnitude(w);
    }
    wide products = pairs(w, in);
    part = GROUP % LONG || CORRECTED ? plus16(part, products) : products;
    if constexpr (GROUP % LONG == LONG - 1) sum = CORRECTED ? ints(fours(part)) : sum + ints(fours(part));
    if constexpr (LONG == 1)
      settle(sum);
    else
      settle(part);
  }
  floats floated() const { return __builtin_convertvector(sum, floats); }
};
#else
#ifdef DOTS_ARM
constexpr bool SIGNED = true;
#else
constexpr bool SIGNED = false;
#endif
template <int CODE, bool HAS_MIN> struct Dots {
  ints sum;
  void begin() { sum = ints{}; }
  void begin(int32_t correction) { sum = correction - ints{}; }
  template <int GROUP> void add(bytes weights, const int8_t *x) {
#ifdef DOTS_ARM
    bytes w = is_8_bit(CODE) ? weights ^ 0x80 : weights;
    sum = ints(vdotq_s32(int32x4_t(sum), int8x16_t(w), int8x16_t(broadcast_four(x))));
#else
    for (int lane = 0; lane < LANES; lane++) // written out: vectors of bytes are slow to take apart
      sum[lane] += weights[4 * lane] * x[0] + weights[4 * lane + 1] * x[1] + weights[4 * lane + 2] * x[2] +
                   weights[4 * lane + 3] * x[3];
#endif
  }
  floats floated() const { return __builtin_convertvector(sum, floats); }
};
#endif

} // namespace
