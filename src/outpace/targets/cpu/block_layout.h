// Weights in quantised blocks: how GGUF files hold them, and how our products read them.
//
// All kinds come down to one form: w = s u + t, where u is an unsigned code of 2 to 6 or of 8 bits,
// and s and t are shared by 32 inputs of an output (by 16, where codes have 2, 3 or 6 bits). Of some
// codes u is looked up: those of MXFP4 are small floats (OCP Microscaling Formats 1.0), whose s is a
// power of two, and those of IQ4_NL and IQ4_XS stand for numbers that lie closer near zero. In a file,
// blocks of IQ1 to IQ3 name four or eight numbers at once by their place in a list (the grid), and their
// signs: here each number has a code of its own, of 3 or 4 bits. Products compute 16 outputs together,
// and so the codes of 16 outputs make a panel. Along a panel come chunks of 8 blocks of 32 inputs: first
// their codes, then the scales exactly as the file holds them.
//
// A block of codes consists of vectors of 64 bytes, of which byte 4 o + i belongs to output o. Input
// group g (g = 0 to 7) is the inputs 4 g to 4 g + 3. Codes of 8 bits have 8 plain vectors, one for
// each group. Of codes of 4 and 5 bits the low four bits of group g lie in vector g % 4: in the lower
// half of each byte for the groups 0 to 3, in the upper half for the others; the fifth bits follow in
// a vector of their own. Codes of 6 bits have three vectors for four groups: the low six bits of each
// are the first three groups, the upper two bits together are the fourth. Of codes of 2 and 3 bits
// the low two bits of group g lie in vector g / 4, at bit 2 (g % 4) of each byte; the third bits follow
// in a vector of their own, at bit g.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t WIDTH = 16;               // outputs of a panel of blocks
constexpr int64_t SMALL = 32;               // inputs of a block
constexpr int64_t CHUNK = 8;                // blocks of a chunk
constexpr int64_t GROUPS = 8;               // groups of four inputs in a block
constexpr int64_t VECTOR = 4 * WIDTH;       // bytes of the codes of one group
constexpr int64_t LARGE = CHUNK * SMALL;    // inputs of a chunk

// What codes are looked up in.
enum Table { PLAIN, FLOATS, UNEVEN, ODD, EIGHT, THREE, SHIFTED, TABLES };

// The u of each code: what small floats stand for, doubled, with 12 added; uneven numbers, with 128; the
// odd numbers to 15 and their negatives, with 16; eight and three numbers and their negatives, with 128;
// -1, 0 and 1, shifted by an eighth up or down, 16 times, with 32.
constexpr uint8_t LOOKED_UP[TABLES][16] = {
    {},
    {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31},
    {66, 76, 84, 92, 100, 108, 116, 124, 132, 140, 148, 156, 164, 172, 180, 190},
    {85, 103, 120, 136, 153, 171},
    {14, 18, 30, 34, 46, 50},
};

// A kind of blocks.
struct Form {
  int bits;
  bool lifted;          // whether there is a t of its own: else t = -middle s
  bool nested;          // whether blocks have small integers that multiply the scale of a chunk
  int middle;           // the u of zero, where there is no t
  int64_t inputs, bytes; // of a block in a file
  Table table = PLAIN;
  float unit = 1.f; // by which the scale of a chunk is multiplied: a power of two

  // Whether 16 inputs share a scale, and so the halves of a block have one each.
  constexpr bool halved() const { return bits == 2 || bits == 3 || bits == 6; }
  // Whether scales are powers of two, in a byte each.
  constexpr bool powers() const { return table == FLOATS; }
  // Small integers of a block, if it has some.
  constexpr int factors() const { return table && !halved() ? 1 : 2; }
  // The largest code.
  constexpr uint8_t last() const { return bits == 4 ? 15 : 5; }
  // Whether files name numbers by their place in a grid.
  constexpr bool has_grid() const { return table >= ODD; }
};

enum Kind {
  Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, MXFP4, IQ4_NL, IQ4_XS, Q2_K, Q3_K,
  IQ3_S, IQ3_XXS, IQ2_S, IQ2_XS, IQ2_XXS, IQ1_S, IQ1_M, KINDS
};

constexpr Form FORMS[KINDS] = {
    {8, false, false, 128, 32, 34}, {4, false, false, 8, 32, 18}, {4, true, false, 0, 32, 20},
    {5, false, false, 16, 32, 22},  {5, true, false, 0, 32, 24},  {4, true, true, 0, 256, 144},
    {5, true, true, 0, 256, 176},   {6, false, true, 32, 256, 210},
    {4, false, false, 12, 32, 17, FLOATS}, {4, false, false, 128, 32, 18, UNEVEN},
    {4, false, true, 128, 256, 136, UNEVEN}, {2, true, true, 0, 256, 84},
    {3, false, true, 4, 256, 110},
    {4, false, true, 16, 256, 110, ODD}, {4, false, true, 128, 256, 98, EIGHT, 0.25f},
    {3, false, true, 128, 256, 82, THREE, 0.125f}, {3, false, true, 128, 256, 74, THREE, 0.125f},
    {3, false, true, 128, 256, 66, THREE, 0.125f}, {3, false, true, 32, 256, 50, SHIFTED, 0.0625f},
    {3, false, true, 32, 256, 56, SHIFTED, 0.0625f},
};

// -- sizes -----------------------------------------------------------------------------------------

inline int64_t blocks_of(int64_t inputs) { return (inputs + SMALL - 1) / SMALL; }

inline int64_t code_bytes(const Form &form, int64_t blocks) { return blocks * form.bits * VECTOR; }

inline int64_t scale_bytes(const Form &form, int64_t blocks) {
  int64_t numbers = 2 * blocks * (1 + form.lifted); // bytes per output
  if (form.nested) numbers = form.factors() * blocks;
  if (form.powers()) numbers = blocks;
  return WIDTH * (numbers + (form.nested ? 2 * (1 + form.lifted) : 0));
}

inline int64_t chunk_bytes(const Form &form, int64_t blocks) {
  return code_bytes(form, blocks) + scale_bytes(form, blocks);
}

// The bytes of a panel, whole lines of the cache.
inline int64_t panel_bytes(const Form &form, int64_t blocks) {
  int64_t rest = blocks % CHUNK, bytes = blocks / CHUNK * chunk_bytes(form, CHUNK);
  if (rest) bytes += chunk_bytes(form, rest);
  return (bytes + 63) / 64 * 64;
}

// -- one output of a chunk -------------------------------------------------------------------------

struct Decoded {
  alignas(64) uint8_t codes[LARGE];
  uint16_t scales[CHUNK], lifts[CHUNK];   // float16: of each block, or nested: one of the chunk;
                                          // or the exponent of a power of two
  uint8_t factors[2 * CHUNK];             // nested: of each block, or each half (signed without t)
  uint8_t falls[CHUNK];                   // nested and lifted: t = -lift * fall (Q2_K: the fall is
                                          // the upper half of a factor)
};

inline float from_half(uint16_t half) {
  uint32_t bits = uint32_t(half & 0x7fff) << 13, sign = uint32_t(half & 0x8000) << 16;
  float value;
  if ((half & 0x7c00) == 0x7c00) bits |= 0x7f800000; // infinite, or no number
  std::memcpy(&value, &bits, sizeof value);
  if ((half & 0x7c00) != 0x7c00) value *= 5.192296858534828e33f; // 2^112, exact
  std::memcpy(&bits, &value, sizeof bits);
  bits |= sign;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Half of 2 to the power of (exponent - 127): doubled floats are halved so.
inline float power_of_two(uint8_t exponent) {
  uint32_t bits = exponent < 2 ? 0x00200000u << exponent : uint32_t(exponent - 1) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint16_t half_at(const uint8_t *raw) {
  uint16_t bits;
  std::memcpy(&bits, raw, sizeof bits);
  return bits;
}

// The low and high halves of `count` bytes, as codes of the inputs from `low` and from `high` on.
inline void halves(const uint8_t *bytes, int count, uint8_t *low, uint8_t *high) {
  for (int i = 0; i < count; i++) low[i] = bytes[i] & 15, high[i] = bytes[i] >> 4;
}

// The six-bit factors of Q4_K and Q5_K, of which 12 bytes hold 8 for scales and 8 for lifts.
inline void unpack_factors(const uint8_t *packed, uint8_t *factors, uint8_t *falls) {
  for (int i = 0; i < 4; i++) {
    factors[i] = packed[i] & 63;
    falls[i] = packed[i + 4] & 63;
    factors[i + 4] = uint8_t((packed[i + 8] & 15) | (packed[i] >> 6 << 4));
    falls[i + 4] = uint8_t((packed[i + 8] >> 4) | (packed[i + 4] >> 6 << 4));
  }
}

// The six-bit factors of Q3_K, of which 12 bytes hold 16: eight of the low four bits' pairs, and then
// the upper two bits.
inline void unpack_signed_factors(const uint8_t *packed, uint8_t *factors) {
  for (int i = 0; i < 16; i++) {
    const int low = packed[i % 8] >> 4 * (i / 8) & 15, high = packed[8 + i % 4] >> 2 * (i / 4) & 3;
    factors[i] = uint8_t((low | high << 4) - 32);
  }
}

// A block of 32 inputs as files hold it.
inline void decode_small(int kind, const uint8_t *raw, int64_t block, Decoded &to) {
  const Form &form = FORMS[kind];
  uint8_t *codes = to.codes + block * SMALL;
  if (form.powers())
    to.scales[block] = *raw++;
  else
    to.scales[block] = half_at(raw), raw += 2;
  if (form.lifted) to.lifts[block] = half_at(raw), raw += 2;
  if (form.bits == 8) {
    for (int i = 0; i < SMALL; i++) codes[i] = raw[i] ^ 0x80;
    return;
  }
  uint32_t fifth = 0;
  if (form.bits == 5) std::memcpy(&fifth, raw, 4), raw += 4;
  halves(raw, 16, codes, codes + 16);
  if (form.bits == 5)
    for (int i = 0; i < SMALL; i++) codes[i] |= (fifth >> i & 1) << 4;
}

inline uint32_t word_at(const uint8_t *raw) {
  uint32_t bits;
  std::memcpy(&bits, raw, sizeof bits);
  return bits;
}

// Eight numbers of a block: their places in the grid (of four numbers each, or one of eight), their
// signs, and the factor of the scale.
struct Eight {
  uint32_t first, second, signs;
  int factor;
};

// The eight signs of seven bits: there is an even number of negative ones.
inline uint32_t signs_of(uint32_t seven) {
  uint32_t odd = seven ^ seven >> 4;
  odd ^= odd >> 2;
  return seven | ((odd ^ odd >> 1) & 1) << 7;
}

// The eight numbers from 8 j on of a block of 256 inputs.
inline Eight eight_of(int kind, const uint8_t *raw, int j) {
  const int b = j / 4, q = j % 4; // of a block of 32 inputs
  auto nibble = [&](const uint8_t *packed, int i) { return packed[i / 2] >> 4 * (i % 2) & 15; };
  switch (kind) {
  case IQ3_S: {
    const uint32_t high = raw[66 + b] >> 2 * q;
    return {raw[2 + 2 * j] | (high & 1) << 8, raw[3 + 2 * j] | (high >> 1 & 1) << 8, raw[74 + j],
            1 + 2 * nibble(raw + 106, b)};
  }
  case IQ3_XXS: {
    const uint32_t more = word_at(raw + 66 + 4 * b);
    return {raw[2 + 2 * j], raw[3 + 2 * j], signs_of(more >> 7 * q & 127), int(1 + 2 * (more >> 28))};
  }
  case IQ2_S: {
    const uint32_t high = raw[66 + b] >> 2 * q & 3;
    return {raw[2 + j] | high << 8, 0, raw[34 + j], 1 + 2 * nibble(raw + 74, j / 2)};
  }
  case IQ2_XS: {
    const uint32_t both = half_at(raw + 2 + 2 * j);
    return {both & 511, 0, signs_of(both >> 9), 1 + 2 * nibble(raw + 66, j / 2)};
  }
  case IQ2_XXS: {
    const uint32_t more = word_at(raw + 6 + 8 * b);
    return {raw[2 + 8 * b + q], 0, signs_of(more >> 7 * q & 127), int(1 + 2 * (more >> 28))};
  }
  case IQ1_S: {
    const uint32_t more = half_at(raw + 34 + 2 * b);
    return {raw[2 + j] | (more >> 3 * q & 7) << 8, 0, more >> 15, int(1 + 2 * (more >> 12 & 7))};
  }
  default: { // IQ1_M
    const uint32_t more = nibble(raw + 32, j), scales = half_at(raw + 48 + 2 * (j / 8));
    return {raw[j] | (more & 7) << 8, 0, more >> 3, int(1 + 2 * (scales >> 3 * (j / 2 % 4) & 7))};
  }
  }
}

// grid: the codes of positive numbers, or of those that are shifted up, [places, 4 or 8].
inline void decode_grid(int kind, const uint8_t *raw, const uint8_t *grid, Decoded &to) {
  const Form &form = FORMS[kind];
  const int width = form.bits == 4 ? 4 : 8;
  to.scales[0] = half_at(raw);
  if (kind == IQ1_M) {
    to.scales[0] = 0;
    for (int i = 0; i < 4; i++) to.scales[0] |= uint16_t(half_at(raw + 48 + 2 * i) >> 12 << 4 * i);
  }
  for (int j = 0; j < LARGE / 8; j++) {
    const Eight eight = eight_of(kind, raw, j);
    if (form.halved())
      to.factors[j / 2] = uint8_t(eight.factor);
    else
      to.factors[j / 4] = uint8_t(eight.factor);
    for (int i = 0; i < 8; i++) {
      const uint32_t place = i < width ? eight.first : eight.second;
      uint8_t code = grid[place * width + i % width];
      if (form.table == SHIFTED)
        code = uint8_t(code - eight.signs);
      else if (eight.signs >> i & 1)
        code = uint8_t(form.last() - code);
      to.codes[8 * j + i] = code;
    }
  }
}

// A block of 256 inputs.
inline void decode_large(int kind, const uint8_t *raw, const uint8_t *grid, Decoded &to) {
  if (FORMS[kind].has_grid()) return decode_grid(kind, raw, grid, to);
  if (kind == IQ4_XS) {
    const uint16_t high = half_at(raw + 2);
    to.scales[0] = half_at(raw);
    for (int b = 0; b < CHUNK; b++) {
      const int low = raw[4 + b / 2] >> 4 * (b % 2) & 15;
      to.factors[b] = uint8_t((low | (high >> 2 * b & 3) << 4) - 32);
      halves(raw + 8 + 16 * b, 16, to.codes + SMALL * b, to.codes + SMALL * b + 16);
    }
    return;
  }
  if (kind == Q2_K || kind == Q3_K) {
    const uint8_t *low = kind == Q2_K ? raw + 16 : raw + 32;
    for (int i = 0; i < LARGE; i++) {
      to.codes[i] = low[i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3;
      if (kind == Q3_K) to.codes[i] |= (raw[i % 32] >> i / 32 & 1) << 2;
    }
    if (kind == Q2_K) {
      std::memcpy(to.factors, raw, 16);
      to.scales[0] = half_at(raw + 80), to.lifts[0] = half_at(raw + 82);
    } else {
      unpack_signed_factors(raw + 96, to.factors);
      to.scales[0] = half_at(raw + 108);
    }
    return;
  }
  if (kind == Q6_K) {
    const uint8_t *low = raw, *high = raw + 128;
    for (int part = 0; part < 2; part++, low += 64, high += 32) {
      uint8_t *codes = to.codes + 128 * part;
      halves(low, 64, codes, codes + 64);
      for (int i = 0; i < 32; i++)
        for (int q = 0; q < 4; q++) codes[32 * q + i] |= (high[i] >> 2 * q & 3) << 4;
    }
    std::memcpy(to.factors, raw + 192, 16);
    to.scales[0] = half_at(raw + 208);
    return;
  }
  to.scales[0] = half_at(raw), to.lifts[0] = half_at(raw + 2);
  unpack_factors(raw + 4, to.factors, to.falls);
  const uint8_t *fifth = raw + 16, *low = kind == Q5_K ? raw + 48 : raw + 16;
  for (int part = 0; part < 4; part++, low += 32) {
    uint8_t *codes = to.codes + 64 * part;
    halves(low, 32, codes, codes + 32);
    for (int i = 0; kind == Q5_K && i < 32; i++) {
      codes[i] |= (fifth[i] >> 2 * part & 1) << 4;
      codes[32 + i] |= (fifth[i] >> (2 * part + 1) & 1) << 4;
    }
  }
}

// raw: the first of `blocks` blocks of 32 inputs. grid: of the kind, or null.
inline void decode(int kind, const uint8_t *raw, const uint8_t *grid, int64_t blocks, Decoded &to) {
  if (FORMS[kind].nested) return decode_large(kind, raw, grid, to);
  for (int64_t b = 0; b < blocks; b++) decode_small(kind, raw + b * FORMS[kind].bytes, b, to);
}

// Writes what the codes stand for, rounded as the library `gguf` does.
inline void widen_codes(int kind, const Decoded &from, int64_t blocks, float *to) {
  const Form &form = FORMS[kind];
  for (int64_t half = 0; half < 2 * blocks; half++) {
    int64_t b = half / 2, at = form.nested ? 0 : b;
    float scale = form.powers() ? power_of_two(uint8_t(from.scales[at])) : from_half(from.scales[at]);
    scale *= form.unit;
    float lift = form.lifted ? from_half(from.lifts[at]) : 0.f;
    const uint8_t factor = from.factors[form.halved() ? half : b];
    if (form.nested && !form.lifted) scale *= float(int8_t(factor));
    if (kind == Q2_K) scale *= float(factor & 15), lift *= -float(factor >> 4);
    if (kind == Q4_K || kind == Q5_K) scale *= factor, lift *= -float(from.falls[b]);
    for (int64_t i = 16 * half; i < 16 * half + 16; i++) {
      const int u = form.table ? LOOKED_UP[form.table][from.codes[i] & 15] : from.codes[i];
      to[i] = scale * float(u - form.middle) + lift;
    }
  }
}

// -- sixteen outputs of a chunk --------------------------------------------------------------------

inline uint32_t four_at(const uint8_t *codes, int64_t group) {
  uint32_t four;
  std::memcpy(&four, codes + 4 * group, sizeof four);
  return four;
}

// Writes one block's codes of output o into a panel.
inline void pack_codes(int bits, const uint8_t *codes, int64_t o, uint8_t *to) {
  auto put = [&](int64_t vector, uint32_t four) {
    std::memcpy(to + vector * VECTOR + 4 * o, &four, sizeof four);
  };
  if (bits == 8) {
    for (int64_t g = 0; g < GROUPS; g++) put(g, four_at(codes, g));
    return;
  }
  if (bits == 6) {
    for (int64_t half = 0; half < 2; half++)
      for (int64_t v = 0; v < 3; v++) {
        uint32_t fourth = four_at(codes, 4 * half + 3) >> 2 * v & 0x03030303;
        put(3 * half + v, four_at(codes, 4 * half + v) | fourth << 6);
      }
    return;
  }
  if (bits < 4) {
    uint32_t fours[3] = {};
    for (int64_t g = 0; g < GROUPS; g++) {
      fours[g / 4] |= (four_at(codes, g) & 0x03030303) << 2 * (g % 4);
      fours[2] |= (four_at(codes, g) >> 2 & 0x01010101) << g;
    }
    for (int v = 0; v < bits; v++) put(v, fours[v]);
    return;
  }
  uint32_t fifth = 0;
  for (int64_t g = 0; g < GROUPS; g++) fifth |= (four_at(codes, g) >> 4 & 0x01010101) << g;
  for (int64_t v = 0; v < 4; v++)
    put(v, (four_at(codes, v) & 0x0f0f0f0f) | (four_at(codes, v + 4) & 0x0f0f0f0f) << 4);
  if (bits == 5) put(4, fifth);
}

inline void unpack_codes(int bits, const uint8_t *from, int64_t o, uint8_t *codes) {
  auto get = [&](int64_t vector, int64_t i) { return from[vector * VECTOR + 4 * o + i]; };
  auto code = [&](int64_t g, int64_t i) -> int {
    if (bits == 8) return get(g, i);
    if (bits == 6) {
      const int64_t first = g / 4 * 3;
      if (g % 4 < 3) return get(first + g % 4, i) & 63;
      return get(first, i) >> 6 | get(first + 1, i) >> 6 << 2 | get(first + 2, i) >> 6 << 4;
    }
    if (bits < 4) {
      const int low = get(g / 4, i) >> 2 * (g % 4) & 3;
      return bits == 3 ? low | (get(2, i) >> g & 1) << 2 : low;
    }
    int low = get(g % 4, i) >> (g < 4 ? 0 : 4) & 15;
    return bits == 5 ? low | (get(4, i) >> g & 1) << 4 : low;
  };
  for (int64_t g = 0; g < GROUPS; g++)
    for (int64_t i = 0; i < 4; i++) codes[4 * g + i] = uint8_t(code(g, i));
}

// Goes through the scales of output o in the order of a panel; each: what is done with them.
template <typename Each>
inline void each_scale(int kind, int64_t blocks, int64_t o, uint8_t *at, Decoded &of, Each each) {
  const Form &form = FORMS[kind];
  auto next = [&](void *value, int64_t size) {
    each(at + size * o, value, size);
    at += size * WIDTH;
  };
  if (form.nested) {
    next(of.scales, 2);
    if (form.lifted) next(of.lifts, 2);
  }
  for (int64_t b = 0; b < blocks; b++)
    if (form.halved()) {
      next(of.factors + 2 * b, 1), next(of.factors + 2 * b + 1, 1);
    } else if (form.nested && form.factors() == 1) {
      next(of.factors + b, 1);
    } else if (form.nested) {
      next(of.factors + b, 1), next(of.falls + b, 1);
    } else {
      next(of.scales + b, form.powers() ? 1 : 2); // the lower byte comes first
      if (form.lifted) next(of.lifts + b, 2);
    }
}

// Lays out panel number `panel` of a weight [outputs, inputs]; outputs beyond the last are zeros.
inline void pack_panel(int kind, const uint8_t *raw, const uint8_t *grid, int64_t outputs, int64_t blocks,
                       int64_t panel, uint8_t *to) {
  const Form &form = FORMS[kind];
  const int64_t row = blocks * SMALL / form.inputs * form.bytes;
  for (int64_t from = 0; from < blocks; from += CHUNK) {
    int64_t count = std::min(CHUNK, blocks - from);
    for (int64_t o = 0; o < WIDTH; o++) {
      Decoded decoded = {};
      int64_t output = panel * WIDTH + o;
      if (output < outputs)
        decode(kind, raw + output * row + from * SMALL / form.inputs * form.bytes, grid, count, decoded);
      for (int64_t b = 0; b < count; b++)
        pack_codes(form.bits, decoded.codes + b * SMALL, o, to + code_bytes(form, b));
      each_scale(kind, count, o, to + code_bytes(form, count), decoded,
                 [](uint8_t *place, void *value, int64_t size) { std::memcpy(place, value, size); });
    }
    to += chunk_bytes(form, count);
  }
}

// Writes output o of a panel as floats [inputs].
inline void widen_output(int kind, uint8_t *panel, int64_t o, int64_t blocks, float *to) {
  const Form &form = FORMS[kind];
  for (int64_t from = 0; from < blocks; from += CHUNK) {
    int64_t count = std::min(CHUNK, blocks - from);
    Decoded decoded;
    for (int64_t b = 0; b < count; b++)
      unpack_codes(form.bits, panel + code_bytes(form, b), o, decoded.codes + b * SMALL);
    each_scale(kind, count, o, panel + code_bytes(form, count), decoded,
               [](uint8_t *place, void *value, int64_t size) { std::memcpy(value, place, size); });
    widen_codes(kind, decoded, count, to + from * SMALL);
    panel += chunk_bytes(form, count);
  }
}

// Writes a row of a weight as a file holds it.
inline void widen_row(int kind, const uint8_t *raw, const uint8_t *grid, int64_t blocks, float *to) {
  const Form &form = FORMS[kind];
  for (int64_t from = 0; from < blocks; from += CHUNK) {
    int64_t count = std::min(CHUNK, blocks - from);
    Decoded decoded;
    decode(kind, raw + from * SMALL / form.inputs * form.bytes, grid, count, decoded);
    widen_codes(kind, decoded, count, to + from * SMALL);
  }
}

} // namespace
