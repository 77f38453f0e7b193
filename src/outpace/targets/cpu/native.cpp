// Passes over a few tokens on a CPU: matrix products, and whole decoder layers.
//
// Decoding reads every weight for one token, and scoring a draft should read it once too. So the
// weights of a few outputs go through the registers together, and meet all rows before the next.
// There are three kinds of products: of weights in plain rows, as embeddings need them, of weights that
// are laid out in panels, which is faster, and of weights in quantised blocks (block_products.h).
// Every sum runs in one order whatever rows share the call, and attention goes through the slots
// that a token sees in their order, wherever they are: so what a token gets has the same bits when
// it is decoded alone and when it is scored among drafts, in a chain or in a tree.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "block_amx.h"
#include "cached.h"
#include "experts.h"
#include "lanes.h"
#include "latent.h"
#include "part.h"
#include "recurrent.h"
#include "steps.h"
#include "team.h"
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

constexpr int ROWS = 6;          // rows of a tile, at most
constexpr int MANY = 4;          // rows from which on all weights in plain rows are called for
constexpr int64_t HEAD = 256;    // weights of an output that are called for otherwise
constexpr int64_t FEW = 64;      // rows that have the same bits however many (as in Python)
constexpr int64_t DEPTH = 512;   // inputs that are added up before what came before is added
constexpr int64_t PANEL = LANES; // outputs whose weights lie together
constexpr int64_t SUMS = 12;     // vectors of sums that a tile of panels has at once
constexpr int TOGETHER = 8;      // tokens that go through the cache together
constexpr int MOST_EACH = 64;    // query heads that may share a key head (as in Python)
constexpr int64_t SHARE = 32;    // blocks of one row that a thread takes at once
constexpr int64_t GRAIN = 4;     // blocks of activations that a thread takes at once, at least
constexpr int64_t COPIES = 1024; // tokens whose states threads hold, counted once for each
constexpr int64_t MOST_PARTIALS = 1 << 24; // floats of what threads have seen of a layer's pieces
constexpr uintptr_t LARGE_PAGE = 1 << 21; // bytes of a page, where they are large (as in Python)

// -- products: y[r, n] = sum over k of x[r, k] w[n, k] ---------------------------------------------

inline float finished(float sum, const Part &part, int64_t output) {
  if (part.scale) sum *= part.scale[output];
  return part.bias ? sum + part.bias[output] : sum;
}

// x: rows k apart; w: weights of outputs that are `apart`.
template <typename W, int OUT, int IN>
inline void step(const float *x, const W *w, int64_t k, int64_t apart, floats (&sums)[IN][OUT]) {
  floats wide[OUT];
#pragma GCC unroll 8
  for (int o = 0; o < OUT; o++) {
    wide[o] = widen(w + o * apart);
    if (IN > 1) keep(wide[o]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < IN; r++) {
    floats in = load<floats>(x + r * k);
    if (OUT > 1) keep(in);
#pragma GCC unroll 8
    for (int o = 0; o < OUT; o++) sums[r][o] = fused(wide[o], in, sums[r][o]);
  }
}

// OUT outputs, each `apart` from the one before, of IN rows.
template <typename W, int OUT, int IN>
inline void tile(const float *x, int64_t k, const Part &part, float *y, int64_t output,
                 int64_t apart) {
  constexpr int64_t LINE = 64 / sizeof(W); // weights that come from memory together
  const W *w = static_cast<const W *>(part.weight) + output * k;
  // Processors see by themselves that weights are read in order, but only after a while, and not far
  // ahead. So those of the next outputs are called for: their beginning, or all if arithmetic takes
  // so long that nothing would be under way meanwhile.
  const int64_t calling = IN >= MANY || sizeof(W) < 4 ? 0 : std::max(k - HEAD, int64_t(0));
  floats sums[IN][OUT] = {};
  int64_t at = 0;
  for (; at + LINE <= k; at += LINE) {
    if (at >= calling)
      for (int o = 0; o < OUT; o++) __builtin_prefetch(w + (o * apart + 1) * k + at - calling);
#pragma GCC unroll 2
    for (int64_t l = 0; l < LINE; l += LANES)
      step<W, OUT, IN>(x + at + l, w + at + l, k, apart * k, sums);
  }
  for (; at + LANES <= k; at += LANES) step<W, OUT, IN>(x + at, w + at, k, apart * k, sums);
  for (int r = 0; r < IN; r++)
    for (int o = 0; o < OUT; o++) {
      float found = sum(sums[r][o]);
      for (int64_t rest = at; rest < k; rest++)
        found += one(w[o * apart * k + rest]) * x[r * k + rest];
      y[r * part.outputs + output + o * apart] = finished(found, part, output + o * apart);
    }
}

// All rows for outputs from `output` on, OUT at a time; returns where it stopped. Those that go
// together are far apart, because memory is faster if it is read on in several places at once.
template <typename W, int OUT>
inline int64_t outputs(const float *x, int64_t rows, int64_t k, const Part &part, float *y,
                       int64_t output, int64_t end) {
  const int64_t apart = (end - output) / OUT;
  for (int64_t last = output + apart; output < last; output++) {
    int64_t row = 0;
    for (int64_t tiles = (rows + ROWS - 1) / ROWS; tiles; tiles--) {
      int64_t take = (rows - row + tiles - 1) / tiles; // as even as can be
      const float *from = x + row * k;
      float *to = y + row * part.outputs;
      switch (take) {
      case 1: tile<W, OUT, 1>(from, k, part, to, output, apart); break;
      case 2: tile<W, OUT, 2>(from, k, part, to, output, apart); break;
      case 3: tile<W, OUT, 3>(from, k, part, to, output, apart); break;
      case 4: tile<W, OUT, 4>(from, k, part, to, output, apart); break;
      case 5: tile<W, OUT, 5>(from, k, part, to, output, apart); break;
      default: tile<W, OUT, ROWS>(from, k, part, to, output, apart);
      }
      row += take;
    }
  }
  return output + (OUT - 1) * apart;
}

#if AVX
// Writes eight rows of eight numbers as columns; to: rows PANEL apart.
inline void turn_over(const __m256 (&row)[8], float *to) {
  __m256 pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
      fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xEE);
    }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(to + i * PANEL, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * PANEL, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
  }
}
#endif

// Lays out weights of `width` outputs, rows k apart, one input after another.
template <typename W>
void lay_out(const W *w, int64_t k, int64_t width, int64_t depth, float *panel) {
  int64_t done = 0;
#if AVX
  for (; width == PANEL && done + LANES <= depth; done += LANES)
    for (int64_t o = 0; o < PANEL; o += 8) {
      float wide[8][LANES];
      for (int i = 0; i < 8; i++) {
        floats weights = widen(w + (o + i) * k + done);
        std::memcpy(wide[i], &weights, sizeof weights);
      }
      for (int part = 0; part < LANES; part += 8) {
        __m256 rows[8];
        for (int i = 0; i < 8; i++) rows[i] = load<__m256>(wide[i] + part);
        turn_over(rows, panel + (done + part) * PANEL + o);
      }
    }
#endif
  for (int64_t o = 0; o < width; o++)
    for (int64_t at = done; at < depth; at++) panel[at * PANEL + o] = one(w[o * k + at]);
}

void finish(int64_t rows, const Part &part, float *y, int64_t begin, int64_t end) {
  if (!part.scale && !part.bias) return;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t o = begin; o < end; o++)
      y[r * part.outputs + o] = finished(y[r * part.outputs + o], part, o);
}

// Some inputs of some rows, the weights that they meet, and the sums that this is added to.
template <typename W> struct Patch {
  const float *x;         // rows k apart
  int64_t k, depth;       // inputs: of a row, and of the patch
  const W *panel;         // panels are `apart`
  int64_t apart;
  float *sums;            // of a row: one panel's are `spread` after the one's before
  int64_t stride, spread; // between rows, between panels
  bool begin;             // whether there are no sums yet
};

// Works on IN rows and SIDE panels. Memory is read in SIDE places at once, which is how it is
// fastest; of inputs and weights, whatever there is less of waits in registers.
template <typename W, int IN, int SIDE>
void add_product(const Patch<W> &patch) {
  const auto [x, k, depth, panel, apart, sums, stride, spread, begin] = patch;
  floats found[SIDE][IN] = {};
  for (int64_t at = 0; at < depth; at++) {
    const W *w = panel + at * PANEL;
    if (IN < SIDE) {
      floats in[IN];
#pragma GCC unroll 8
      for (int r = 0; r < IN; r++) keep(in[r] = all(x[r * k + at]));
#pragma GCC unroll 8
      for (int side = 0; side < SIDE; side++) {
        floats wide = widen(w + side * apart);
        if (IN > 1) keep(wide);
#pragma GCC unroll 8
        for (int r = 0; r < IN; r++) found[side][r] = fused(in[r], wide, found[side][r]);
      }
    } else {
      floats wide[SIDE];
#pragma GCC unroll 8
      for (int side = 0; side < SIDE; side++) keep(wide[side] = widen(w + side * apart));
#pragma GCC unroll 8
      for (int r = 0; r < IN; r++) {
        floats in = all(x[r * k + at]);
        if (SIDE > 1) keep(in);
#pragma GCC unroll 8
        for (int side = 0; side < SIDE; side++)
          found[side][r] = fused(in, wide[side], found[side][r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int side = 0; side < SIDE; side++)
#pragma GCC unroll 8
    for (int r = 0; r < IN; r++) {
      float *to = sums + r * stride + side * spread;
      floats total = found[side][r];
      if (!begin) total += load<floats>(to);
      std::memcpy(to, &total, sizeof total);
    }
}

// The same for any number of rows.
template <typename W, int SIDE> void add_products(Patch<W> patch, int64_t rows) {
  for (int64_t tiles = (rows + ROWS - 1) / ROWS; tiles; tiles--) {
    int64_t take = (rows + tiles - 1) / tiles; // as even as can be
    switch (take) {
    case 1: add_product<W, 1, SIDE>(patch); break;
    case 2: add_product<W, 2, SIDE>(patch); break;
    case 3: add_product<W, 3, SIDE>(patch); break;
    case 4: add_product<W, 4, SIDE>(patch); break;
    case 5: add_product<W, 5, SIDE>(patch); break;
    default: add_product<W, ROWS, SIDE>(patch);
    }
    rows -= take;
    patch.x += take * patch.k;
    patch.sums += take * patch.stride;
  }
}

// Takes SIDE panels at once while there are as many, far apart, so that each place in memory is read
// on for long; returns where it stopped. IN: rows, or 0 where their number is not known before.
template <typename W, int IN, int SIDE>
int64_t side_by_side(const float *x, int64_t rows, int64_t k, const Part &part, float *y,
                     int64_t output, int64_t end) {
  const W *w = static_cast<const W *>(part.weight);
  const int64_t spread = (end - output) / PANEL / SIDE * PANEL;
  for (int64_t last = output + spread; output < last; output += PANEL)
    for (int64_t from = 0; from < k; from += DEPTH) {
      Patch<W> patch{x + from,           k,          std::min(DEPTH, k - from),
                     w + output * k + from * PANEL,  spread * k,
                     y + output,         part.outputs, spread, !from};
      if constexpr (IN > 0)
        add_product<W, IN, SIDE>(patch);
      else
        add_products<W, SIDE>(patch, rows);
    }
  return output + (SIDE - 1) * spread;
}

// Weights that are laid out already; outputs in whole panels.
template <typename W>
void laid_out(const float *x, int64_t rows, int64_t k, const Part &part, float *y, int64_t begin,
              int64_t end) {
  int64_t output = begin;
  switch (rows) {
  case 1: output = side_by_side<W, 1, SUMS / 2>(x, rows, k, part, y, output, end); break;
  case 2: output = side_by_side<W, 2, SUMS / 2>(x, rows, k, part, y, output, end); break;
  case 3: output = side_by_side<W, 3, SUMS / 3>(x, rows, k, part, y, output, end); break;
  case 4: output = side_by_side<W, 4, SUMS / 4>(x, rows, k, part, y, output, end); break;
  default: output = side_by_side<W, 0, SUMS / ROWS>(x, rows, k, part, y, output, end);
  }
  side_by_side<W, 0, 1>(x, rows, k, part, y, output, end);
  finish(rows, part, y, begin, end);
}

// Up to two panels of outputs of many rows, as prompts have. The weights are laid out so that they
// lie in the nearest cache while all rows go by. The order of sums is another than that of few rows.
template <typename W>
void many(const float *x, int64_t rows, int64_t k, const Part &part, float *y, int64_t output,
          int64_t width) {
  constexpr int64_t WIDE = 2 * PANEL;
  const W *w = static_cast<const W *>(part.weight) + output * k;
  alignas(64) float panels[2 * DEPTH * PANEL] = {}, beside[ROWS * WIDE] = {};
  y += output;
  for (int64_t from = 0; from < k; from += DEPTH) {
    int64_t depth = std::min(DEPTH, k - from), row = 0;
    for (int64_t o = 0; o < width; o += PANEL)
      lay_out(w + o * k + from, k, std::min(PANEL, width - o), depth, panels + o * DEPTH);
    for (int64_t tiles = (rows + ROWS - 1) / ROWS; tiles; tiles--) {
      int64_t take = (rows - row + tiles - 1) / tiles; // as even as can be
      const float *in = x + row * k + from;
      float *to = y + row * part.outputs;
      bool fits = width == WIDE; // else what is beyond would be overwritten
      float *sums = fits ? to : beside;
      int64_t stride = fits ? part.outputs : WIDE;
      for (int64_t r = 0; !fits && r < take; r++)
        std::memcpy(sums + r * WIDE, to + r * part.outputs, width * sizeof(float));
      add_products<float, 2>(
          {in, k, depth, panels, DEPTH * PANEL, sums, stride, PANEL, !from}, take);
      for (int64_t r = 0; !fits && r < take; r++)
        std::memcpy(to + r * part.outputs, sums + r * WIDE, width * sizeof(float));
      row += take;
    }
  }
  finish(rows, part, y - output, output, output + width);
}

template <typename W>
void span(const float *x, int64_t rows, int64_t k, const Part &part, float *y, int64_t begin,
          int64_t end) {
  if (part.laid_out) return laid_out<W>(x, rows, k, part, y, begin, end);
  if (rows > FEW) {
    for (; begin < end; begin += 2 * PANEL)
      many<W>(x, rows, k, part, y, begin, std::min(2 * PANEL, end - begin));
    return;
  }
  int64_t o = begin, tiles = (rows + ROWS - 1) / ROWS, tallest = (rows + tiles - 1) / tiles;
  // As many outputs as leave a tile's sums, weights and input in registers.
  if (4 * tallest + 5 <= REGISTERS) o = outputs<W, 4>(x, rows, k, part, y, o, end);
  if (3 * tallest + 4 <= REGISTERS) o = outputs<W, 3>(x, rows, k, part, y, o, end);
  o = outputs<W, 2>(x, rows, k, part, y, o, end);
  outputs<W, 1>(x, rows, k, part, y, o, end);
}

void span(const float *x, int64_t rows, int64_t k, const Part &part, float *y, int64_t begin,
          int64_t end) {
  switch (part.kind) {
  case 0: return span<float>(x, rows, k, part, y, begin, end);
  case 1: return span<bfloat16>(x, rows, k, part, y, begin, end);
  case 2: return span<int8_t>(x, rows, k, part, y, begin, end);
#ifdef HALVES
  case 3: return span<_Float16>(x, rows, k, part, y, begin, end);
#endif
  }
}

struct Product {
  const float *x; // [rows, K]
  float *y;       // one part's [rows, outputs] after another's
  int64_t rows, k;
  const Part *parts;
  int64_t count;
  Rounded *rounded; // [blocks of 32 inputs, rows]: room, if a part is in blocks
  bool alike = false; // whether rows have the same bits however many, also of weights in plain rows

  bool in_blocks() const {
    return std::any_of(parts, parts + count, [](const Part &part) { return part.in_blocks(); });
  }
};

// Rounds the inputs of a product, together with other threads.
void round_inputs(const Product &job, Team &team, int size) {
  for (int64_t begin, end; team.take(blocks_of(job.k), GRAIN, size, begin, end);)
    round_blocks(job.x, job.rows, job.k, begin, end, job.rounded);
  team.wait(size);
}

// The outputs from `begin` to `end` of a part in blocks: of the panels that begin there.
void span_of_blocks(const Product &job, const Part &part, float *y, int64_t begin, int64_t end) {
  compute({job.rounded, job.rows, blocks_of(job.k), static_cast<const uint8_t *>(part.weight),
           part.bias, part.outputs, y, FORMS[part.kind - BLOCKED]},
          (begin + WIDTH - 1) / WIDTH, (end + WIDTH - 1) / WIDTH);
}

// Where a panel begins, there or after: parts that came before may end within one.
int64_t whole_panels(int64_t output) { return (output + PANEL - 1) / PANEL * PANEL; }

// Works on a product together with others. Shares are of panels that are taken side by side. What
// meets weights in blocks has been rounded before.
void multiply(const Product &job, Team &team, int size) {
  int64_t total = 0, begin, end;
  for (int64_t i = 0; i < job.count; i++) total += job.parts[i].outputs;
  int64_t grain = PANEL * (SUMS / std::clamp<int64_t>(job.rows, 2, ROWS));
  if (job.in_blocks()) grain = WIDTH;
  while (team.take(total, grain, size, begin, end)) {
    int64_t first = 0;
    for (int64_t i = 0; i < job.count; first += job.parts[i++].outputs) {
      const Part &part = job.parts[i];
      int64_t from = std::max(begin - first, int64_t(0));
      int64_t to = std::min(end - first, part.outputs);
      float *y = job.y + job.rows * first;
      if (part.in_blocks()) {
        if (from < to) span_of_blocks(job, part, y, from, to);
        continue;
      }
      if (part.laid_out) from = whole_panels(from), to = whole_panels(to);
      const int64_t some = job.alike && !part.laid_out ? FEW : job.rows;
      for (int64_t r = 0; from < to && r < job.rows; r += some)
        span(job.x + r * job.k, std::min(some, job.rows - r), job.k, part, y + r * part.outputs, from, to);
    }
  }
}

// -- a decoder layer -------------------------------------------------------------------------------

// What a decoder layer computes: transformers' module of it, as Python has read it.
struct Layer {
  // Where the MLP is not gated there is no gate. With latents `key` makes these, with the key that
  // all heads share after each, and `value` makes keys and values of them.
  Part query, key, value, output, gate, up, down;
  Part first; // what the queries' own product is given, if not the hidden states
  Part keys;  // with latents, what makes keys the other way round, if `value` makes values alone
  Norm before, after;         // around attention
  Norm before_mlp, after_mlp; // around the MLP
  Norm query_norm, key_norm;  // of each head, or of all heads together, or of what `first` makes and
                              // of latents
  int64_t hidden, heads, groups, dim, inner; // dim: numbers of a value in the cache
  int64_t attends, feeds; // whether there is attention, and an MLP
  int64_t parallel;       // whether the MLP is given what attention is given
  int64_t together;       // whether all heads are normalised together
  int64_t apart;          // between the weights of the norms of two heads: 0 if they share them
  int64_t activation, turning;
  int64_t gated_heads;  // whether each query has the gate of its head's output after it
  int64_t angles, mask; // which of the pass's
  float scaling, cap;   // of scores; 0: they have no bound
  float residual;       // by which is multiplied what is added to the residual stream
  Clip clip;            // of an activation that is clipped
  const float *sinks;   // [heads]: scores of a slot without values that all tokens see; or null
  Mixture mixture;
  Latent latent;
  Recurrence recurrence; // in the place of attention, if it has a kind

  bool gated() const { return gate.weight; }

  // Numbers of a query, with its gate, and of a key.
  int64_t query_dim() const { return latent.size ? dim + latent.rope : gated_heads ? 2 * dim : dim; }
  // Numbers of all queries, and of what they have seen, as their products make and take them.
  int64_t wide() const { return heads * (latent.size ? latent.query() : query_dim()); }
  int64_t seen() const {
    return recurrence.kind ? recurrence.width : heads * (latent.size ? latent.value : dim);
  }

  // The floats per token that the products before the MLP, and queries, need.
  int64_t room() const {
    if (recurrence.kind) return recurrence.room();
    if (!latent.size) return wide() + 2 * groups * dim + seen();
    return first.outputs + key.outputs + wide() + heads * (query_dim() + dim) + seen();
  }

  void activated(float *gate, const float *up, int64_t n) const {
    activation == CLIPPED ? activate_clipped(clip, gate, up, n) : activate(activation, gate, up, n);
  }
};

// The angles by which heads are turned, by position or by token.
struct Angles {
  const float *cosines, *sines; // [positions, rotary]
  const int64_t *positions;     // [rows, columns], or null: of the tokens in their order
  int64_t rotary;               // dimensions turned
};

// Which slots tokens see.
struct Mask {
  const uint8_t *seen; // [rows, columns, view], or null: all
  int64_t row, column; // strides
};

// A pass of `columns` tokens in each of `rows` rows, of which token t of row a is r = a columns + t.
struct Pass {
  int64_t rows, columns, view; // view: slots that may be seen
  const Angles *angles;        // of each kind of layers
  const Mask *masks;
  const int64_t *firsts; // [rows]: where each row's slots begin in the cache
  const int64_t *starts; // [rows]: the slot, of the row's own, of its first token
  int64_t slots;         // of a head of the cache
  float *scratch;
};

// A token, and how far it has gone through the slots.
struct Seeing {
  const uint8_t *mask; // [view], or null
  int64_t view;        // slots that it may see
  int64_t next;
  int32_t seen[BLOCK]; // those that it looks at now
  int count;

  // How many of the eight slots from the next one on it sees, if there are eight and `most` allows.
  int64_t of_eight(int64_t most) const {
    if (next + 8 > view || most < 8) return -1;
    return mask ? int64_t(load<uint64_t>(mask + next) * 0x0101010101010101u >> 56) : 8;
  }

  // Looks at the next slots that it sees, at most BLOCK.
  void look() {
    for (count = 0; next < view && count < BLOCK;) {
      const int64_t eight = of_eight(BLOCK - count);
      if (eight == 8)
        for (int i = 0; i < 8; i++) seen[count++] = int32_t(next++);
      else if (!eight)
        next += 8;
      else if (!mask || mask[next])
        seen[count++] = int32_t(next++);
      else
        next++;
    }
  }

  // Leaves out the next slots that it sees, this many.
  void skip(int64_t left) {
    while (next < view && left) {
      const int64_t eight = of_eight(left);
      left -= eight < 0 ? !mask || mask[next] : eight;
      next += eight < 0 ? 1 : 8;
    }
  }

  bool looks_at_the_same(const Seeing &other) const {
    return count == other.count && !std::memcmp(seen, other.seen, count * sizeof *seen);
  }
};

constexpr int32_t IN_ORDER[BLOCK] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                     16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                     32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                     48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

struct Attention {
  const Layer *layer;
  const Pass *pass;
  float *queries, *keys, *values; // products: [rows columns, heads query] or [..., groups dim]
  Vectors key_cache, value_cache; // [groups, slots, dim], slots of all rows; with latents one of these
                                  // and one of the keys that all heads share
  float *result;
  float *room;     // of this thread
  float *partials; // of all threads; null where the slots of a row are not shared out

  // The part of a cache that belongs to a row and a key head.
  Vectors part(const Vectors &cache, int64_t row, int64_t group) const {
    const int64_t slot = pass->firsts[row] + (layer->latent.size ? 0 : group * pass->slots);
    const int64_t bytes = slot * cache.dim * (cache.kind == WHOLE ? int64_t(sizeof(float)) : 1);
    return {static_cast<uint8_t *>(cache.numbers) + bytes, cache.scales ? cache.scales + slot : nullptr,
            cache.kind, cache.dim};
  }

  // Slots that a row's tokens may see: those of a short row do not depend on how long others are.
  int64_t view(int64_t row) const {
    return std::min(pass->view, pass->starts[row] + pass->columns);
  }

  // Query heads that share a key head.
  int64_t each() const { return layer->heads / layer->groups; }

  // Query head h of those that share a key head, and where its output goes.
  float *query_of(int64_t row, int64_t group, int64_t t, int64_t h) const {
    return queries + head_of(row, group, t, h) * layer->query_dim();
  }
  float *result_of(int64_t row, int64_t group, int64_t t, int64_t h) const {
    return result + head_of(row, group, t, h) * layer->dim;
  }
  int64_t head_of(int64_t row, int64_t group, int64_t t, int64_t h) const {
    return (row * pass->columns + t) * layer->heads + group * each() + h;
  }

  // What a query has seen, in the end. head: the query's own.
  void conclude_output(const Query &query, const float *head) const {
    conclude(query, layer->dim);
    for (int64_t d = 0; layer->gated_heads && d < layer->dim; d += LANES) {
      const floats gate = load<floats>(head + layer->dim + d);
      const floats value = load<floats>(query.values + d) / (exponential(-gate) + 1.f);
      std::memcpy(query.values + d, &value, sizeof value);
    }
  }
};

int64_t pieces_of(int64_t view) { return (view + PIECE - 1) / PIECE; }

// Turns a head of token r to its position.
void place(const Attention &job, float *head, int64_t r) {
  if (job.layer->turning == STILL) return;
  const Angles &angles = job.pass->angles[job.layer->angles];
  const int64_t at = (angles.positions ? angles.positions[r] : r) * angles.rotary;
  const int64_t dim = job.layer->latent.size ? job.layer->latent.rope : job.layer->dim;
  if ((job.layer->turning == HALVES_ONCE ? 2 : 1) * angles.rotary > dim) return;
  turn(head, angles.cosines + at, angles.sines + at, angles.rotary, job.layer->turning);
}

// Normalises one of the heads of a token, unless all of them are normalised together.
void normalise_head(const Layer &layer, const Norm &norm, float *head, int64_t number) {
  if (norm.kind && !layer.together) normalise(norm, head, layer.dim, head, number * layer.apart);
}

// Puts the keys and values of one row's tokens into the cache.
void cache_tokens(const Attention &job, int64_t row, int64_t group) {
  const Layer &layer = *job.layer;
  const Pass &pass = *job.pass;
  const Vectors keys = job.part(job.key_cache, row, group);
  const Vectors values = job.part(job.value_cache, row, group);
  for (int64_t t = 0; t < pass.columns; t++) {
    int64_t r = row * pass.columns + t, at = (r * layer.groups + group) * layer.dim;
    normalise_head(layer, layer.key_norm, job.keys + at, group);
    place(job, job.keys + at, r);
    put(keys, pass.starts[row] + t, job.keys + at);
    put(values, pass.starts[row] + t, job.values + at);
  }
}

// Turns the queries of one row's tokens from `first` up to `last` that share a key head.
void turn_queries(const Attention &job, int64_t row, int64_t group, int64_t first, int64_t last) {
  const Layer &layer = *job.layer;
  for (int64_t t = first; t < last; t++)
    for (int64_t h = 0; h < job.each(); h++) {
      float *head = job.query_of(row, group, t, h);
      normalise_head(layer, layer.query_norm, head, group * job.each() + h);
      place(job, head, row * job.pass->columns + t);
    }
}

// Some tokens of one row, for the query heads that share a key head.
struct Attending {
  const Attention &job;
  const int64_t row, group, first, tokens, dim, each;
  const Vectors keys, values;
  Seeing seeing[TOGETHER];
  Query queries[TOGETHER * MOST_EACH]; // one token's after another's

  Attending(const Attention &job, int64_t row, int64_t group, int64_t first, int64_t tokens)
      : job(job), row(row), group(group), first(first), tokens(tokens), dim(job.layer->dim),
        each(job.each()), keys(job.part(job.key_cache, row, group)),
        values(job.part(job.value_cache, row, group)) {}

  // The floats that a thread needs for this: widened keys and values, and sums.
  static int64_t room(int64_t each, int64_t dim) { return (2 * BLOCK + TOGETHER * each) * dim; }

  float *room_for_sums() const { return job.room + 2 * BLOCK * dim; }

  int64_t size() const { return tokens * each; }

  void look_from(int64_t slots) {
    const Mask &mask = job.pass->masks[job.layer->mask];
    for (int64_t t = 0; t < tokens; t++) {
      const uint8_t *seen = mask.seen;
      if (seen) seen += row * mask.row + (first + t) * mask.column;
      seeing[t].mask = seen;
      seeing[t].view = job.view(row);
      seeing[t].next = 0;
      seeing[t].skip(slots);
    }
  }

  // Lets the queries begin: with the first slots, whose sums go to where the output goes, or anew, with
  // sums that go to `sums`.
  void begin(float *sums) {
    for (int64_t q = 0; q < size(); q++) {
      const int64_t t = first + q / each, h = q % each;
      float *values = sums ? sums + q * dim : job.result_of(row, group, t, h);
      const float *sink = job.layer->sinks; // one more score of each head, without a value
      if (sink) sink += group * each + h;
      queries[q] = {job.query_of(row, group, t, h), values, -1e30f, 0.f};
      if (sink && !sums) queries[q].highest = *sink, queries[q].weights = 1.f;
      std::memset(values, 0, dim * sizeof(float));
    }
  }

  // Goes on through the next PIECE slots that each token sees; returns whether one may see more.
  bool go_on() {
    bool more = true;
    for (int64_t block = 0; more && block < PIECE / BLOCK; block++) {
      more = false;
      for (int64_t t = 0; t < tokens; t++) {
        seeing[t].look();
        more |= seeing[t].count == BLOCK;
      }
      for (int64_t t = 0, next; t < tokens; t = next) {
        for (next = t + 1; next < tokens && seeing[next].looks_at_the_same(seeing[t]);) next++;
        if (seeing[t].count) attend(queries + t * each, (next - t) * each, slots_of(seeing[t]));
      }
    }
    return more;
  }

  // The slots that a token looks at: in the cache, or widened.
  Slots slots_of(const Seeing &token) const {
    const Layer &layer = *job.layer;
    const float *first = static_cast<const float *>(keys.numbers);
    const float *second = static_cast<const float *>(values.numbers);
    const int32_t *seen = token.seen;
    if (keys.kind != WHOLE) {
      float *wide_keys = job.room, *wide_values = job.room + BLOCK * dim;
      widen_vectors(keys, seen, token.count, wide_keys);
      widen_vectors(values, seen, token.count, wide_values);
      first = wide_keys, second = wide_values, seen = IN_ORDER;
    }
    if (layer.latent.size) // which are keys and values, and the rest of the keys comes second
      return {first,     first,          seen,   token.count, dim, layer.scaling,
              layer.cap, second, layer.latent.rope};
    return {first, second, seen, token.count, dim, layer.scaling, layer.cap, nullptr, 0};
  }

  void compute() {
    Query whole[TOGETHER * MOST_EACH];
    look_from(0);
    begin(nullptr);
    bool more = go_on();
    std::copy(queries, queries + size(), whole);
    while (more) {
      begin(room_for_sums());
      more = go_on();
      for (int64_t q = 0; q < size(); q++) merge(whole[q], queries[q], dim);
    }
    for (int64_t q = 0; q < size(); q++) job.conclude_output(whole[q], whole[q].head);
  }
};

// What the query heads that share a key head have seen of each piece of a row's slots, for all of a
// row's tokens: their sums but for the first piece's, which are where the output goes, and after
// these the highest score and the weights of each piece.
struct Partials {
  const Attention &job;
  const int64_t row, group;
  const int64_t queries = job.pass->columns * job.each(), dim = job.layer->dim;
  const int64_t pieces = pieces_of(job.pass->view);

  static int64_t size(int64_t queries, int64_t pieces, int64_t dim) {
    return queries * pieces * (dim + 2);
  }

  float *begin() const {
    return job.partials + (row * job.layer->groups + group) * size(queries, pieces, dim);
  }
  float *sums(int64_t piece) const { return begin() + piece * queries * dim; }
  float *marks(int64_t piece) const {
    return begin() + pieces * queries * dim + piece * queries * 2;
  }

  void compute(int64_t piece) const {
    Attending tile(job, row, group, 0, job.pass->columns);
    tile.look_from(piece * PIECE);
    tile.begin(piece ? sums(piece) : nullptr);
    tile.go_on();
    for (int64_t q = 0; q < queries; q++) {
      marks(piece)[2 * q] = tile.queries[q].highest;
      marks(piece)[2 * q + 1] = tile.queries[q].weights;
    }
  }

  void merge_all(int64_t query) const {
    auto of = [&](int64_t piece) {
      const float *own = marks(piece) + 2 * query;
      return Query{nullptr, sums(piece) + query * dim, own[0], own[1]};
    };
    Query whole = of(0);
    const int64_t t = query / job.each(), h = query % job.each();
    whole.values = job.result_of(row, group, t, h);
    for (int64_t piece = 1; piece < pieces; piece++) merge(whole, of(piece), dim);
    job.conclude_output(whole, job.query_of(row, group, t, h));
  }
};

// Puts the latent of token r into the cache, and the key that all heads share.
void cache_latent(const Attention &job, int64_t r) {
  const Layer &layer = *job.layer;
  const int64_t row = r / job.pass->columns, slot = job.pass->starts[row] + r % job.pass->columns;
  float *latent = job.keys + r * layer.key.outputs, *shared = latent + layer.dim;
  normalise(layer.key_norm, latent, layer.dim, latent);
  place(job, shared, r);
  put(job.part(job.key_cache, row, 0), slot, latent);
  put(job.part(job.value_cache, row, 0), slot, shared);
}

// What a thread needs for a product of one head of up to FEW tokens.
struct HeadRoom {
  Rounded *rounded;
  float *in, *out;

  HeadRoom(const Layer &layer, float *at) {
    const uintptr_t line = alignof(Rounded), here = reinterpret_cast<uintptr_t>(at);
    rounded = reinterpret_cast<Rounded *>((here + line - 1) / line * line);
    in = reinterpret_cast<float *>(rounded + FEW * blocks_of(most(layer.latent)));
    out = in + FEW * most(layer.latent);
  }

  static int64_t most(const Latent &latent) { return std::max({latent.size, latent.nope, latent.value}); }

  // Multiplies `in`, [rows, inputs], into `out`, [rows, outputs of the part].
  void multiply(const Part &part, int64_t rows, int64_t inputs) const {
    if (!part.in_blocks()) return span(in, rows, inputs, part, out, 0, part.outputs);
    round_blocks(in, rows, inputs, 0, blocks_of(inputs), rounded);
    compute(product_of(rounded, rows, inputs, part, out), 0, part.outputs / WIDTH);
  }

  static int64_t size(const Layer &layer) {
    if (!layer.latent.size) return 0;
    const int64_t numbers = most(layer.latent);
    return Workspace::LINE_FLOATS * (1 + FEW * blocks_of(numbers)) + 2 * FEW * numbers;
  }
};

// Makes the queries of one head that meet latents. made: [tokens, heads query].
void absorb_queries(const Attention &job, const float *made, int64_t head, int64_t first, int64_t last,
                    const HeadRoom &room) {
  const Layer &layer = *job.layer;
  const Latent &latent = layer.latent;
  const bool apart = layer.keys.weight; // which are the other way round
  const Part keys =
      apart ? some_outputs(layer.keys, head * latent.size, latent.size, latent.nope)
            : some_outputs(layer.value, head * (latent.nope + latent.value), latent.nope, latent.size);
  float *queries = job.queries + (first * layer.heads + head) * layer.query_dim();
  const int64_t stride = layer.heads * layer.query_dim();
  for (int64_t t = first; t < last; t++) {
    const float *own = made + t * layer.wide() + head * latent.query();
    float *nope = room.in + (t - first) * latent.nope;
    for (int64_t n = 0; n < latent.nope; n++)
      nope[n] = keys.scale && !apart ? own[n] * keys.scale[n] : own[n];
    float *rope = queries + (t - first) * stride + latent.size;
    std::copy(own + latent.nope, own + latent.query(), rope);
    place(job, rope, t);
  }
  if (!apart) return multiply_transposed(keys, room.in, last - first, latent.size, queries, stride);
  room.multiply(keys, last - first, latent.nope);
  for (int64_t r = 0; r < last - first; r++)
    std::copy_n(room.out + r * latent.size, latent.size, queries + r * stride);
}

// Makes of what one head has seen of latents what it has seen of values. seen: [tokens, heads value].
void make_values(const Attention &job, float *seen, int64_t head, int64_t first, int64_t last,
                 const HeadRoom &room) {
  const Layer &layer = *job.layer;
  const Latent &latent = layer.latent;
  const int64_t rows = last - first, before = layer.keys.weight ? 0 : latent.nope;
  const Part values = some_outputs(layer.value, head * (before + latent.value) + before, latent.value,
                                   latent.size);
  for (int64_t r = 0; r < rows; r++)
    std::copy_n(job.result + ((first + r) * layer.heads + head) * latent.size, latent.size,
                room.in + r * latent.size);
  room.multiply(values, rows, latent.size);
  for (int64_t r = 0; r < rows; r++)
    std::copy_n(room.out + r * latent.value, latent.value,
                seen + (first + r) * layer.seen() + head * latent.value);
}

// What follows the last layer: a norm, or none, and the logits of each row's last tokens, or none.
struct Ending {
  const Norm *norm;
  const Part *head; // one after another: some parts of the vocabulary
  int64_t parts;
  float *logits; // one part's [rows, keep, outputs] after another's
  int64_t keep;
  float scale, cap; // by which logits are multiplied, and their soft bound; 0: none
  float *states; // what each layer leaves, [tokens, hidden], if that is wanted,
  int64_t stride; // and how far the next layer's are from one layer's
};

// What one thread of a pass works on.
struct Hand {
  int own, size;        // its number, and how many threads there are
  bool alone;           // whether it has the hidden states of all tokens for itself
  int64_t first, last;  // the tokens whose hidden states it adds up and normalises
  float *mine, *normal; // hidden states of all tokens, and the same normalised: [tokens, hidden]
  float *made, *rest;   // what products make of them: shared by all threads
  float *room;          // for attention
  float *partials;      // the same of all threads; null where a row's slots are not shared out
};

// A pass through layers, on several threads. Where there are few tokens each thread adds up the
// hidden states of all of them, and normalises them, for itself: that takes less time than waiting
// for another thread. Of many tokens each thread does that for some: what all threads held for
// themselves would grow with their number.
struct Run {
  const Layer *layers;
  int64_t count;
  const Pass &pass;
  float *x; // [tokens, hidden]: what comes in, and then what comes out, where there is no head
  const Cache &cache;
  Ending ending;
  StatePointers reading; // of the layers that keep a state
  Threads threads;
  Team team = {};

  int64_t tokens() const { return pass.rows * pass.columns; }

  static bool alone(int64_t tokens, int64_t threads) { return tokens * threads <= COPIES; }

  void compute() {
    const Hand hand = begin(threads.here(), team.join());
    const int64_t hidden = layers->hidden, at = hand.first * hidden;
    std::memcpy(hand.mine + at, x + at, (hand.last - hand.first) * hidden * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
      layer(i, hand);
      if (i + 1 < count) leave(i, hand);
    }
    end(hand);
  }

  Hand begin(int size, int own) const {
    const int64_t all = tokens(), floats = all * layers->hidden;
    const bool by_itself = alone(all, threads.count);
    float *made = space() + mixed(layers, count, all), *rest = made + floats;
    float *mine = rest + all * room(layers, count) + (by_itself ? own * 2 * floats : 0);
    const int64_t first = by_itself ? 0 : all * own / size;
    const int64_t last = by_itself ? all : all * (own + 1) / size;
    const int64_t hands = by_itself ? threads.count : 1;
    float *tiles = rest + all * room(layers, count) + hands * 2 * floats;
    float *shared = tiles + threads.count * room_to_attend(layers, count);
    if (!partials(layers, count, pass.rows, pass.columns, pass.view)) shared = nullptr;
    tiles += own * room_to_attend(layers, count);
    return {own, size, by_itself, first, last, mine, mine + floats, made, rest, tiles, shared};
  }

  // Where threads share the hidden states, returns once all of them have those of their tokens.
  void meet(const Hand &hand) {
    if (!hand.alone) team.wait(hand.size);
  }

  // Writes the hidden states that this thread answers for.
  void write(const Hand &hand, float *to) const {
    const int64_t at = hand.first * layers->hidden;
    if (!hand.alone || !hand.own)
      std::memcpy(to + at, hand.mine + at,
                  (hand.last - hand.first) * layers->hidden * sizeof(float));
  }

  void leave(int64_t index, const Hand &hand) const {
    if (ending.states) write(hand, ending.states + index * ending.stride);
  }

  // The floats per token that the products of any of these layers need.
  static int64_t room(const Layer *layers, int64_t count) {
    int64_t most = 0;
    for (const Layer *at = layers; at < layers + count; at++)
      most = std::max({most, at->room(), 2 * at->inner});
    return most;
  }

  // The floats that attention needs on each thread.
  static int64_t room_to_attend(const Layer *layers, int64_t count) {
    int64_t most = 0;
    for (const Layer *at = layers; at < layers + count; at++)
      if (!at->recurrence.kind)
        most = std::max({most, Attending::room(at->heads / at->groups, at->dim), HeadRoom::size(*at)});
    return most;
  }

  // The floats of `Partials` of a layer; 0 where there is one piece, where many columns are shared
  // out anyhow, or where they would take too much memory: then rows and heads alone are shared out.
  static int64_t partials(const Layer *layers, int64_t count, int64_t rows, int64_t columns,
                          int64_t view) {
    if (columns > TOGETHER || view <= PIECE) return 0;
    int64_t most = 0;
    for (const Layer *at = layers; at < layers + count; at++)
      most = std::max(most, Partials::size(rows * columns * at->heads, pieces_of(view), at->dim));
    return most > MOST_PARTIALS ? 0 : most;
  }

  // The floats per token that the rounded activations of any of them take.
  static int64_t rounded(const Layer *layers, int64_t count) {
    int64_t most = 0;
    for (const Layer *at = layers; at < layers + count; at++)
      most = std::max({most, at->hidden, at->first.outputs, at->seen(), at->inner});
    return blocks_of(most) * int64_t(sizeof(Rounded) / sizeof(float));
  }

  // Rounded activations begin with a line of the cache.
  float *room_to_round() const {
    uintptr_t line = alignof(Rounded), at = reinterpret_cast<uintptr_t>(pass.scratch);
    return reinterpret_cast<float *>((at + line - 1) / line * line);
  }

  // The floats that a mixture of any of them needs.
  static int64_t mixed(const Layer *layers, int64_t count, int64_t tokens) {
    int64_t most = 0;
    for (const Layer *at = layers; at < layers + count; at++)
      if (at->mixture.experts) {
        const int64_t some = tokens_at_once(at->mixture, at->hidden, at->inner, tokens);
        most = std::max(most, Workspace{}.lay_out(at->mixture, at->hidden, at->inner, some, nullptr));
      }
    return most;
  }

  float *space() const { return room_to_round() + tokens() * rounded(layers, count); }

  Product about(const float *in, float *out, int64_t rows, int64_t k, const Part *parts,
                int64_t number) const {
    return {in, out, rows, k, parts, number, reinterpret_cast<Rounded *>(room_to_round()), true};
  }

  // The hidden states of all tokens, normalised.
  void norms(const Hand &hand, const Norm &norm) {
    const int64_t hidden = layers->hidden;
    for (int64_t r = hand.first; r < hand.last; r++)
      normalise(norm, hand.mine + r * hidden, hidden, hand.normal + r * hidden);
    meet(hand);
  }

  // Adds what products have made to the residual stream, through a norm if there is one. Nobody waits
  // here: what a thread has added up it normalises itself.
  void add_made(const Hand &hand, const Norm &norm, float factor) const {
    const int64_t hidden = layers->hidden;
    for (int64_t r = hand.first; r < hand.last; r++) {
      const float *made = hand.made + r * hidden;
      if (norm.kind) { // which has no parallel part after it, that would need what is there
        normalise(norm, made, hidden, hand.normal + r * hidden);
        made = hand.normal + r * hidden;
      }
      add(hand.mine + r * hidden, made, factor, hidden);
    }
  }

  void product(const float *in, float *out, int64_t k, const Part *parts, int64_t number, int size) {
    Product job = about(in, out, tokens(), k, parts, number);
    if (job.in_blocks()) round_inputs(job, team, size);
    multiply(job, team, size);
    team.wait(size);
  }

  // gate: [tokens, inner], which becomes the input of the last product; up: the same, or null;
  // out: [tokens, hidden].
  void gated_product(float *gate, const float *up, float *out, const Layer &layer, int size) {
    const int64_t all = tokens(), inner = layer.inner;
    Product job = about(gate, out, all, inner, &layer.down, 1);
    auto activated = [&](int64_t at, int64_t width) {
      layer.activated(gate + at, up ? up + at : nullptr, width);
    };
    int64_t begin, end;
    if (job.in_blocks()) {
      while (team.take(blocks_of(inner), GRAIN, size, begin, end)) {
        int64_t first = begin * SMALL, width = std::min(end * SMALL, inner) - first;
        for (int64_t t = 0; t < all; t++) activated(t * inner + first, width);
        round_blocks(gate, all, inner, begin, end, job.rounded);
      }
    } else {
      while (team.take(all * inner, 64 * LANES, size, begin, end)) activated(begin, end - begin);
    }
    team.wait(size);
    multiply(job, team, size);
    team.wait(size);
  }

  // Attention over few tokens is shared out by rows and heads, over many by tokens too. By slots it is
  // where there are fewer rows and heads than keep all threads busy to the end.
  void attend_together(const Attention &job, int size) {
    const int64_t groups = job.layer->groups, heads = pass.rows * groups;
    const bool many = pass.columns > TOGETHER;
    const bool by_slots = job.partials && heads % size && heads < 4 * size;
    const bool ready = job.layer->latent.size; // whether queries and cache have been seen to
    const int64_t tiles = many ? (pass.columns + TOGETHER - 1) / TOGETHER : 1;
    int64_t begin, end;
    if ((many || by_slots) && !ready) {
      while (team.take(heads, 1, size, begin, end))
        for (; begin < end; begin++) {
          cache_tokens(job, begin / groups, begin % groups);
          if (by_slots) turn_queries(job, begin / groups, begin % groups, 0, pass.columns);
        }
      team.wait(size);
    }
    if (by_slots) return attend_by_slots(job, size);
    while (team.take(heads * tiles, 1, size, begin, end))
      for (; begin < end; begin++) {
        int64_t head = begin / tiles, first = begin % tiles * TOGETHER;
        int64_t row = head / groups, group = head % groups;
        int64_t last = std::min(pass.columns, first + TOGETHER);
        if (!many && !ready) cache_tokens(job, row, group);
        if (!ready) turn_queries(job, row, group, first, last);
        Attending(job, row, group, first, last - first).compute();
      }
    team.wait(size);
  }

  void attend_by_slots(const Attention &job, int size) {
    const int64_t groups = job.layer->groups, heads = pass.rows * groups;
    const int64_t pieces = pieces_of(pass.view), queries = pass.columns * job.each();
    int64_t begin, end;
    while (team.take(heads * pieces, 1, size, begin, end))
      for (; begin < end; begin++) {
        int64_t head = begin / pieces;
        Partials{job, head / groups, head % groups}.compute(begin % pieces);
      }
    team.wait(size);
    while (team.take(heads * queries, 1, size, begin, end))
      for (; begin < end; begin++) {
        int64_t head = begin / queries;
        Partials{job, head / groups, head % groups}.merge_all(begin % queries);
      }
    team.wait(size);
  }

  // All heads of a token are normalised as one vector: those of queries, and those of keys.
  void normalise_together(const Attention &job, int size) {
    const Layer &layer = *job.layer;
    const int64_t wide = layer.heads * layer.dim, narrow = layer.groups * layer.dim;
    for (int64_t begin, end; team.take(tokens(), 1, size, begin, end);)
      for (int64_t r = begin; r < end; r++) {
        normalise(layer.query_norm, job.queries + r * wide, wide, job.queries + r * wide);
        normalise(layer.key_norm, job.keys + r * narrow, narrow, job.keys + r * narrow);
      }
    team.wait(size);
  }

  void layer(int64_t index, const Hand &hand) {
    if (layers[index].attends) attention(index, hand);
    if (layers[index].feeds) mlp(layers[index], hand);
  }

  void attention(int64_t index, const Hand &hand) {
    const Layer &layer = layers[index];
    norms(hand, layer.before);
    const float *seen = layer.recurrence.kind ? recurrence(index, hand)
                        : layer.latent.size   ? seen_of_latents(index, hand)
                                              : seen_of_keys(index, hand);
    product(seen, hand.made, layer.seen(), &layer.output, 1, hand.size);
    add_made(hand, layer.after, layer.residual);
  }

  Vectors keys_of(int64_t index) const {
    float *scales = cache.kind == WHOLE ? nullptr : cache.key_scales[index];
    return {cache.keys[index], scales, cache.kind, layers[index].dim};
  }

  Vectors values_of(int64_t index) const {
    const Layer &layer = layers[index];
    float *scales = cache.kind == WHOLE ? nullptr : cache.value_scales[index];
    return {cache.values[index], scales, cache.kind, layer.latent.size ? layer.latent.rope : layer.dim};
  }

  // Returns what the heads of all tokens have seen, [tokens, heads dim].
  const float *seen_of_keys(int64_t index, const Hand &hand) {
    const Layer &layer = layers[index];
    const int64_t wide = layer.wide(), narrow = layer.groups * layer.dim;
    product(hand.normal, hand.rest, layer.hidden, &layer.query, 3, hand.size);
    float *new_keys = hand.rest + tokens() * wide, *new_values = new_keys + tokens() * narrow;
    float *seen = new_values + tokens() * narrow;
    Attention attention{&layer,         &pass,            hand.rest, new_keys,  new_values,
                        keys_of(index), values_of(index), seen,      hand.room, hand.partials};
    if (layer.together) normalise_together(attention, hand.size);
    attend_together(attention, hand.size);
    return seen;
  }

  // The same where heads see latents: [tokens, heads value].
  const float *seen_of_latents(int64_t index, const Hand &hand) {
    const Layer &layer = layers[index];
    const int64_t all = tokens(), heads = layer.heads, rank = layer.first.outputs;
    const Part parts[2] = {rank ? layer.first : layer.query, layer.key};
    product(hand.normal, hand.rest, layer.hidden, parts, 2, hand.size);
    float *latents = hand.rest + all * parts[0].outputs, *after = latents + all * layer.key.outputs;
    float *made = hand.rest;
    if (rank) {
      normalise_rows(layer.query_norm, hand.rest, rank, hand.size);
      made = after, after += all * layer.wide();
      product(hand.rest, made, rank, &layer.query, 1, hand.size);
    }
    float *queries = after, *result = queries + all * heads * layer.query_dim();
    float *seen = result + all * heads * layer.dim;
    Attention attention{&layer,         &pass,            queries, latents,   nullptr,
                        keys_of(index), values_of(index), result,  hand.room, hand.partials};
    HeadRoom room(layer, hand.room);
    const int64_t pieces = (all + FEW - 1) / FEW; // of so few tokens that each keeps its bits
    int64_t begin, end;
    while (team.take(all + heads * pieces, 1, hand.size, begin, end))
      for (; begin < end; begin++) {
        if (begin < all) {
          cache_latent(attention, begin);
          continue;
        }
        const int64_t first = (begin - all) / heads * FEW;
        absorb_queries(attention, made, (begin - all) % heads, first, std::min(all, first + FEW), room);
      }
    team.wait(hand.size);
    attend_together(attention, hand.size);
    while (team.take(heads * pieces, 1, hand.size, begin, end))
      for (; begin < end; begin++) {
        const int64_t first = begin / heads * FEW;
        make_values(attention, seen, begin % heads, first, std::min(all, first + FEW), room);
      }
    team.wait(hand.size);
    return seen;
  }

  // The same of what keeps a state.
  const float *recurrence(int64_t index, const Hand &hand) {
    const Recurrence &how = layers[index].recurrence;
    product(hand.normal, hand.rest, layers->hidden, how.parts, how.count, hand.size);
    Recurring job{how, reading.layers[index], reading.parents, pass.columns, {}, hand.rest};
    for (int64_t i = 0; i < how.count; job.made += tokens() * how.parts[i++].outputs)
      job.parts[i] = job.made;
    const bool plain = how.kind == SHORT_CONVOLUTION;
    const int64_t heads = how.heads();
    const int64_t shares = plain ? (how.width + CHANNELS - 1) / CHANNELS : 2 * how.groups + heads;
    int64_t begin, end;
    while (team.take(pass.rows * shares, 1, hand.size, begin, end))
      for (; begin < end; begin++) {
        const int64_t row = begin / shares, number = begin % shares, first = number * CHANNELS;
        if (plain)
          convolve(job, row, first, std::min(CHANNELS, how.width - first));
        else
          convolve_head(job, row, number);
      }
    team.wait(hand.size);
    if (plain) return job.made;
    while (team.take(pass.rows * heads, 1, hand.size, begin, end))
      for (; begin < end; begin++) run_head(job, begin / heads, begin % heads);
    team.wait(hand.size);
    if (how.kind == DELTA_RULE) return job.made;
    while (team.take(tokens() * how.groups, 1, hand.size, begin, end))
      for (; begin < end; begin++) gate_scanned(job, begin / how.groups, begin % how.groups);
    team.wait(hand.size);
    return job.made;
  }

  void normalise_rows(const Norm &norm, float *x, int64_t n, int size) {
    for (int64_t begin, end; team.take(tokens(), 1, size, begin, end);)
      for (; begin < end; begin++) normalise(norm, x + begin * n, n, x + begin * n);
    team.wait(size);
  }

  void mlp(const Layer &layer, const Hand &hand) {
    if (!layer.parallel || !layer.attends) norms(hand, layer.before_mlp);
    if (layer.mixture.experts) return mixture(layer, hand);
    float *gate = hand.rest, *up = layer.gated() ? gate + tokens() * layer.inner : nullptr;
    const Part *first = layer.gated() ? &layer.gate : &layer.up;
    product(hand.normal, gate, layer.hidden, first, layer.gated() ? 2 : 1, hand.size);
    gated_product(gate, up, hand.made, layer, hand.size);
    add_made(hand, layer.after_mlp, layer.residual);
  }

  void mixture(const Layer &layer, const Hand &hand) {
    const int64_t some = tokens_at_once(layer.mixture, layer.hidden, layer.inner, tokens());
    for (int64_t first = 0; first < tokens(); first += some)
      mixture_of(layer, hand, first, std::min(some, tokens() - first));
    add_made(hand, layer.after_mlp, layer.residual);
  }

  // A mixture of `rows` tokens from `first` on, into hand.made.
  void mixture_of(const Layer &layer, const Hand &hand, int64_t first, int64_t rows) {
    const Mixture &mixture = layer.mixture;
    const int64_t hidden = layer.hidden, pairs = rows * mixture.chosen;
    Workspace space;
    space.lay_out(mixture, hidden, layer.inner, rows, this->space());
    route(layer, space, hand.normal + first * hidden, rows, hand.size);
    const Routes routes(mixture, space.chosen, pairs);
    gather(mixture, space, routes, blocks_of(hidden), rows, hand.size);
    const int64_t count = routes.groups + (layer.inner > 0);
    multiply_all(2 * count, hand.size, [&](int64_t i) { // gates and what they are multiplied with
      const bool gate = i % 2 == 0;
      if (i / 2 == routes.groups)
        return product_of(rounded_inputs(), rows, hidden, gate ? layer.gate : layer.up,
                          gate ? space.shared_gates : space.shared_ups);
      const int64_t begin = routes.begins[i / 2];
      return product_of(space.given + begin * blocks_of(hidden), routes.size(i / 2), hidden,
                        of_expert(gate ? mixture.gate : mixture.up, routes.experts[i / 2],
                                  mixture.inner, hidden),
                        (gate ? space.gates : space.ups) + begin * mixture.inner);
    });
    activate_and_round(layer, space, routes, rows, hand.size);
    multiply_all(count, hand.size, [&](int64_t i) {
      if (i == routes.groups)
        return product_of(space.inside_shared, rows, layer.inner, layer.down, space.shared_made);
      const int64_t begin = routes.begins[i], inner = mixture.inner;
      return product_of(space.inside + begin * blocks_of(inner), routes.size(i), inner,
                        of_expert(mixture.down, routes.experts[i], hidden, inner),
                        space.made + begin * hidden);
    });
    add_experts(layer, space, routes, hand.made + first * hidden, rows, hand.size);
  }

  Rounded *rounded_inputs() const { return reinterpret_cast<Rounded *>(room_to_round()); }

  // Rounds what the products of experts are given, [rows, hidden], and chooses experts for each token.
  // The router's own products are of floats, and of so few rows at once that each keeps its bits.
  void route(const Layer &layer, const Workspace &space, const float *x, int64_t rows, int size) {
    const Mixture &mixture = layer.mixture;
    const int64_t hidden = layer.hidden, outputs = mixture.experts + (mixture.shared.weight != nullptr);
    round_inputs(about(x, nullptr, rows, hidden, nullptr, 0), team, size);
    int64_t begin, end;
    while (team.take(outputs, 4, size, begin, end))
      for (int64_t r = 0; r < rows; r += FEW) {
        const int64_t few = std::min(FEW, rows - r), last = std::min(end, mixture.experts);
        if (begin < last)
          span(x + r * hidden, few, hidden, mixture.router, space.logits + r * mixture.experts, begin,
               last);
        if (end > mixture.experts) span(x + r * hidden, few, hidden, mixture.shared, space.shares + r, 0, 1);
      }
    team.wait(size);
    while (team.take(rows, 1, size, begin, end))
      for (; begin < end; begin++) {
        choose(mixture, space.logits + begin * mixture.experts, space.chosen + begin * mixture.chosen,
               space.weights + begin * mixture.chosen);
        float &share = space.shares[begin];
        share = mixture.shared.weight ? 1.f / (exponential(-share) + 1.f) : 1.f;
      }
    team.wait(size);
  }

  // Puts the rounded inputs of the tokens that meet an expert side by side.
  void gather(const Mixture &mixture, const Workspace &space, const Routes &routes, int64_t blocks,
              int64_t rows, int size) {
    const Rounded *from = rounded_inputs(); // [blocks, rows]
    for (int64_t begin, end; team.take(rows * mixture.chosen, 1, size, begin, end);)
      for (; begin < end; begin++) {
        const int64_t place = routes.place[begin], group = routes.group_of(place);
        const int64_t start = routes.begins[group], apart = routes.size(group);
        Rounded *to = space.given + start * blocks + place - start;
        for (int64_t b = 0; b < blocks; b++)
          to[b * apart] = from[b * rows + begin / mixture.chosen];
      }
    team.wait(size);
  }

  // Works on `count` products together with others. at: returns one of them.
  template <typename At> void multiply_all(int64_t count, int size, At at) {
    int64_t total = 0, begin, end;
    for (int64_t i = 0; i < count; i++) total += (at(i).outputs + WIDTH - 1) / WIDTH;
    while (team.take(total, 1, size, begin, end)) {
      int64_t first = 0;
      for (int64_t i = 0; i < count && first < end; i++) {
        const BlockProduct job = at(i);
        const int64_t panels = (job.outputs + WIDTH - 1) / WIDTH;
        const int64_t from = std::max(begin - first, int64_t(0)), to = std::min(end - first, panels);
        if (from < to) ::compute(job, from, to);
        first += panels;
      }
    }
    team.wait(size);
  }

  // Makes the inputs of the last products, of which a thread takes some of one row.
  void activate_and_round(const Layer &layer, const Workspace &space, const Routes &routes, int64_t rows,
                          int size) {
    const int64_t inner = layer.mixture.inner, pairs = rows * layer.mixture.chosen;
    const int64_t parts = (blocks_of(inner) + SHARE - 1) / SHARE;
    const int64_t own = (blocks_of(layer.inner) + SHARE - 1) / SHARE;
    auto some = [&](float *gate, const float *up, int64_t width, int64_t part, Rounded *to,
                    int64_t apart) {
      const int64_t from = part * SHARE, last = std::min(from + SHARE, blocks_of(width));
      const int64_t at = from * SMALL;
      layer.activated(gate + at, up + at, std::min(last * SMALL, width) - at);
      for (int64_t b = from; b < last; b++) round_blocks(gate, 1, width, b, b + 1, to + b * (apart - 1));
    };
    for (int64_t begin, end; team.take(pairs * parts + rows * own, 1, size, begin, end);)
      for (; begin < end; begin++) {
        if (begin < pairs * parts) {
          const int64_t place = begin / parts, group = routes.group_of(place);
          const int64_t start = routes.begins[group];
          some(space.gates + place * inner, space.ups + place * inner, inner, begin % parts,
               space.inside + start * blocks_of(inner) + place - start, routes.size(group));
        } else {
          const int64_t left = begin - pairs * parts, row = left / own, at = row * layer.inner;
          some(space.shared_gates + at, space.shared_ups + at, layer.inner, left % own,
               space.inside_shared + row, rows);
        }
      }
    team.wait(size);
  }

  // Adds up what a token's experts made, and then the layer's own MLP.
  void add_experts(const Layer &layer, const Workspace &space, const Routes &routes, float *to, int64_t rows,
                   int size) {
    const int64_t hidden = layer.hidden, chosen = layer.mixture.chosen;
    const int64_t width = SHARE * SMALL, parts = (hidden + width - 1) / width;
    for (int64_t begin, end; team.take(rows * parts, 1, size, begin, end);)
      for (; begin < end; begin++) {
        const int64_t row = begin / parts, last = std::min((begin % parts + 1) * width, hidden);
        for (int64_t d = begin % parts * width; d < last; d += LANES) {
          floats found = {};
          for (int64_t i = row * chosen; i < (row + 1) * chosen; i++)
            found = fused(load<floats>(space.made + routes.place[i] * hidden + d), all(space.weights[i]),
                          found);
          if (layer.inner)
            found = fused(load<floats>(space.shared_made + row * hidden + d), all(space.shares[row]),
                          found);
          std::memcpy(to + row * hidden + d, &found, sizeof found);
        }
      }
    team.wait(size);
  }

  void end(Hand hand) {
    const int64_t hidden = layers->hidden, keep = ending.keep;
    if (ending.norm) norms(hand, *ending.norm), std::swap(hand.mine, hand.normal);
    leave(count - 1, hand);
    if (!ending.head) return write(hand, x);
    meet(hand);
    if (hand.alone || !hand.own)
      for (int64_t a = 0; a < pass.rows; a++)
        std::memmove(hand.mine + a * keep * hidden,
                     hand.mine + ((a + 1) * pass.columns - keep) * hidden,
                     keep * hidden * sizeof(float));
    meet(hand);
    Product job =
        about(hand.mine, ending.logits, pass.rows * keep, hidden, ending.head, ending.parts);
    if (job.in_blocks()) round_inputs(job, team, hand.size);
    multiply(job, team, hand.size);
    if (ending.scale != 1.f || ending.cap) bound_logits(job, hand.size);
  }

  void bound_logits(const Product &job, int size) {
    int64_t total = 0, begin, end;
    for (int64_t i = 0; i < job.count; i++) total += job.rows * job.parts[i].outputs;
    team.wait(size);
    while (team.take(total, 64 * LANES, size, begin, end))
      bound(job.y + begin, end - begin, ending.scale, ending.cap);
  }
};

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

// Laying out some panels of a weight that a file holds in blocks, on several threads.
struct Packing {
  int kind;
  const uint8_t *raw, *grid;
  int64_t outputs, blocks, first, last;
  uint8_t *to;
  Threads threads;
  Team team = {};

  void compute() {
    const int64_t size = panel_bytes(FORMS[kind], blocks);
    for (int64_t begin, end; team.take(last - first, 1, threads.here(), begin, end);)
      for (int64_t panel = first + begin; panel < first + end; panel++)
        pack_panel(kind, raw, grid, outputs, blocks, panel, to + panel * size);
  }
};

struct Call {
  Product product;
  Threads threads;
  Team team = {};
};

} // namespace

extern "C" {

int outpace_lanes() { return LANES; }

// The outputs whose weights may lie side by side.
int64_t outpace_panel() { return PANEL; }

// The number of kinds of weights: float16 comes last, because not all compilers have it.
int outpace_kinds() {
#ifdef HALVES
  return 4;
#else
  return 3;
#endif
}

// rounded: room for `outpace_rounded` bytes, of whole lines of the cache, if a part is in blocks.
void outpace_products(const float *x, float *y, int64_t rows, int64_t k, const Part *parts,
                      int64_t count, void *rounded, Parallel parallel, int (*size)(), int threads) {
  Call call{{x, y, rows, k, parts, count, static_cast<Rounded *>(rounded)},
            {parallel, size, threads}};
  call.threads.run(
      [](void *given) {
        Call &call = *static_cast<Call *>(given);
        int size = call.threads.here();
        if (call.product.in_blocks()) round_inputs(call.product, call.team, size);
        multiply(call.product, call.team, size);
      },
      &call);
}

int64_t outpace_rounded(int64_t rows, int64_t k) {
  return rows * blocks_of(k) * int64_t(sizeof(Rounded));
}

// The bytes of a weight in blocks once it is laid out.
int64_t outpace_blocks_size(int kind, int64_t outputs, int64_t inputs) {
  return (outputs + WIDTH - 1) / WIDTH * panel_bytes(FORMS[kind], blocks_of(inputs));
}

// Lays out the panels from first to last of a weight that a file holds in blocks, the first ones
// before others. grid: of its kind, or null.
void outpace_lay_out_blocks(int kind, const uint8_t *raw, const uint8_t *grid, int64_t outputs,
                            int64_t inputs, int64_t first, int64_t last, uint8_t *to, Parallel parallel,
                            int (*size)(), int threads) {
  if (first == 0) prefer_large_pages(to, outpace_blocks_size(kind, outputs, inputs));
  const int64_t blocks = blocks_of(inputs);
  Packing packing{kind, raw, grid, outputs, blocks, first, last, to, {parallel, size, threads}};
  packing.threads.run([](void *given) { static_cast<Packing *>(given)->compute(); }, &packing);
}

// Writes a weight that has been laid out as floats [outputs, inputs].
void outpace_widen_blocks(int kind, uint8_t *panels, int64_t outputs, int64_t inputs, float *to) {
  const int64_t blocks = blocks_of(inputs), size = panel_bytes(FORMS[kind], blocks);
  for (int64_t o = 0; o < outputs; o++)
    widen_output(kind, panels + o / WIDTH * size, o % WIDTH, blocks, to + o * inputs);
}

// Writes rows of a weight as a file holds it, as floats [rows, inputs].
void outpace_widen_rows(int kind, const uint8_t *raw, const uint8_t *grid, int64_t rows, int64_t inputs,
                        float *to) {
  const int64_t bytes = inputs / FORMS[kind].inputs * FORMS[kind].bytes;
  for (int64_t r = 0; r < rows; r++)
    widen_row(kind, raw + r * bytes, grid, blocks_of(inputs), to + r * inputs);
}

// The floats of scratch memory that layers need for a pass over some tokens, each of which may see
// `view` slots, on n threads. One line of the cache more is needed to begin with one.
int64_t outpace_scratch(const Layer *layers, int64_t count, int64_t rows, int64_t columns, int64_t view,
                        int threads) {
  const int64_t tokens = rows * columns;
  const int64_t held = 1 + 2 * (Run::alone(tokens, threads) ? threads : 1);
  return tokens * (Run::rounded(layers, count) + Run::room(layers, count) + held * layers->hidden) +
         Run::mixed(layers, count, tokens) + threads * Run::room_to_attend(layers, count) +
         Run::partials(layers, count, rows, columns, view);
}

// x: [tokens, hidden], what comes in, and then what comes out of all layers, normalised if there is
// a norm for that. Where there is a head, of some parts, logits are written instead: of each part
// [rows, keep, outputs].
// states: null, or where each layer's output is written to, too, as many floats apart as stride says.
// reading: how layers that keep a state read the columns; not looked at where there are none.
void outpace_layers(const Layer *layers, int64_t layer_count, const Pass *pass, float *x,
                    const Cache *cache, const StatePointers *reading, const Norm *norm, const Part *head, int64_t parts,
                    float *logits, int64_t keep, float scale, float cap, float *states,
                    int64_t stride, Parallel parallel, int (*size)(), int count) {
  Run run{layers,        layer_count,
          *pass,         x,
          *cache,
          {norm, head, parts, logits, keep, scale, cap, states, stride},
          *reading,
          {parallel, size, count}};
  run.threads.run([](void *given) { static_cast<Run *>(given)->compute(); }, &run);
}
}
