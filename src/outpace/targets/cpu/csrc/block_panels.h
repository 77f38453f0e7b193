// Weights in blocks, packed into panels in the order in which products read them (block_formats.h), and
// panels turned into floats again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "gguf_blocks.h"
#include "team.h"

namespace {

constexpr uintptr_t LARGE_PAGE = 1 << 21; // bytes of a page, where they are large (as in Python)

// The codes of four inputs.
inline uint32_t load_group(const uint8_t *codes, int64_t group) {
  uint32_t four;
  std::memcpy(&four, codes + 4 * group, sizeof four);
  return four;
}

// Writes one block's codes of output o into a panel.
inline void pack_codes(int bits, const uint8_t *codes, int64_t o, uint8_t *to) {
  auto put = [&](int64_t vector, uint32_t four) {
    std::memcpy(to + vector * GROUP_BYTES + 4 * o, &four, sizeof four);
  };
  if (bits == 8) {
    for (int64_t g = 0; g < GROUPS; g++) put(g, load_group(codes, g));
    return;
  }
  if (bits == 6) {
    for (int64_t half = 0; half < 2; half++)
      for (int64_t v = 0; v < 3; v++) {
        uint32_t fourth = load_group(codes, 4 * half + 3) >> 2 * v & 0x03030303;
        put(3 * half + v, load_group(codes, 4 * half + v) | fourth << 6);
      }
    return;
  }
  if (bits < 4) {
    uint32_t fours[3] = {};
    for (int64_t g = 0; g < GROUPS; g++) {
      fours[g / 4] |= (load_group(codes, g) & 0x03030303) << 2 * (g % 4);
      fours[2] |= (load_group(codes, g) >> 2 & 0x01010101) << g;
    }
    for (int v = 0; v < bits; v++) put(v, fours[v]);
    return;
  }
  uint32_t fifth = 0;
  for (int64_t g = 0; g < GROUPS; g++) fifth |= (load_group(codes, g) >> 4 & 0x01010101) << g;
  for (int64_t v = 0; v < 4; v++)
    put(v, (load_group(codes, v) & 0x0f0f0f0f) | (load_group(codes, v + 4) & 0x0f0f0f0f) << 4);
  if (bits == 5) put(4, fifth);
}

// Reads one block's codes of output o from a panel.
inline void unpack_codes(int bits, const uint8_t *from, int64_t o, uint8_t *codes) {
  auto get = [&](int64_t vector, int64_t i) { return from[vector * GROUP_BYTES + 4 * o + i]; };
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
inline void for_each_scale(int kind, int64_t blocks, int64_t o, uint8_t *at, DecodedChunk &of, Each each) {
  const BlockFormat &format = BLOCK_FORMATS[kind];
  auto next = [&](void *value, int64_t size) {
    each(at + size * o, value, size);
    at += size * BLOCK_PANEL;
  };
  if (format.has_sub_scales) {
    next(of.scales, 2);
    if (format.has_min) next(of.mins, 2);
  }
  for (int64_t b = 0; b < blocks; b++)
    if (format.has_half_scales()) {
      next(of.sub_scales + 2 * b, 1), next(of.sub_scales + 2 * b + 1, 1);
    } else if (format.has_sub_scales && format.sub_scales() == 1) {
      next(of.sub_scales + b, 1);
    } else if (format.has_sub_scales) {
      next(of.sub_scales + b, 1), next(of.sub_mins + b, 1);
    } else {
      next(of.scales + b, format.has_e8m0_scales() ? 1 : 2); // the lower byte comes first
      if (format.has_min) next(of.mins + b, 2);
    }
}

// Packs panel number `panel` of a weight [outputs, inputs]; outputs beyond the last are zeros.
inline void pack_panel(int kind, const uint8_t *raw, const uint8_t *grid, int64_t outputs, int64_t blocks,
                       int64_t panel, uint8_t *to) {
  const BlockFormat &format = BLOCK_FORMATS[kind];
  const int64_t row = blocks * BLOCK_INPUTS / format.inputs * format.bytes;
  for (int64_t from = 0; from < blocks; from += CHUNK_BLOCKS) {
    int64_t count = std::min(CHUNK_BLOCKS, blocks - from);
    for (int64_t o = 0; o < BLOCK_PANEL; o++) {
      DecodedChunk decoded = {};
      int64_t output = panel * BLOCK_PANEL + o;
      if (output < outputs)
        decode_chunk(kind, raw + output * row + from * BLOCK_INPUTS / format.inputs * format.bytes, grid,
                     count, decoded);
      for (int64_t b = 0; b < count; b++)
        pack_codes(format.bits, decoded.codes + b * BLOCK_INPUTS, o, to + code_bytes(format, b));
      for_each_scale(kind, count, o, to + code_bytes(format, count), decoded,
                     [](uint8_t *place, void *value, int64_t size) { std::memcpy(place, value, size); });
    }
    to += chunk_bytes(format, count);
  }
}

// Writes output o of a panel as floats [inputs].
inline void dequantize_output(int kind, uint8_t *panel, int64_t o, int64_t blocks, float *to) {
  const BlockFormat &format = BLOCK_FORMATS[kind];
  for (int64_t from = 0; from < blocks; from += CHUNK_BLOCKS) {
    int64_t count = std::min(CHUNK_BLOCKS, blocks - from);
    DecodedChunk decoded;
    for (int64_t b = 0; b < count; b++)
      unpack_codes(format.bits, panel + code_bytes(format, b), o, decoded.codes + b * BLOCK_INPUTS);
    for_each_scale(kind, count, o, panel + code_bytes(format, count), decoded,
                   [](uint8_t *place, void *value, int64_t size) { std::memcpy(value, place, size); });
    dequantize_chunk(kind, decoded, count, to + from * BLOCK_INPUTS);
    panel += chunk_bytes(format, count);
  }
}

// Asks the system for large pages, before anybody writes there. What is read from one end to the
// other for each token is read sooner so: a processor looks up the address of each page.
void prefer_large_pages(uint8_t *at, int64_t bytes) {
#ifdef __linux__
  const uintptr_t begin = (uintptr_t(at) + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
  const uintptr_t end = (uintptr_t(at) + uintptr_t(bytes)) / LARGE_PAGE * LARGE_PAGE;
  // A system without them says no, which changes nothing.
  if (begin < end) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Packs some panels of a weight that a file holds in blocks, on several threads.
struct PackingJob {
  int kind;
  const uint8_t *raw, *grid;
  int64_t outputs, blocks, first, last;
  uint8_t *to;
  Threads threads;
  Team team = {};

  void compute() {
    const int64_t size = panel_bytes(BLOCK_FORMATS[kind], blocks);
    for (int64_t begin, end; team.take(last - first, 1, threads.size_here(), begin, end);)
      for (int64_t panel = first + begin; panel < first + end; panel++)
        pack_panel(kind, raw, grid, outputs, blocks, panel, to + panel * size);
  }
};

} // namespace
