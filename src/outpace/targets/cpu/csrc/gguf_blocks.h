// Blocks as GGUF files hold them: how they are decoded, and the floats that they stand for.
//
// A chunk of one output is decoded first, into codes and scales that do not depend on how its kind packs
// them (`DecodedChunk`). From there it goes into our panels (block_panels.h), or becomes floats.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "block_formats.h"

namespace {

// A chunk of one output.
struct DecodedChunk {
  alignas(64) uint8_t codes[CHUNK_INPUTS];
  // float16 of each block, or, with sub-scales, of the chunk; or the exponents of powers of two.
  uint16_t scales[CHUNK_BLOCKS], mins[CHUNK_BLOCKS];
  // Of each block, or of each half; signed where there is no min.
  uint8_t sub_scales[2 * CHUNK_BLOCKS];
  // The min of a block is -min * sub_min. Those of Q2_K are the upper half of each sub-scale.
  uint8_t sub_mins[CHUNK_BLOCKS];
};

inline float half_to_float(uint16_t half) {
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
inline float e8m0_to_float_half(uint8_t exponent) {
  uint32_t bits = exponent < 2 ? 0x00200000u << exponent : uint32_t(exponent - 1) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint16_t load_half(const uint8_t *raw) {
  uint16_t bits;
  std::memcpy(&bits, raw, sizeof bits);
  return bits;
}

// The low and high halves of `count` bytes, as codes of the inputs from `low` and from `high` on.
inline void split_nibbles(const uint8_t *bytes, int count, uint8_t *low, uint8_t *high) {
  for (int i = 0; i < count; i++) low[i] = bytes[i] & 15, high[i] = bytes[i] >> 4;
}

// The six-bit sub-scales of Q4_K and Q5_K, of which 12 bytes hold 8 for scales and 8 for mins.
inline void unpack_scales_and_mins(const uint8_t *packed, uint8_t *sub_scales, uint8_t *sub_mins) {
  for (int i = 0; i < 4; i++) {
    sub_scales[i] = packed[i] & 63;
    sub_mins[i] = packed[i + 4] & 63;
    sub_scales[i + 4] = uint8_t((packed[i + 8] & 15) | (packed[i] >> 6 << 4));
    sub_mins[i + 4] = uint8_t((packed[i + 8] >> 4) | (packed[i + 4] >> 6 << 4));
  }
}

// The six-bit sub-scales of Q3_K, of which 12 bytes hold 16: eight of the low four bits' pairs, and then
// the upper two bits.
inline void unpack_signed_scales(const uint8_t *packed, uint8_t *sub_scales) {
  for (int i = 0; i < 16; i++) {
    const int low = packed[i % 8] >> 4 * (i / 8) & 15, high = packed[8 + i % 4] >> 2 * (i / 4) & 3;
    sub_scales[i] = uint8_t((low | high << 4) - 32);
  }
}

// A block of 32 inputs as files hold it.
inline void decode_block(int kind, const uint8_t *raw, int64_t block, DecodedChunk &to) {
  const BlockFormat &format = BLOCK_FORMATS[kind];
  uint8_t *codes = to.codes + block * BLOCK_INPUTS;
  if (format.has_e8m0_scales())
    to.scales[block] = *raw++;
  else
    to.scales[block] = load_half(raw), raw += 2;
  if (format.has_min) to.mins[block] = load_half(raw), raw += 2;
  if (format.bits == 8) {
    for (int i = 0; i < BLOCK_INPUTS; i++) codes[i] = raw[i] ^ 0x80;
    return;
  }
  uint32_t fifth = 0;
  if (format.bits == 5) std::memcpy(&fifth, raw, 4), raw += 4;
  split_nibbles(raw, 16, codes, codes + 16);
  if (format.bits == 5)
    for (int i = 0; i < BLOCK_INPUTS; i++) codes[i] |= (fifth >> i & 1) << 4;
}

inline uint32_t load_word(const uint8_t *raw) {
  uint32_t bits;
  std::memcpy(&bits, raw, sizeof bits);
  return bits;
}

// Eight numbers of a block: their places in the grid (of four numbers each, or one of eight), their
// signs, and the sub-scale.
struct EightCodes {
  uint32_t first, second, signs;
  int sub_scale;
};

// The eight signs of seven bits: there is an even number of negative ones.
inline uint32_t expand_signs(uint32_t seven) {
  uint32_t odd = seven ^ seven >> 4;
  odd ^= odd >> 2;
  return seven | ((odd ^ odd >> 1) & 1) << 7;
}

// The eight numbers from 8 j on of a block of 256 inputs.
inline EightCodes read_eight(int kind, const uint8_t *raw, int j) {
  const int b = j / 4, q = j % 4; // of a block of 32 inputs
  auto nibble = [&](const uint8_t *packed, int i) { return packed[i / 2] >> 4 * (i % 2) & 15; };
  switch (kind) {
  case IQ3_S: {
    const uint32_t high = raw[66 + b] >> 2 * q;
    return {raw[2 + 2 * j] | (high & 1) << 8, raw[3 + 2 * j] | (high >> 1 & 1) << 8, raw[74 + j],
            1 + 2 * nibble(raw + 106, b)};
  }
  case IQ3_XXS: {
    const uint32_t more = load_word(raw + 66 + 4 * b);
    return {raw[2 + 2 * j], raw[3 + 2 * j], expand_signs(more >> 7 * q & 127), int(1 + 2 * (more >> 28))};
  }
  case IQ2_S: {
    const uint32_t high = raw[66 + b] >> 2 * q & 3;
    return {raw[2 + j] | high << 8, 0, raw[34 + j], 1 + 2 * nibble(raw + 74, j / 2)};
  }
  case IQ2_XS: {
    const uint32_t both = load_half(raw + 2 + 2 * j);
    return {both & 511, 0, expand_signs(both >> 9), 1 + 2 * nibble(raw + 66, j / 2)};
  }
  case IQ2_XXS: {
    const uint32_t more = load_word(raw + 6 + 8 * b);
    return {raw[2 + 8 * b + q], 0, expand_signs(more >> 7 * q & 127), int(1 + 2 * (more >> 28))};
  }
  case IQ1_S: {
    const uint32_t more = load_half(raw + 34 + 2 * b);
    return {raw[2 + j] | (more >> 3 * q & 7) << 8, 0, more >> 15, int(1 + 2 * (more >> 12 & 7))};
  }
  default: { // IQ1_M
    const uint32_t more = nibble(raw + 32, j), scales = load_half(raw + 48 + 2 * (j / 8));
    return {raw[j] | (more & 7) << 8, 0, more >> 3, int(1 + 2 * (scales >> 3 * (j / 2 % 4) & 7))};
  }
  }
}

// grid: the codes of positive numbers, or of those that are shifted up, [places, 4 or 8].
inline void decode_grid(int kind, const uint8_t *raw, const uint8_t *grid, DecodedChunk &to) {
  const BlockFormat &format = BLOCK_FORMATS[kind];
  const int width = format.bits == 4 ? 4 : 8;
  to.scales[0] = load_half(raw);
  if (kind == IQ1_M) {
    to.scales[0] = 0;
    for (int i = 0; i < 4; i++) to.scales[0] |= uint16_t(load_half(raw + 48 + 2 * i) >> 12 << 4 * i);
  }
  for (int j = 0; j < CHUNK_INPUTS / 8; j++) {
    const EightCodes eight = read_eight(kind, raw, j);
    if (format.has_half_scales())
      to.sub_scales[j / 2] = uint8_t(eight.sub_scale);
    else
      to.sub_scales[j / 4] = uint8_t(eight.sub_scale);
    for (int i = 0; i < 8; i++) {
      const uint32_t place = i < width ? eight.first : eight.second;
      uint8_t code = grid[place * width + i % width];
      if (format.table == IQ1_TABLE)
        code = uint8_t(code - eight.signs);
      else if (eight.signs >> i & 1)
        code = uint8_t(format.last_code() - code);
      to.codes[8 * j + i] = code;
    }
  }
}

// A block of 256 inputs.
inline void decode_super_block(int kind, const uint8_t *raw, const uint8_t *grid, DecodedChunk &to) {
  if (BLOCK_FORMATS[kind].has_grid()) return decode_grid(kind, raw, grid, to);
  if (kind == IQ4_XS) {
    const uint16_t high = load_half(raw + 2);
    to.scales[0] = load_half(raw);
    for (int b = 0; b < CHUNK_BLOCKS; b++) {
      const int low = raw[4 + b / 2] >> 4 * (b % 2) & 15;
      to.sub_scales[b] = uint8_t((low | (high >> 2 * b & 3) << 4) - 32);
      split_nibbles(raw + 8 + 16 * b, 16, to.codes + BLOCK_INPUTS * b, to.codes + BLOCK_INPUTS * b + 16);
    }
    return;
  }
  if (kind == Q2_K || kind == Q3_K) {
    const uint8_t *low = kind == Q2_K ? raw + 16 : raw + 32;
    for (int i = 0; i < CHUNK_INPUTS; i++) {
      to.codes[i] = low[i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3;
      if (kind == Q3_K) to.codes[i] |= (raw[i % 32] >> i / 32 & 1) << 2;
    }
    if (kind == Q2_K) {
      std::memcpy(to.sub_scales, raw, 16);
      to.scales[0] = load_half(raw + 80), to.mins[0] = load_half(raw + 82);
    } else {
      unpack_signed_scales(raw + 96, to.sub_scales);
      to.scales[0] = load_half(raw + 108);
    }
    return;
  }
  if (kind == Q6_K) {
    const uint8_t *low = raw, *high = raw + 128;
    for (int part = 0; part < 2; part++, low += 64, high += 32) {
      uint8_t *codes = to.codes + 128 * part;
      split_nibbles(low, 64, codes, codes + 64);
      for (int i = 0; i < 32; i++)
        for (int q = 0; q < 4; q++) codes[32 * q + i] |= (high[i] >> 2 * q & 3) << 4;
    }
    std::memcpy(to.sub_scales, raw + 192, 16);
    to.scales[0] = load_half(raw + 208);
    return;
  }
  to.scales[0] = load_half(raw), to.mins[0] = load_half(raw + 2);
  unpack_scales_and_mins(raw + 4, to.sub_scales, to.sub_mins);
  const uint8_t *fifth = raw + 16, *low = kind == Q5_K ? raw + 48 : raw + 16;
  for (int part = 0; part < 4; part++, low += 32) {
    uint8_t *codes = to.codes + 64 * part;
    split_nibbles(low, 32, codes, codes + 32);
    for (int i = 0; kind == Q5_K && i < 32; i++) {
      codes[i] |= (fifth[i] >> 2 * part & 1) << 4;
      codes[32 + i] |= (fifth[i] >> (2 * part + 1) & 1) << 4;
    }
  }
}

// raw: the first of `blocks` blocks of 32 inputs. grid: of the kind, or null.
inline void decode_chunk(int kind, const uint8_t *raw, const uint8_t *grid, int64_t blocks,
                         DecodedChunk &to) {
  if (BLOCK_FORMATS[kind].has_sub_scales) return decode_super_block(kind, raw, grid, to);
  for (int64_t b = 0; b < blocks; b++) decode_block(kind, raw + b * BLOCK_FORMATS[kind].bytes, b, to);
}

// Writes what the codes stand for, rounded as the library `gguf` does.
inline void dequantize_chunk(int kind, const DecodedChunk &from, int64_t blocks, float *to) {
  const BlockFormat &format = BLOCK_FORMATS[kind];
  for (int64_t half = 0; half < 2 * blocks; half++) {
    int64_t b = half / 2, at = format.has_sub_scales ? 0 : b;
    float scale = format.has_e8m0_scales() ? e8m0_to_float_half(uint8_t(from.scales[at]))
                                           : half_to_float(from.scales[at]);
    scale *= format.scale_unit;
    float min = format.has_min ? half_to_float(from.mins[at]) : 0.f;
    const uint8_t sub_scale = from.sub_scales[format.has_half_scales() ? half : b];
    if (format.has_sub_scales && !format.has_min) scale *= float(int8_t(sub_scale));
    if (kind == Q2_K) scale *= float(sub_scale & 15), min *= -float(sub_scale >> 4);
    if (kind == Q4_K || kind == Q5_K) scale *= sub_scale, min *= -float(from.sub_mins[b]);
    for (int64_t i = 16 * half; i < 16 * half + 16; i++) {
      const int u = format.table ? CODE_TABLES[format.table][from.codes[i] & 15] : from.codes[i];
      to[i] = scale * float(u - format.zero_point) + min;
    }
  }
}

// Writes a row of a weight as a file holds it.
inline void dequantize_row(int kind, const uint8_t *raw, const uint8_t *grid, int64_t blocks, float *to) {
  const BlockFormat &format = BLOCK_FORMATS[kind];
  for (int64_t from = 0; from < blocks; from += CHUNK_BLOCKS) {
    int64_t count = std::min(CHUNK_BLOCKS, blocks - from);
    DecodedChunk decoded;
    decode_chunk(kind, raw + from * BLOCK_INPUTS / format.inputs * format.bytes, grid, count, decoded);
    dequantize_chunk(kind, decoded, count, to + from * BLOCK_INPUTS);
  }
}

} // namespace
