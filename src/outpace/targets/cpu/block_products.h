// Products of rounded activations with weights in quantised blocks: exact integer sums.
//
// Activations are rounded to 8 bits, each row by itself in blocks of 32 inputs. Within a block all
// sums are integers, which are exact in any order. Between blocks sums are floats, each added by one
// rounded multiplication and addition, in the order of the blocks. So an output of a row has the same
// bits whatever rows share the product, on any number of threads, and on all processors that round
// such a step once (AVX2, AVX-512, ARM).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "block_layout.h"
#include "lanes.h"

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

namespace {

using ints = lanes<int32_t>;
typedef uint8_t bytes __attribute__((vector_size(4 * LANES)));
typedef uint16_t words __attribute__((vector_size(4 * LANES)));

// Rows of a tile, at most, and its vectors of outputs. Sums of integers stay in registers, and
// activations that two vectors share are loaded once.
#if AVX == 512
constexpr int TALL = 8, BROAD = 1;
#elif AVX == 256
constexpr int TALL = 4, BROAD = 2;
#else
constexpr int TALL = 4, BROAD = 1;
#endif
constexpr int64_t BATCH = 32;  // rows that meet a chunk while it is in the nearest cache
// Bytes between what is worked on and what is called for from memory. Panels follow one another, so
// that it is the next panel's at the end of a panel. On Xeons with AMX lines come in two steps: from
// FAR into the second cache, where more of them can be under way, and from there into the first one.
#ifdef __AMX_INT8__
constexpr int64_t AHEAD = 2048, FAR = 16384;
#else
constexpr int64_t AHEAD = 6144, FAR = 0;
#endif
constexpr int64_t SLICES = WIDTH / LANES; // vectors of a panel

// -- activations -----------------------------------------------------------------------------------

// 32 activations of a row: a line of the cache.
struct alignas(64) Rounded {
  int8_t codes[SMALL];
  float scale;      // what a code of 1 stands for
  float weighted;   // scale * sum of the codes
  int32_t less[6];  // what is taken from sums of unsigned weights (`taken`): 12, 8, 16 and 128 times
                    // the sum of the codes, and 32 times those of the first and the second half
};

inline int less_of(const Form &form) {
  if (form.halved()) return 4; // codes of 3 bits are read times 8; of a middle of 128 it is 4 times that
  switch (form.middle) {
  case 8: return 1;
  case 16: return 2;
  case 128: return 3;
  default: return 0;
  }
}

// What is taken from the sum of a group's first two products and from that of its last two, as sums
// begin with it: added up, or where products are added up in 16 bits each in a half of its own.
inline int32_t taken(int32_t first, int32_t second) {
#if defined(DOTS_AVX512) || defined(DOTS_AVX2)
  return int32_t(uint32_t(second) << 16 | (uint32_t(first) & 0xffff));
#else
  return first + second;
#endif
}

// What both of them are together.
inline int32_t untaken(int32_t both) {
#if defined(DOTS_AVX512) || defined(DOTS_AVX2)
  return int16_t(both) + (both >> 16);
#else
  return both;
#endif
}

inline ints larger(ints a, ints b) { return a > b ? a : b; }

// The largest of all lanes.
inline int32_t largest(ints v) {
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
struct Halves {
  int32_t even[2], odd[2];
};

// Writes the lowest bytes of 32 numbers as the codes of a block; returns their sums.
inline Halves put_codes(const ints (&numbers)[SMALL / LANES], int8_t *to) {
  Halves sums = {};
#if AVX
#if AVX == 512
  const __m256i codes = _mm256_set_m128i(_mm512_cvtepi32_epi8(__m512i(numbers[1])),
                                         _mm512_cvtepi32_epi8(__m512i(numbers[0])));
#else
  auto low = [&](int which) { return __m256i(numbers[which] & 0xff); };
  const __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(low(0), low(1)),
                                             _mm256_packus_epi32(low(2), low(3)));
  const __m256i codes =
      _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
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
  for (int64_t v = 0; v < SMALL / LANES; v++) {
    auto codes = __builtin_convertvector(numbers[v], lanes<int8_t>);
    std::memcpy(to + v * LANES, &codes, sizeof codes);
  }
  for (int64_t i = 0; i < SMALL; i++) (i % 4 < 2 ? sums.even : sums.odd)[i / 16] += to[i];
#endif
  return sums;
}

// x: 32 floats. The largest is rounded to 127 or -127. No number, or an infinite one, makes the scale
// such, and with it all outputs of the row.
inline void round_block(const float *x, Rounded &to) {
  const float rounder = 12582912.f; // 1.5 * 2^23: adding it rounds to an integer
  ints most = {};
  for (int64_t i = 0; i < SMALL; i += LANES) // as integers: those of larger numbers are larger
    most = larger(most, load<ints>(x + i) & 0x7fffffff);
  int32_t found = largest(most);
  float highest;
  std::memcpy(&highest, &found, sizeof highest);
  const bool small = highest < 1e-30f;
  const float steps = small ? 0.f : 127.f / highest;
  to.scale = small ? 0.f : highest / 127.f;
  ints numbers[SMALL / LANES];
  for (int64_t v = 0; v < SMALL / LANES; v++) {
    floats moved = load<floats>(x + v * LANES) * steps + rounder;
    numbers[v] = load<ints>(&moved) - 0x4b400000;
  }
  const auto [even, odd] = put_codes(numbers, to.codes);
  const int32_t evens = even[0] + even[1], odds = odd[0] + odd[1], sum = evens + odds;
  to.weighted = to.scale * float(sum);
  to.less[0] = taken(-12 * evens, -12 * odds);
  to.less[1] = taken(-8 * evens, -8 * odds);
  to.less[2] = taken(-16 * evens, -16 * odds);
  to.less[3] = -128 * sum;
  to.less[4] = taken(-32 * even[0], -32 * odd[0]);
  to.less[5] = taken(-32 * even[1], -32 * odd[1]);
}

// Rounds blocks of all rows. x: rows k apart; to: [blocks, rows].
inline void round_blocks(const float *x, int64_t rows, int64_t k, int64_t begin, int64_t end,
                         Rounded *to) {
  for (int64_t b = begin; b < end; b++)
    for (int64_t r = 0; r < rows; r++) {
      const float *from = x + r * k + b * SMALL;
      const int64_t left = k - b * SMALL;
      if (left >= SMALL) {
        round_block(from, to[b * rows + r]);
        continue;
      }
      float last[SMALL] = {}; // only here: filling it takes longer than rounding does
      std::memcpy(last, from, left * sizeof(float));
      round_block(last, to[b * rows + r]);
    }
}

// -- codes of weights in registers -----------------------------------------------------------------

// The number that templates know codes by: their bits, and more where they are looked up.
constexpr int code_of(int bits, Table table) { return bits + 16 * table; }
constexpr int code_of(const Form &form) { return code_of(form.bits, form.table); }
constexpr int bits_of(int code) { return code % 16; }
// Whether u has 8 bits.
constexpr bool is_wide(int code) {
  const int table = code / 16;
  return code == 8 || table == UNEVEN || table == EIGHT || table == THREE;
}
// Whether the halves of a block have scales of their own.
constexpr bool is_halved(int code) {
  return bits_of(code) == 2 || bits_of(code) == 3 || bits_of(code) == 6;
}

// What templates know of a kind of blocks.
template <int CODE, bool HAS_LIFTS> struct Coded {
  static constexpr int BITS = CODE;
  static constexpr bool LIFTED = HAS_LIFTS;
};

// Calls with the `Coded` of a kind.
template <typename Act> inline void by_code(const Form &form, Act act) {
  switch (2 * code_of(form) + form.lifted) {
  case 2 * code_of(4, FLOATS): return act(Coded<code_of(4, FLOATS), false>{});
  case 2 * code_of(4, UNEVEN): return act(Coded<code_of(4, UNEVEN), false>{});
  case 2 * code_of(4, ODD): return act(Coded<code_of(4, ODD), false>{});
  case 2 * code_of(4, EIGHT): return act(Coded<code_of(4, EIGHT), false>{});
  case 2 * code_of(3, THREE): return act(Coded<code_of(3, THREE), false>{});
  case 2 * code_of(3, SHIFTED): return act(Coded<code_of(3, SHIFTED), false>{});
  case 5: return act(Coded<2, true>{});
  case 6: return act(Coded<3, false>{});
  case 8: return act(Coded<4, false>{});
  case 9: return act(Coded<4, true>{});
  case 10: return act(Coded<5, false>{});
  case 11: return act(Coded<5, true>{});
  case 12: return act(Coded<6, false>{});
  default: return act(Coded<8, false>{});
  }
}

// Looks up codes, each in the lower half of a byte.
inline bytes looked_up(const uint8_t *table, bytes codes) {
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
template <int LEFT> inline words moved(words bits) {
  if constexpr (LEFT >= 0)
    return bits << LEFT;
  else
    return bits >> -LEFT;
}

// The codes of a group of four inputs, of as many outputs as fit into a vector; those of 3 bits times
// 8, so that the u of zero is 32 as it is of codes of 6 bits. at: the block's first vector, from the
// slice on.
template <int BITS, int GROUP> inline bytes codes_of(const uint8_t *at) {
  if constexpr (BITS == 8) return load<bytes>(at + GROUP * VECTOR);
  if constexpr (BITS == 6) {
    auto vector = [&](int which) { return load<words>(at + (GROUP / 4 * 3 + which) * VECTOR); };
    if constexpr (GROUP % 4 < 3) return bytes(vector(GROUP % 4) & 0x3f3f);
    return bytes((vector(0) >> 6 & 0x0303) | (vector(1) >> 4 & 0x0c0c) | (vector(2) >> 2 & 0x3030));
  }
  if constexpr (bits_of(BITS) < 4) {
    constexpr int UP = BITS == 3 ? 3 : 0;
    words low = moved<UP - 2 * (GROUP % 4)>(load<words>(at + GROUP / 4 * VECTOR)) & (0x0303 << UP);
    if constexpr (bits_of(BITS) == 3)
      low |= moved<UP + 2 - GROUP>(load<words>(at + 2 * VECTOR)) & (0x0404 << UP);
    if constexpr (BITS >= 16) return looked_up(LOOKED_UP[BITS / 16], bytes(low));
    return bytes(low);
  }
  words low = load<words>(at + GROUP % 4 * VECTOR);
  if constexpr (GROUP >= 4) low >>= 4;
  low &= 0x0f0f;
  if constexpr (BITS == 5) {
    words fifth = load<words>(at + 4 * VECTOR);
    if constexpr (GROUP < 4) fifth <<= 4 - GROUP;
    if constexpr (GROUP > 4) fifth >>= GROUP - 4;
    low |= fifth & 0x1010;
  }
  if constexpr (BITS >= 16) return looked_up(LOOKED_UP[BITS / 16], bytes(low));
  return bytes(low);
}

// Four activations in all lanes.
inline ints four(const int8_t *codes) {
  int32_t bits;
  std::memcpy(&bits, codes, sizeof bits);
  return bits - ints{};
}

// Sums of the products of codes of weights with activations, four to a lane, are added up here.
// begin: with what is taken from the sum, one of `Rounded::less`, if the codes have a middle.
#if defined(DOTS_VNNI512) || defined(DOTS_VNNI256)
constexpr bool SIGNED = false; // whether codes of 8 bits are taken as signed, less 128
template <int BITS, bool LIFTED> struct Dots {
  ints sum;
  void begin() { sum = ints{}; }
  void begin(int32_t less) { sum = less - ints{}; }
  template <int GROUP> void add(bytes weights, const int8_t *x) {
#ifdef DOTS_VNNI512
    sum = ints(_mm512_dpbusd_epi32(__m512i(sum), __m512i(weights), __m512i(four(x))));
#else
    sum = ints(_mm256_dpbusd_avx_epi32(__m256i(sum), __m256i(weights), __m256i(four(x))));
#endif
  }
  floats floated() const { return __builtin_convertvector(sum, floats); }
};
#elif defined(DOTS_AVX512) || defined(DOTS_AVX2)
// Products are added up in 16 bits first, two of a group's to a lane, as long as these suffice. Where
// codes have a middle, that is all groups of 4 and 5 bits (small floats are as large as 16 * 12 * 127
// together), and the four that share a scale of codes of 3 and 6 bits:
// sums that begin with what is taken, modulo 2^16, end as 8 * 32 * 127 at most. Otherwise it is all
// groups of 4 bits (8 * 2 * 15 * 127), and four of 5 bits and of 2, which share a scale. Codes
// of 8 bits would not do in pairs,
// unless they are signed and the sign goes to the activations: 2 * 128 * 127 is below 2^15.
constexpr bool SIGNED = true;
template <int BITS, bool LIFTED> struct Dots {
  static constexpr bool TAKEN = !is_wide(BITS) && !LIFTED;
  static constexpr int FITTING = bits_of(BITS) == 4 ? 8 : BITS == 5 ? (LIFTED ? 4 : 8) : 4;
  static constexpr int LONG = is_wide(BITS) ? 1 : FITTING;
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
  void begin(int32_t less) { part = wide(less - ints{}); }
  template <int GROUP> void add(bytes weights, const int8_t *x) {
    wide in = wide(four(x)), w = wide(weights);
    if constexpr (is_wide(BITS)) {
      w = wide(weights ^ 0x80);
      in = with_sign(in, w);
      w = magnitude(w);
    }
    wide products = pairs(w, in);
    part = GROUP % LONG || TAKEN ? plus16(part, products) : products;
    if constexpr (GROUP % LONG == LONG - 1)
      sum = TAKEN ? ints(fours(part)) : sum + ints(fours(part));
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
template <int BITS, bool LIFTED> struct Dots {
  ints sum;
  void begin() { sum = ints{}; }
  void begin(int32_t less) { sum = less - ints{}; }
  template <int GROUP> void add(bytes weights, const int8_t *x) {
#ifdef DOTS_ARM
    bytes w = is_wide(BITS) ? weights ^ 0x80 : weights;
    sum = ints(vdotq_s32(int32x4_t(sum), int8x16_t(w), int8x16_t(four(x))));
#else
    for (int lane = 0; lane < LANES; lane++) // written out: vectors of bytes are slow to take apart
      sum[lane] += weights[4 * lane] * x[0] + weights[4 * lane + 1] * x[1] +
                   weights[4 * lane + 2] * x[2] + weights[4 * lane + 3] * x[3];
#endif
  }
  floats floated() const { return __builtin_convertvector(sum, floats); }
};
#endif

// -- products --------------------------------------------------------------------------------------

// Scales of a chunk of a panel, as floats.
struct Scales {
  alignas(64) float scale[2 * CHUNK][WIDTH]; // of each block, or of each half
  alignas(64) float lift[2 * CHUNK][WIDTH];  // the same; where halves have one, -1/32 of it
};

inline floats widen_halves(const uint8_t *halves) {
#if AVX == 512
  return _mm512_cvtph_ps(load<__m256i>(halves));
#elif AVX == 256
  return _mm256_cvtph_ps(load<__m128i>(halves));
#else
  floats found;
  for (int lane = 0; lane < LANES; lane++) found[lane] = from_half(half_at(halves + 2 * lane));
  return found;
#endif
}

// As `power_of_two`.
inline floats powers_of_two(const uint8_t *exponents) {
  floats found;
  for (int lane = 0; lane < LANES; lane++) found[lane] = power_of_two(exponents[lane]);
  return found;
}

inline void store(floats value, float *to) { std::memcpy(to, &value, sizeof value); }

inline void widen_scales(const Form &form, const uint8_t *at, int64_t blocks, Scales &to) {
  for (int64_t first = 0; first < WIDTH; first += LANES) {
    if (!form.nested) {
      const uint8_t *from = at + (form.powers() ? 1 : 2) * first;
      for (int64_t b = 0; form.powers() && b < blocks; b++, from += WIDTH)
        store(powers_of_two(from), to.scale[b] + first);
      for (int64_t b = 0; !form.powers() && b < blocks; b++, from += 2 * WIDTH) {
        store(widen_halves(from), to.scale[b] + first);
        if (form.lifted) from += 2 * WIDTH, store(widen_halves(from), to.lift[b] + first);
      }
      continue;
    }
    floats scale = widen_halves(at + 2 * first) * form.unit, lift = {};
    const uint8_t *factors = at + 2 * WIDTH;
    if (form.lifted) lift = -widen_halves(factors + 2 * first), factors += 2 * WIDTH;
    for (int64_t half = 0; form.halved() && half < 2 * blocks; half++, factors += WIDTH) {
      if (!form.lifted) {
        floats one = widen(reinterpret_cast<const int8_t *>(factors + first));
        store(scale * one * (code_of(form) == 3 ? 0.125f : 1.f), to.scale[half] + first);
        continue;
      }
      lanes<uint8_t> both = load<lanes<uint8_t>>(factors + first), low = both & 15, high = both >> 4;
      store(scale * widen(reinterpret_cast<const int8_t *>(&low)), to.scale[half] + first);
      store(lift * widen(reinterpret_cast<const int8_t *>(&high)) * (-1.f / 32), to.lift[half] + first);
    }
    for (int64_t b = 0; !form.halved() && b < blocks; b++, factors += form.factors() * WIDTH) {
      floats one = widen(reinterpret_cast<const int8_t *>(factors + first));
      if (form.factors() == 1) {
        store(scale * one, to.scale[b] + first);
        continue;
      }
      floats two = widen(reinterpret_cast<const int8_t *>(factors + WIDTH + first));
      store(scale * one, to.scale[b] + first), store(lift * two, to.lift[b] + first);
    }
  }
}

// What a block adds to an output of a row. These are all the steps that round, and all ways to the
// integer sums take them, in the order of the blocks. dot: the integer sum of the block; half: that of
// its first half, times the scale of that half, with what lifts both halves.
inline floats add_scaled(floats dot, floats scale, const Rounded &in, floats to) {
  return fused(dot, scale * all(in.scale), to);
}

inline floats add_lift(floats lift, const Rounded &in, floats to) {
  return fused(lift, all(in.weighted), to);
}

// lifts: of both halves, from the first one on. part: number of the half.
inline floats lift_half(const float (*lifts)[WIDTH], int64_t at, int part, const Rounded &in, floats half) {
  return fused(load<floats>(lifts[part] + at), all(float(untaken(in.less[4 + part]))), half);
}

inline floats add_halves(floats half, floats dot, floats scale, const Rounded &in, floats to) {
  return fused(fused(scale, dot, half), all(in.scale), to);
}

// Calls for lines of a block that lies ahead of `from`, and for one of its scales.
template <int BITS> inline void call_for(const uint8_t *from) {
  constexpr int LINES = bits_of(BITS) + 1;
#pragma GCC unroll 9
  for (int line = 0; line < LINES; line++) {
    if (FAR) __builtin_prefetch(from + FAR + 64 * line, 0, 2);
    __builtin_prefetch(from + AHEAD + 64 * line);
  }
}

// What the integer sum of a half of a block begins with, or of the whole of it. which: of `less_of`.
template <int BITS> inline int32_t less_at(const Rounded &in, int which) {
  return is_wide(BITS) && is_halved(BITS) ? 4 * in.less[which] : in.less[which];
}

// Adds what a chunk gives to the sums of IN rows of some slices of a panel.
template <int BITS, bool LIFTED, int IN> struct Tile {
  const uint8_t *codes; // from the first slice on
  const Scales &scales;
  const Rounded *x; // rows lie side by side, blocks `stride` apart
  int64_t stride, blocks;
  int less; // which of `Rounded::less`
  bool fresh;   // whether the codes are read for the first time, and those ahead are called for
  int64_t step; // bytes of a block with its scales
  float *sums; // [IN, WIDTH], from the first slice on

  template <int... GROUP>
  inline void group(std::integer_sequence<int, GROUP...>, const uint8_t *at, const Rounded *in,
                    Dots<BITS, LIFTED> (&dots)[IN][BROAD]) const {
    auto add = [&](auto which) {
      constexpr int G = decltype(which)::value;
      bytes weights[BROAD];
#pragma GCC unroll 2
      for (int s = 0; s < BROAD; s++) weights[s] = codes_of<BITS, G>(at + 4 * LANES * s);
#pragma GCC unroll 8
      for (int r = 0; r < IN; r++)
#pragma GCC unroll 2
        for (int s = 0; s < BROAD; s++) dots[r][s].template add<G>(weights[s], in[r].codes + 4 * G);
    };
    (add(std::integral_constant<int, GROUP>{}), ...);
  }

  // Calls for each row and vector.
  template <typename Each> static inline void each(Each each) {
#pragma GCC unroll 8
    for (int r = 0; r < IN; r++)
#pragma GCC unroll 2
      for (int s = 0; s < BROAD; s++) each(r, s);
  }

  void begin(Dots<BITS, LIFTED> (&dots)[IN][BROAD], const Rounded *in, int which) const {
    each([&](int r, int s) {
      if constexpr (LIFTED || (is_wide(BITS) && SIGNED))
        dots[r][s].begin();
      else
        dots[r][s].begin(less_at<BITS>(in[r], which));
    });
  }

  static floats at_slice(const float *of_panel, int64_t slice, int s) {
    return load<floats>(of_panel + slice + s * LANES);
  }

  void compute(int64_t slice) const {
    floats found[IN][BROAD];
    each([&](int r, int s) { found[r][s] = load<floats>(sums + r * WIDTH + s * LANES); });
    const Rounded *in = x;
    const uint8_t *at = codes;
    for (int64_t b = 0; b < blocks; b++, in += stride, at += bits_of(BITS) * VECTOR) {
      if (fresh) call_for<BITS>(codes + b * step);
      auto scale = [&](int64_t which, int s) { return at_slice(scales.scale[which], slice, s); };
      Dots<BITS, LIFTED> dots[IN][BROAD];
      begin(dots, in, less);
      if constexpr (is_halved(BITS)) {
        floats half[IN][BROAD];
        group(std::integer_sequence<int, 0, 1, 2, 3>{}, at, in, dots);
        each([&](int r, int s) {
          half[r][s] = scale(2 * b, s) * dots[r][s].floated();
          for (int part = 0; LIFTED && part < 2; part++)
            half[r][s] = lift_half(scales.lift + 2 * b, slice + s * LANES, part, in[r], half[r][s]);
        });
        begin(dots, in, less + 1);
        group(std::integer_sequence<int, 4, 5, 6, 7>{}, at, in, dots);
        each([&](int r, int s) {
          found[r][s] = add_halves(half[r][s], dots[r][s].floated(), scale(2 * b + 1, s), in[r],
                                   found[r][s]);
        });
      } else {
        group(std::make_integer_sequence<int, GROUPS>{}, at, in, dots);
        each([&](int r, int s) {
          found[r][s] = add_scaled(dots[r][s].floated(), scale(b, s), in[r], found[r][s]);
          if constexpr (LIFTED)
            found[r][s] = add_lift(at_slice(scales.lift[b], slice, s), in[r], found[r][s]);
        });
      }
    }
    each([&](int r, int s) { store(found[r][s], sums + r * WIDTH + s * LANES); });
  }
};

// A linear layer whose weight is in blocks, and what it is multiplied with.
struct BlockProduct {
  const Rounded *x; // [blocks, rows]
  int64_t rows, blocks;
  const uint8_t *panels;
  const float *bias; // or null
  int64_t outputs;
  float *y; // [rows, outputs]
  Form form;
};

template <int BITS, bool LIFTED, int IN>
void add_tile(const BlockProduct &job, const uint8_t *codes, const Scales &scales, int64_t row,
              int64_t from, int64_t blocks, float *sums) {
  const int64_t step = chunk_bytes(job.form, CHUNK) / CHUNK;
  for (int64_t slice = 0; slice < WIDTH; slice += BROAD * LANES)
    Tile<BITS, LIFTED, IN>{codes + 4 * slice,
                           scales,
                           job.x + from * job.rows + row,
                           job.rows,
                           blocks,
                           less_of(job.form),
                           !row && !slice,
                           step,
                           sums + slice}
        .compute(slice);
}

// Adds what a chunk gives to the sums of `count` rows of a panel.
template <int BITS, bool LIFTED>
void add_chunk(const BlockProduct &job, const uint8_t *codes, const Scales &scales, int64_t row,
               int64_t count, int64_t from, int64_t blocks, float *sums) {
  for (int64_t tiles = (count + TALL - 1) / TALL; tiles; tiles--) {
    int64_t take = (count + tiles - 1) / tiles; // as even as can be
    switch (take) {
    case 1: add_tile<BITS, LIFTED, 1>(job, codes, scales, row, from, blocks, sums); break;
    case 2: add_tile<BITS, LIFTED, 2>(job, codes, scales, row, from, blocks, sums); break;
    case 3: add_tile<BITS, LIFTED, 3>(job, codes, scales, row, from, blocks, sums); break;
    case 4: add_tile<BITS, LIFTED, 4>(job, codes, scales, row, from, blocks, sums); break;
#if AVX == 512
    case 5: add_tile<BITS, LIFTED, 5>(job, codes, scales, row, from, blocks, sums); break;
    case 6: add_tile<BITS, LIFTED, 6>(job, codes, scales, row, from, blocks, sums); break;
    case 7: add_tile<BITS, LIFTED, 7>(job, codes, scales, row, from, blocks, sums); break;
    default: add_tile<BITS, LIFTED, 8>(job, codes, scales, row, from, blocks, sums);
#endif
    }
    row += take, sums += take * WIDTH, count -= take;
  }
}

inline void add_chunk(const BlockProduct &job, const uint8_t *codes, const Scales &scales,
                      int64_t row, int64_t count, int64_t from, int64_t blocks, float *sums) {
  by_code(job.form, [&](auto code) {
    add_chunk<code.BITS, code.LIFTED>(job, codes, scales, row, count, from, blocks, sums);
  });
}

inline void finish_panel(const BlockProduct &job, int64_t panel, int64_t row, int64_t count,
                         const float *sums) {
  int64_t first = panel * WIDTH, width = std::min(WIDTH, job.outputs - first);
  for (int64_t r = 0; r < count; r++) {
    float *to = job.y + (row + r) * job.outputs + first;
    for (int64_t o = 0; o < width; o++)
      to[o] = job.bias ? sums[r * WIDTH + o] + job.bias[first + o] : sums[r * WIDTH + o];
  }
}

// Up to BATCH rows meet a chunk of a panel before the next one is read.
inline void compute_panel(const BlockProduct &job, int64_t panel) {
  const int64_t size = panel_bytes(job.form, job.blocks), whole = chunk_bytes(job.form, CHUNK);
  alignas(64) float sums[BATCH * WIDTH];
  for (int64_t row = 0; row < job.rows; row += BATCH) {
    const int64_t count = std::min(BATCH, job.rows - row);
    const uint8_t *chunk = job.panels + panel * size;
    std::memset(sums, 0, count * WIDTH * sizeof(float));
    for (int64_t from = 0; from < job.blocks; from += CHUNK, chunk += whole) {
      const int64_t blocks = std::min(CHUNK, job.blocks - from);
      Scales scales;
      widen_scales(job.form, chunk + code_bytes(job.form, blocks), blocks, scales);
      add_chunk(job, chunk, scales, row, count, from, blocks, sums);
    }
    finish_panel(job, panel, row, count, sums);
  }
}

} // namespace
