// Products of many rows with weights in blocks by AMX: the bits of block_products.h, sooner; and the choice
// between the two.
//
// AMX multiplies a tile of up to 16 rows of activations, 32 inputs deep, with the codes of 16 outputs
// in one instruction. Its integer sums are exact, as all are, and are scaled by the same steps in the same
// order. But codes must be spread to bytes in memory first, and sums come back through memory, and so it
// does not pay for a few rows.
#pragma once

#include "block_products.h"

#if defined(__AMX_INT8__) && defined(DOTS_VNNI512) && defined(__linux__)
#define DOTS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#ifdef DOTS_AMX

constexpr int64_t AMX_ROWS = 32;      // rows for which tiles are worth it
constexpr int64_t AMX_TILE_ROWS = 16; // rows of a tile
constexpr int64_t AMX_BATCH = 64; // rows that go through all panels of a thread before the next rows come

// Asks the system for the tiles' registers, which each process must do once. Returns whether it may
// use them.
inline bool amx_granted() {
  constexpr int ASK = 0x1023, TILES = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, ASK, TILES) == 0;
  return granted;
}

// The shapes of this thread's tile registers: 0 are activations, 1 are weights, 2 are sums.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {}; // of a row
  uint8_t rows[16] = {};

  // rows: of activations. inputs: which share a scale.
  TileConfig(int64_t tall, int64_t inputs) {
    bytes[0] = uint16_t(inputs), rows[0] = uint8_t(tall);
    bytes[1] = GROUP_BYTES, rows[1] = uint8_t(inputs / 4);
    bytes[2] = GROUP_BYTES, rows[2] = uint8_t(tall);
  }
};

// Sets the shapes for as long as it lives.
struct TileScope {
  explicit TileScope(const TileConfig &shapes) {
    asm volatile("" : : "r"(&shapes) : "memory"); // g++ does not know that all of it is read
    _tile_loadconfig(&shapes);
  }
  ~TileScope() { _tile_release(); }
  TileScope(const TileScope &) = delete;
};

// Multiplies the activations of some rows, an `ActivationBlock` each, with codes of 16 outputs.
// sums: [rows, BLOCK_PANEL].
inline void multiply_tile(const int8_t *x, const uint8_t *codes, int32_t *sums) {
  _tile_zero(2);
  _tile_loadd(0, x, sizeof(ActivationBlock));
  _tile_loadd(1, codes, GROUP_BYTES);
  _tile_dpbsud(2, 0, 1);
  _tile_stored(2, sums, GROUP_BYTES);
}

// A chunk of a panel, which is multiplied with rows.
template <int CODE, bool HAS_MIN> struct AmxChunk {
  static constexpr int PARTS = has_half_scales_of(CODE) ? 2 : 1; // of a block, with scales of their own
  static constexpr int64_t INPUTS = BLOCK_INPUTS / PARTS;

  const BlockProduct &job;
  const int64_t from, blocks; // of the chunk
  Scales scales;
  alignas(64) uint8_t codes[CHUNK_BLOCKS][GROUPS][GROUP_BYTES];
  alignas(64) int32_t found[CHUNK_BLOCKS][PARTS][AMX_TILE_ROWS][BLOCK_PANEL];

  // Spreads the codes, and prefetches those that come next.
  AmxChunk(const BlockProduct &job, const uint8_t *packed, int64_t from)
      : job(job), from(from), blocks(std::min(CHUNK_BLOCKS, job.blocks - from)) {
    const int64_t step = chunk_bytes(job.format, CHUNK_BLOCKS) / CHUNK_BLOCKS;
    load_scales(job.format, packed + code_bytes(job.format, blocks), blocks, scales);
    for (int64_t b = 0; b < blocks; b++) {
      prefetch_block<CODE>(packed + b * step);
      unpack(std::make_integer_sequence<int, GROUPS>{}, packed + b * bits_of(CODE) * GROUP_BYTES, codes[b]);
    }
    asm volatile("" ::: "memory"); // the compiler does not know that tiles read memory
  }

  template <int... GROUP>
  void unpack(std::integer_sequence<int, GROUP...>, const uint8_t *at,
              uint8_t (&to)[GROUPS][GROUP_BYTES]) const {
    auto put = [&](auto which) {
      constexpr int G = decltype(which)::value;
      bytes unpacked = load_codes<CODE, G>(at);
      std::memcpy(to[G], &unpacked, sizeof unpacked);
    };
    (put(std::integral_constant<int, GROUP>{}), ...);
  }

  // Finds the integer sums of as many rows as a tile has. x: the first of them, in this chunk.
  void multiply(const ActivationBlock *x) {
    for (int64_t b = 0; b < blocks; b++)
      for (int part = 0; part < PARTS; part++)
        multiply_tile(x[b * job.rows].codes + part * INPUTS, codes[b][part * INPUTS / 4],
                      found[b][part][0]);
  }

  // Those of row number r of the tile. in: that row.
  floats dot(int64_t b, int part, int64_t r, const ActivationBlock &in) const {
    ints sum = load<ints>(found[b][part][r]);
    if constexpr (!HAS_MIN) sum += correction_at<CODE>(in, correction_of(job.format) + part) - ints{};
    return __builtin_convertvector(sum, floats);
  }

  // Scales and adds what was found for ROWS rows, of which x is the first, number r of the tile.
  template <int ROWS> void scale(int64_t r, const ActivationBlock *x, float *sums) const {
    floats sum[ROWS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) sum[i] = load<floats>(sums + i * BLOCK_PANEL);
    for (int64_t b = 0; b < blocks; b++, x += job.rows) {
      const floats first = load<floats>(scales.scale[PARTS * b]);
      const floats second = load<floats>(PARTS == 2 ? scales.scale[2 * b + 1] : scales.min[b]);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++)
        if constexpr (PARTS == 2) {
          floats half = first * dot(b, 0, r + i, x[i]);
          for (int part = 0; HAS_MIN && part < 2; part++)
            half = add_half_min(scales.min + 2 * b, 0, part, x[i], half);
          sum[i] = add_halves(half, dot(b, 1, r + i, x[i]), second, x[i], sum[i]);
        } else {
          sum[i] = add_scaled(dot(b, 0, r + i, x[i]), first, x[i], sum[i]);
          if constexpr (HAS_MIN) sum[i] = add_min(second, x[i], sum[i]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) store(sum[i], sums + i * BLOCK_PANEL);
  }

  // Adds the chunk's part to the sums of `count` rows from `row` on, `tall` at a time. The last
  // tile may begin within the one before it, whose rows are not added again.
  void add(int64_t row, int64_t count, int64_t tall, float *sums) {
    for (int64_t next = 0; next < count; next += tall) {
      const int64_t first = std::min(next, count - tall), end = first + tall;
      const ActivationBlock *x = job.x + from * job.rows + row;
      multiply(x + first);
      int64_t r = next;
      for (; r + 8 <= end; r += 8) scale<8>(r - first, x + r, sums + r * BLOCK_PANEL);
      for (; r < end; r++) scale<1>(r - first, x + r, sums + r * BLOCK_PANEL);
    }
  }
};

// The same rows go through all panels from `begin` to `end` before the next rows come: their activations
// stay in the second cache meanwhile.
template <int CODE, bool HAS_MIN>
void compute_panels_amx(const BlockProduct &job, int64_t begin, int64_t end) {
  const int64_t size = panel_bytes(job.format, job.blocks), whole = chunk_bytes(job.format, CHUNK_BLOCKS);
  alignas(64) float sums[AMX_BATCH * BLOCK_PANEL];
  for (int64_t row = 0; row < job.rows; row += AMX_BATCH) {
    const int64_t count = std::min(AMX_BATCH, job.rows - row);
    const int64_t tiles = (count + AMX_TILE_ROWS - 1) / AMX_TILE_ROWS, tall = (count + tiles - 1) / tiles;
    const TileScope shapes({tall, AmxChunk<CODE, HAS_MIN>::INPUTS});
    for (int64_t panel = begin; panel < end; panel++) {
      const uint8_t *packed = job.panels + panel * size;
      std::memset(sums, 0, count * BLOCK_PANEL * sizeof(float));
      for (int64_t from = 0; from < job.blocks; from += CHUNK_BLOCKS, packed += whole)
        AmxChunk<CODE, HAS_MIN>(job, packed, from).add(row, count, tall, sums);
      write_panel(job, panel, row, count, sums);
    }
  }
}

inline void compute_panels_amx(const BlockProduct &job, int64_t begin, int64_t end) {
  dispatch_code(job.format,
                [&](auto code) { compute_panels_amx<code.CODE, code.HAS_MIN>(job, begin, end); });
}

#endif

// Computes the outputs of the panels from `begin` to `end`.
inline void compute_panels(const BlockProduct &job, int64_t begin, int64_t end) {
#ifdef DOTS_AMX
  if (job.rows >= AMX_ROWS && amx_granted()) return compute_panels_amx(job, begin, end);
#endif
  for (; begin < end; begin++) compute_panel(job, begin);
}

} // namespace
