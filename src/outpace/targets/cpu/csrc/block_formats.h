// Kinds of quantised blocks, and the layout of our panels of them.
//
// All kinds come down to one form: w = scale * u + min, where u is an unsigned code of 2 to 6 or of 8 bits,
// and scale and min are shared by 32 inputs of an output (by 16, where codes have 2, 3 or 6 bits). Of some
// codes u is looked up in a table: those of MXFP4 are small floats (OCP Microscaling Formats 1.0), whose
// scale is a power of two, and those of IQ4_NL and IQ4_XS stand for numbers that lie closer near zero. In a
// file, blocks of IQ1 to IQ3 name four or eight numbers at once by their place in a list (the grid), and
// their signs: here each number has a code of its own, of 3 or 4 bits.
//
// Products compute 16 outputs together, and so the codes of 16 outputs make a panel. Along a panel come
// chunks of 8 blocks of 32 inputs (a super-block of the K-quants): first their codes, then the scales
// exactly as the file holds them.
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

#include <cstdint>

namespace {

constexpr int64_t BLOCK_PANEL = 16;                           // outputs of a panel of blocks (as in Python)
constexpr int64_t BLOCK_INPUTS = 32;                          // inputs of a block (as in Python)
constexpr int64_t CHUNK_BLOCKS = 8;                           // blocks of a chunk
constexpr int64_t CHUNK_INPUTS = CHUNK_BLOCKS * BLOCK_INPUTS; // inputs of a chunk
constexpr int64_t GROUPS = 8;                                 // groups of four inputs in a block
constexpr int64_t GROUP_BYTES = 4 * BLOCK_PANEL;              // bytes of the codes of one group

// Tables in which codes are looked up, by the first kind of blocks that has them.
enum Table {
  NO_TABLE,
  FP4_TABLE,
  IQ4_TABLE,
  IQ3_S_TABLE,
  IQ3_XXS_TABLE,
  IQ2_TABLE,
  IQ1_TABLE,
  TABLE_COUNT
};

// The u of each code: what small floats stand for, doubled, with 12 added; uneven numbers, with 128; the
// odd numbers to 15 and their negatives, with 16; eight and three numbers and their negatives, with 128;
// -1, 0 and 1, shifted by an eighth up or down, 16 times, with 32.
constexpr uint8_t CODE_TABLES[TABLE_COUNT][16] = {
    {},
    {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31},
    {66, 76, 84, 92, 100, 108, 116, 124, 132, 140, 148, 156, 164, 172, 180, 190},
    {85, 103, 120, 136, 153, 171},
    {14, 18, 30, 34, 46, 50},
};

// What a kind of blocks is like.
struct BlockFormat {
  int bits;
  bool has_min;          // else min = -zero_point * scale
  bool has_sub_scales;   // whether blocks have small integers that multiply the scale of a chunk
  int zero_point;        // the u of zero, where there is no min
  int64_t inputs, bytes; // of a block in a file
  Table table = NO_TABLE;
  float scale_unit = 1.f; // by which the scale of a chunk is multiplied: a power of two

  // Whether 16 inputs share a scale, and so the halves of a block have one each.
  constexpr bool has_half_scales() const { return bits == 2 || bits == 3 || bits == 6; }
  // Whether scales are powers of two, in a byte each (E8M0).
  constexpr bool has_e8m0_scales() const { return table == FP4_TABLE; }
  // Small integers of a block, if it has some: for its scale, and maybe for its min.
  constexpr int sub_scales() const { return table && !has_half_scales() ? 1 : 2; }
  // The largest code, of kinds that have a grid.
  constexpr uint8_t last_code() const { return bits == 4 ? 15 : 5; }
  // Whether files name numbers by their place in a grid.
  constexpr bool has_grid() const { return table >= IQ3_S_TABLE; }
};

// By their names in GGUF, in Python's order (weights/blocks.py).
enum Kind {
  Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, MXFP4, IQ4_NL, IQ4_XS, Q2_K, Q3_K,
  IQ3_S, IQ3_XXS, IQ2_S, IQ2_XS, IQ2_XXS, IQ1_S, IQ1_M, KINDS
};

constexpr BlockFormat BLOCK_FORMATS[KINDS] = {
    {8, false, false, 128, 32, 34},                       // Q8_0
    {4, false, false, 8, 32, 18},                         // Q4_0
    {4, true, false, 0, 32, 20},                          // Q4_1
    {5, false, false, 16, 32, 22},                        // Q5_0
    {5, true, false, 0, 32, 24},                          // Q5_1
    {4, true, true, 0, 256, 144},                         // Q4_K
    {5, true, true, 0, 256, 176},                         // Q5_K
    {6, false, true, 32, 256, 210},                       // Q6_K
    {4, false, false, 12, 32, 17, FP4_TABLE},             // MXFP4
    {4, false, false, 128, 32, 18, IQ4_TABLE},            // IQ4_NL
    {4, false, true, 128, 256, 136, IQ4_TABLE},           // IQ4_XS
    {2, true, true, 0, 256, 84},                          // Q2_K
    {3, false, true, 4, 256, 110},                        // Q3_K
    {4, false, true, 16, 256, 110, IQ3_S_TABLE},          // IQ3_S
    {4, false, true, 128, 256, 98, IQ3_XXS_TABLE, 0.25f}, // IQ3_XXS
    {3, false, true, 128, 256, 82, IQ2_TABLE, 0.125f},    // IQ2_S
    {3, false, true, 128, 256, 74, IQ2_TABLE, 0.125f},    // IQ2_XS
    {3, false, true, 128, 256, 66, IQ2_TABLE, 0.125f},    // IQ2_XXS
    {3, false, true, 32, 256, 50, IQ1_TABLE, 0.0625f},    // IQ1_S
    {3, false, true, 32, 256, 56, IQ1_TABLE, 0.0625f},    // IQ1_M
};

// -- sizes -----------------------------------------------------------------------------------------

inline int64_t blocks_of(int64_t inputs) { return (inputs + BLOCK_INPUTS - 1) / BLOCK_INPUTS; }

inline int64_t code_bytes(const BlockFormat &format, int64_t blocks) {
  return blocks * format.bits * GROUP_BYTES;
}

inline int64_t scale_bytes(const BlockFormat &format, int64_t blocks) {
  int64_t numbers = 2 * blocks * (1 + format.has_min); // bytes per output
  if (format.has_sub_scales) numbers = format.sub_scales() * blocks;
  if (format.has_e8m0_scales()) numbers = blocks;
  return BLOCK_PANEL * (numbers + (format.has_sub_scales ? 2 * (1 + format.has_min) : 0));
}

inline int64_t chunk_bytes(const BlockFormat &format, int64_t blocks) {
  return code_bytes(format, blocks) + scale_bytes(format, blocks);
}

// The bytes of a panel, whole lines of the cache.
inline int64_t panel_bytes(const BlockFormat &format, int64_t blocks) {
  int64_t rest = blocks % CHUNK_BLOCKS, bytes = blocks / CHUNK_BLOCKS * chunk_bytes(format, CHUNK_BLOCKS);
  if (rest) bytes += chunk_bytes(format, rest);
  return (bytes + 63) / 64 * 64;
}

} // namespace
