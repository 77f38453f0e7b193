// Layers that keep a state: gated short convolutions, the gated delta rule, and Mamba-2's scan.
//
// A column of a pass goes on from the state after its parent, a row's first one from the state that
// was there before the pass. The state after a column goes where Python wants to have it. Where nobody
// does, because the column is committed in any case, it is made in the place of the next one that is
// wanted. So each state is made from the one before it by the same steps, whatever shares the pass.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "linear.h"
#include "ops.h"

namespace {

// The numbers of kinds, as in Python.
enum { ATTENTION = 0, SHORT_CONVOLUTION = 1, DELTA_RULE = 2, SCAN = 3 }; // of what mixes tokens

constexpr int64_t MOST_TAPS = 8;         // inputs that a convolution sees (as in Python)
constexpr int64_t MOST_PRODUCTS = 4;     // products of a layer's input (as in Python)
constexpr int64_t CHANNELS = 64;         // of a convolution, that are worked on at once
constexpr int64_t STATE_VECTORS = 4;     // vectors of a state's rows that are worked on at once
constexpr float SMALLEST_SQUARE = 1e-6f; // what is added to the sum of squares of queries and keys

// Where the numbers of a head lie among a token's products: in which one, from where on, and the distance
// between those of two key heads, and between those of two heads that share one. channel: the first one of
// the convolution that is the first head's.
struct HeadOffsets {
  int64_t product, first, key_stride, head_stride, channel;
};

// What a layer has instead of attention.
struct Recurrence {
  Linear products[MOST_PRODUCTS]; // products of the layer's input
  int64_t count;                  // of these
  int64_t kind;
  const float *weight, *bias; // of the convolution: [channels, taps], and [channels] or null
  int64_t taps;
  int64_t width; // outputs, which are the inputs of the layer's last product
  // What follows is not of short convolutions. A scan's queries are called C in Mamba-2, its keys B.
  int64_t key_heads, heads_per_key, key_dim, value_dim; // heads_per_key: that share one
  HeadOffsets query, key, value, gate, beta, decay;     // nothing says how much a scan writes
  const float *a_log, *dt_bias;                         // [heads]: of the decay
  const float *d;     // [heads]: how much of the value a scan adds to what it gives
  Norm norm;          // of a head's outputs, or of those of all that share a key head
  int64_t activation; // of the convolution, and of the gate

  int64_t heads() const { return key_heads * heads_per_key; }

  // The floats that all products of a token need.
  int64_t scratch_per_token() const {
    int64_t found = width;
    for (int64_t i = 0; i < count; i++) found += products[i].outputs;
    return found;
  }
};

// One kind of state of a layer: before the pass, and after its columns.
struct States {
  const float *const *before; // [rows]
  float *const *after;        // [rows, columns], or null where nobody wants it
};

// Those of a layer: the last inputs of its convolution [channels, taps], and the states of its heads
// [heads, key_dim, value_dim], or [heads, value_dim, key_dim] for a scan.
struct LayerStates {
  States inputs, heads;
};

// How the layers of a pass read its columns.
struct StatePointers {
  const int64_t *parents; // [rows, columns]: each column's parent, or -1; or null: a chain
  const LayerStates *layers;
};

// The layer of a pass that is computed now.
struct RecurrentPass {
  const Recurrence &layer;
  const LayerStates &states;
  const int64_t *parents;
  int64_t columns;
  float *products[MOST_PRODUCTS]; // its products, [tokens, outputs]
  float *output;                  // [tokens, width]

  int64_t parent(int64_t row, int64_t t) const { return parents ? parents[row * columns + t] : t - 1; }

  // The numbers of one of the heads that share a key head, of token r.
  float *at(const HeadOffsets &place, int64_t r, int64_t key_head, int64_t head_of_key) const {
    return products[place.product] + r * layer.products[place.product].outputs + place.first +
           key_head * place.key_stride + head_of_key * place.head_stride;
  }

  int64_t stride(const HeadOffsets &place) const { return layer.products[place.product].outputs; }
};

// Some channels of a convolution over one row: inputs, weights, and inputs from before the pass.
struct ConvolvedChannels {
  const RecurrentPass &pass;
  const int64_t row, first, count; // channels
  float *inputs;                   // [columns, count], `stride` from column to column
  const int64_t stride;
  float weights[MOST_TAPS][CHANNELS]; // of the newest input first
  float before[MOST_TAPS][CHANNELS];  // the newest one first

  ConvolvedChannels(const RecurrentPass &pass, int64_t row, int64_t first, int64_t count, float *inputs,
                    int64_t stride)
      : pass(pass), row(row), first(first), count(count), inputs(inputs), stride(stride) {
    const int64_t taps = pass.layer.taps;
    const float *weight = pass.layer.weight + first * taps;
    const float *state = pass.states.inputs.before[row] + first * taps;
    for (int64_t c = 0; c < count; c++)
      for (int64_t i = 0; i < taps; i++) {
        weights[i][c] = weight[c * taps + taps - 1 - i];
        before[i][c] = state[c * taps + taps - 1 - i];
      }
  }

  // Writes what the channels come to at column t, and the inputs that the next column sees. to: may be
  // where the column's own inputs are, once all columns after it are done.
  void compute(int64_t t, float *to) const {
    const int64_t taps = pass.layer.taps;
    const float *seen[MOST_TAPS];
    for (int64_t i = 0, at = t; i < taps; i++) {
      seen[i] = at < 0 ? before[-1 - at] : inputs + at * stride;
      at = at < 0 ? at - 1 : pass.parent(row, at);
    }
    if (float *state = pass.states.inputs.after[row * pass.columns + t]) {
      state += first * taps;
      for (int64_t c = 0; c < count; c++)
        for (int64_t i = 0; i < taps; i++) state[c * taps + i] = seen[taps - 1 - i][c];
    }
    for (int64_t c = 0; c < count; c += LANES) {
      floats sum = {};
      for (int64_t i = taps - 1; i >= 0; i--)
        sum = fmadd(load<floats>(weights[i] + c), load<floats>(seen[i] + c), sum);
      if (pass.layer.bias) sum += load<floats>(pass.layer.bias + first + c);
      std::memcpy(to + c, &sum, sizeof sum);
    }
  }
};

inline void multiply_into(float *x, const float *y, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] *= y[i];
}

// LFM2's: what comes before the convolution is gated, and what comes after it too. Some channels of a
// row; the products are the first gate, the second one, and what is convolved.
inline void convolve(const RecurrentPass &pass, int64_t row, int64_t first, int64_t count) {
  const int64_t width = pass.layer.width, begin = row * pass.columns * width + first;
  float *inputs = pass.products[0] + begin, *to = pass.output + begin;
  for (int64_t t = 0; t < pass.columns; t++)
    multiply_into(inputs + t * width, pass.products[2] + begin + t * width, count);
  const ConvolvedChannels channels(pass, row, first, count, inputs, width);
  for (int64_t t = 0; t < pass.columns; t++) {
    channels.compute(t, to + t * width);
    multiply_into(to + t * width, pass.products[1] + begin + t * width, count);
  }
}

// Brings a vector to the length `size`.
inline void l2_normalise(float *x, int64_t n, float size) {
  const float factor = size / std::sqrt(mean_square(x, n, 0.f) * float(n) + SMALLEST_SQUARE);
  for (int64_t i = 0; i < n; i += LANES) {
    floats v = load<floats>(x + i) * factor;
    std::memcpy(x + i, &v, sizeof v);
  }
}

// What goes into the delta rule or a scan: one of the queries, keys and values of a row, in place.
// number: among all of these.
inline void convolve_head(const RecurrentPass &pass, int64_t row, int64_t number) {
  const Recurrence &layer = pass.layer;
  const bool query = number < layer.key_heads, key = !query && number < 2 * layer.key_heads;
  const int64_t head = number - (query ? 0 : key ? layer.key_heads : 2 * layer.key_heads);
  const int64_t size = query || key ? layer.key_dim : layer.value_dim;
  const HeadOffsets &place = query ? layer.query : key ? layer.key : layer.value;
  const int64_t key_head = query || key ? head : head / layer.heads_per_key,
                head_of_key = query || key ? 0 : head % layer.heads_per_key;
  float *numbers = pass.at(place, row * pass.columns, key_head, head_of_key);
  const int64_t stride = pass.stride(place), begin = place.channel + head * size;
  for (int64_t c = 0; c < size; c += CHANNELS) {
    const ConvolvedChannels channels(pass, row, begin + c, std::min(CHANNELS, size - c), numbers + c,
                                     stride);
    for (int64_t t = pass.columns - 1; t >= 0; t--) channels.compute(t, numbers + t * stride + c);
  }
  for (int64_t t = 0; t < pass.columns; t++) {
    activate(layer.activation, numbers + t * stride, nullptr, size);
    if (layer.kind == SCAN) continue;
    if (query) l2_normalise(numbers + t * stride, size, 1.f / std::sqrt(float(size)));
    if (key) l2_normalise(numbers + t * stride, size, 1.f);
  }
}

// What one token adds to the state of a head.
struct Token {
  const float *query, *key, *value; // [key_dim], twice, and [value_dim]
  float decay, beta;                // how much of the state stays, and how much of the value is written
};

// Some columns of a state [key_dim, value_dim]: it decays, and where it says something else about the
// key than the value, so much is added. to: may be where it comes from.
template <int VECTORS>
inline void delta_step(const Token &token, const float *from, float *to, int64_t keys, int64_t values,
                       int64_t at, float *out) {
  floats known[2][VECTORS] = {}, found[2][VECTORS] = {}, more[VECTORS];
  for (int64_t i = 0; i < keys; i += 2)
    for (int half = 0; half < 2; half++) {
      const floats key = broadcast(token.key[i + half]);
#pragma GCC unroll 8
      for (int u = 0; u < VECTORS; u++)
        known[half][u] =
            fmadd(load<floats>(from + (i + half) * values + at + u * LANES), key, known[half][u]);
    }
#pragma GCC unroll 8
  for (int u = 0; u < VECTORS; u++)
    more[u] = (load<floats>(token.value + at + u * LANES) - (known[0][u] + known[1][u]) * token.decay) *
              token.beta;
  for (int64_t i = 0; i < keys; i += 2)
    for (int half = 0; half < 2; half++) {
      const floats key = broadcast(token.key[i + half]), query = broadcast(token.query[i + half]);
#pragma GCC unroll 8
      for (int u = 0; u < VECTORS; u++) {
        const int64_t place = (i + half) * values + at + u * LANES;
        const floats state = fmadd(key, more[u], load<floats>(from + place) * token.decay);
        std::memcpy(to + place, &state, sizeof state);
        found[half][u] = fmadd(state, query, found[half][u]);
      }
    }
#pragma GCC unroll 8
  for (int u = 0; u < VECTORS; u++) {
    const floats sum = found[0][u] + found[1][u];
    std::memcpy(out + at + u * LANES, &sum, sizeof sum);
  }
}

// The same for a scan ("Transformers are SSMs", 2405.21060), over a state [value_dim, key_dim].
inline void scan(const Token &token, const float *from, float *to, int64_t keys, int64_t values, float skip,
                 float *out) {
  for (int64_t v = 0; v < values; v++, from += keys, to += keys) {
    const floats more = broadcast(token.value[v] * token.beta);
    floats found = {};
    for (int64_t i = 0; i < keys; i += LANES) {
      const floats state = fmadd(load<floats>(token.key + i), more, load<floats>(from + i) * token.decay);
      std::memcpy(to + i, &state, sizeof state);
      found = fmadd(state, load<floats>(token.query + i), found);
    }
    out[v] = sum(found) + skip * token.value[v];
  }
}

// One head of a row: the delta rule ("Gated Delta Networks", 2412.06464), with norm and gate, or a scan.
inline void compute_head(const RecurrentPass &pass, int64_t row, int64_t head) {
  const Recurrence &layer = pass.layer;
  const int64_t key_head = head / layer.heads_per_key, head_of_key = head % layer.heads_per_key,
                keys = layer.key_dim, values = layer.value_dim, size = keys * values;
  const States &states = pass.states.heads;
  float *const *after = states.after + row * pass.columns;
  int64_t kept = 0; // the first column whose state is wanted: the last one's is
  while (!after[kept]) kept++;
  const float rate = -exponential(layer.a_log[head]);
  for (int64_t t = 0; t < pass.columns; t++) {
    const int64_t r = row * pass.columns + t, parent = pass.parent(row, t);
    const float *from = (parent < 0 ? states.before[row] : after[std::max(parent, kept)]) + head * size;
    float *to = after[std::max(t, kept)] + head * size,
          *out = pass.output + r * layer.width + head * values;
    const float step = *pass.at(layer.decay, r, key_head, head_of_key) + layer.dt_bias[head];
    const float time = step > 20.f ? step : std::log1p(exponential(step));
    Token token{pass.at(layer.query, r, key_head, 0), pass.at(layer.key, r, key_head, 0),
                pass.at(layer.value, r, key_head, head_of_key), exponential(rate * time), time};
    if (layer.kind == SCAN) {
      scan(token, from, to, keys, values, layer.d[head], out);
      continue;
    }
    token.beta = 1.f / (exponential(-*pass.at(layer.beta, r, key_head, head_of_key)) + 1.f);
    int64_t at = 0;
    for (; at + STATE_VECTORS * LANES <= values; at += STATE_VECTORS * LANES)
      delta_step<STATE_VECTORS>(token, from, to, keys, values, at, out);
    for (; at < values; at += LANES) delta_step<1>(token, from, to, keys, values, at, out);
    float *gate = pass.at(layer.gate, r, key_head, head_of_key);
    normalise(layer.norm, out, values, out);
    activate(layer.activation, gate, out, values);
    std::memcpy(out, gate, values * sizeof(float));
  }
}

// Gates what a scan has made of token r, and normalises what the heads of a key head have made together.
inline void gate_scan(const RecurrentPass &pass, int64_t r, int64_t key_head) {
  const Recurrence &layer = pass.layer;
  const int64_t size = layer.heads_per_key * layer.value_dim;
  float *out = pass.output + r * layer.width + key_head * size, *gate = pass.at(layer.gate, r, key_head, 0);
  activate(layer.activation, gate, out, size);
  normalise(layer.norm, gate, size, out, key_head * size);
}

} // namespace
