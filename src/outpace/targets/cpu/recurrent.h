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
#include "part.h"
#include "steps.h"

namespace {

// The numbers of kinds, as in Python.
enum { ATTENTION = 0, SHORT_CONVOLUTION = 1, DELTA_RULE = 2, SCAN = 3 }; // of what lets tokens see others

constexpr int64_t MOST_TAPS = 8;  // inputs that a convolution sees (as in Python)
constexpr int64_t MOST_PARTS = 4; // products of a layer's input (as in Python)
constexpr int64_t CHANNELS = 64;  // of a convolution, that are worked on at once
constexpr int64_t WIDE = 4;       // vectors of a state's rows that are worked on at once
constexpr float SMALLEST_SQUARE = 1e-6f; // what is added to the sum of squares of queries and keys

// Where the numbers of a head lie among a token's products: those of the heads that share a key head
// are `each` apart, and those of different key heads `apart`. And which channel of the convolution is
// the first of the first head's.
struct Place {
  int64_t part, first, apart, each, channel;
};

// What stands in a layer in the place of attention.
struct Recurrence {
  Part parts[MOST_PARTS]; // products of the layer's input
  int64_t count;          // of these
  int64_t kind;
  const float *weight, *bias; // of the convolution: [channels, taps], and [channels] or null
  int64_t taps;
  int64_t width; // outputs, which are the inputs of the layer's last product
  // What follows is not of short convolutions. A scan's queries are called C in Mamba-2, its keys B.
  int64_t groups, each, key_dim, value_dim; // key heads, heads that share one, numbers of a head
  Place query, key, value, gate, beta, decay; // nothing says how much a scan writes
  const float *a_log, *dt_bias; // [heads]: of the decay
  const float *d;               // [heads]: how much of the value a scan adds to what it gives
  Norm norm;                   // of a head's outputs, or of those of all that share a key head
  int64_t activation;          // of the convolution, and of the gate

  int64_t heads() const { return groups * each; }

  // The floats that all products of a token need.
  int64_t room() const {
    int64_t found = width;
    for (int64_t i = 0; i < count; i++) found += parts[i].outputs;
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
struct Recurring {
  const Recurrence &how;
  const LayerStates &states;
  const int64_t *parents;
  int64_t columns;
  float *parts[MOST_PARTS]; // its products, [tokens, outputs]
  float *made;              // [tokens, width]

  int64_t parent(int64_t row, int64_t t) const {
    return parents ? parents[row * columns + t] : t - 1;
  }

  // The numbers of one of the heads that share a key head, of token r.
  float *at(const Place &place, int64_t r, int64_t group, int64_t own) const {
    return parts[place.part] + r * how.parts[place.part].outputs + place.first + group * place.apart +
           own * place.each;
  }

  int64_t between(const Place &place) const { return how.parts[place.part].outputs; }
};

// Some channels of a convolution over one row: inputs, weights, and inputs from before the pass.
struct Convolving {
  const Recurring &job;
  const int64_t row, first, count; // channels
  float *inputs;                   // [columns, count], `apart` from column to column
  const int64_t apart;
  float weights[MOST_TAPS][CHANNELS]; // of the newest input first
  float before[MOST_TAPS][CHANNELS];  // the newest one first

  Convolving(const Recurring &job, int64_t row, int64_t first, int64_t count, float *inputs,
             int64_t apart)
      : job(job), row(row), first(first), count(count), inputs(inputs), apart(apart) {
    const int64_t taps = job.how.taps;
    const float *weight = job.how.weight + first * taps;
    const float *state = job.states.inputs.before[row] + first * taps;
    for (int64_t c = 0; c < count; c++)
      for (int64_t i = 0; i < taps; i++) {
        weights[i][c] = weight[c * taps + taps - 1 - i];
        before[i][c] = state[c * taps + taps - 1 - i];
      }
  }

  // Writes what the channels come to at column t, and the inputs that the next column sees. to: may be
  // where the column's own inputs are, once all columns after it are done.
  void compute(int64_t t, float *to) const {
    const int64_t taps = job.how.taps;
    const float *seen[MOST_TAPS];
    for (int64_t i = 0, at = t; i < taps; i++) {
      seen[i] = at < 0 ? before[-1 - at] : inputs + at * apart;
      at = at < 0 ? at - 1 : job.parent(row, at);
    }
    if (float *state = job.states.inputs.after[row * job.columns + t]) {
      state += first * taps;
      for (int64_t c = 0; c < count; c++)
        for (int64_t i = 0; i < taps; i++) state[c * taps + i] = seen[taps - 1 - i][c];
    }
    for (int64_t c = 0; c < count; c += LANES) {
      floats sum = {};
      for (int64_t i = taps - 1; i >= 0; i--)
        sum = fused(load<floats>(weights[i] + c), load<floats>(seen[i] + c), sum);
      if (job.how.bias) sum += load<floats>(job.how.bias + first + c);
      std::memcpy(to + c, &sum, sizeof sum);
    }
  }
};

inline void multiply_into(float *x, const float *y, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] *= y[i];
}

// LFM2's: what comes before the convolution is gated, and what comes after it too. Some channels of a
// row; the parts are the first gate, the second one, and what is convolved.
inline void convolve(const Recurring &job, int64_t row, int64_t first, int64_t count) {
  const int64_t width = job.how.width, begin = row * job.columns * width + first;
  float *inputs = job.parts[0] + begin, *to = job.made + begin;
  for (int64_t t = 0; t < job.columns; t++)
    multiply_into(inputs + t * width, job.parts[2] + begin + t * width, count);
  const Convolving channels(job, row, first, count, inputs, width);
  for (int64_t t = 0; t < job.columns; t++) {
    channels.compute(t, to + t * width);
    multiply_into(to + t * width, job.parts[1] + begin + t * width, count);
  }
}

// Brings a vector to the length `size`.
inline void bring_to_length(float *x, int64_t n, float size) {
  const float factor = size / std::sqrt(mean_square(x, n, 0.f) * float(n) + SMALLEST_SQUARE);
  for (int64_t i = 0; i < n; i += LANES) {
    floats v = load<floats>(x + i) * factor;
    std::memcpy(x + i, &v, sizeof v);
  }
}

// What goes into the delta rule or a scan: one of the queries, keys and values of a row, in place.
// number: among all of these.
inline void convolve_head(const Recurring &job, int64_t row, int64_t number) {
  const Recurrence &how = job.how;
  const bool query = number < how.groups, key = !query && number < 2 * how.groups;
  const int64_t head = number - (query ? 0 : key ? how.groups : 2 * how.groups);
  const int64_t size = query || key ? how.key_dim : how.value_dim;
  const Place &place = query ? how.query : key ? how.key : how.value;
  const int64_t group = query || key ? head : head / how.each, own = query || key ? 0 : head % how.each;
  float *numbers = job.at(place, row * job.columns, group, own);
  const int64_t apart = job.between(place), begin = place.channel + head * size;
  for (int64_t c = 0; c < size; c += CHANNELS) {
    const Convolving channels(job, row, begin + c, std::min(CHANNELS, size - c), numbers + c, apart);
    for (int64_t t = job.columns - 1; t >= 0; t--) channels.compute(t, numbers + t * apart + c);
  }
  for (int64_t t = 0; t < job.columns; t++) {
    activate(how.activation, numbers + t * apart, nullptr, size);
    if (how.kind == SCAN) continue;
    if (query) bring_to_length(numbers + t * apart, size, 1.f / std::sqrt(float(size)));
    if (key) bring_to_length(numbers + t * apart, size, 1.f);
  }
}

// What one token brings to the state of a head.
struct Token {
  const float *query, *key, *value; // [key_dim], twice, and [value_dim]
  float decay, beta;                // how much of the state stays, and how much of the value is written
};

// Some columns of a state [key_dim, value_dim]: it decays, and where it says something else about the
// key than the value, so much is added. to: may be where it comes from.
template <int SIDE>
inline void delta_step(const Token &token, const float *from, float *to, int64_t keys,
                       int64_t values, int64_t at, float *out) {
  floats known[2][SIDE] = {}, found[2][SIDE] = {}, more[SIDE];
  for (int64_t i = 0; i < keys; i += 2)
    for (int half = 0; half < 2; half++) {
      const floats key = all(token.key[i + half]);
#pragma GCC unroll 8
      for (int u = 0; u < SIDE; u++)
        known[half][u] = fused(load<floats>(from + (i + half) * values + at + u * LANES), key,
                               known[half][u]);
    }
#pragma GCC unroll 8
  for (int u = 0; u < SIDE; u++)
    more[u] = (load<floats>(token.value + at + u * LANES) - (known[0][u] + known[1][u]) * token.decay) *
              token.beta;
  for (int64_t i = 0; i < keys; i += 2)
    for (int half = 0; half < 2; half++) {
      const floats key = all(token.key[i + half]), query = all(token.query[i + half]);
#pragma GCC unroll 8
      for (int u = 0; u < SIDE; u++) {
        const int64_t place = (i + half) * values + at + u * LANES;
        const floats state = fused(key, more[u], load<floats>(from + place) * token.decay);
        std::memcpy(to + place, &state, sizeof state);
        found[half][u] = fused(state, query, found[half][u]);
      }
    }
#pragma GCC unroll 8
  for (int u = 0; u < SIDE; u++) {
    const floats sum = found[0][u] + found[1][u];
    std::memcpy(out + at + u * LANES, &sum, sizeof sum);
  }
}

// The same for a scan ("Transformers are SSMs", 2405.21060), over a state [value_dim, key_dim].
inline void scan(const Token &token, const float *from, float *to, int64_t keys, int64_t values,
                 float skip, float *out) {
  for (int64_t v = 0; v < values; v++, from += keys, to += keys) {
    const floats more = all(token.value[v] * token.beta);
    floats found = {};
    for (int64_t i = 0; i < keys; i += LANES) {
      const floats state = fused(load<floats>(token.key + i), more, load<floats>(from + i) * token.decay);
      std::memcpy(to + i, &state, sizeof state);
      found = fused(state, load<floats>(token.query + i), found);
    }
    out[v] = sum(found) + skip * token.value[v];
  }
}

// One head of a row: the delta rule ("Gated Delta Networks", 2412.06464), with norm and gate, or a scan.
inline void run_head(const Recurring &job, int64_t row, int64_t head) {
  const Recurrence &how = job.how;
  const int64_t group = head / how.each, own = head % how.each, keys = how.key_dim,
                values = how.value_dim, size = keys * values;
  const States &states = job.states.heads;
  float *const *after = states.after + row * job.columns;
  int64_t kept = 0; // the first column whose state is wanted: the last one's is
  while (!after[kept]) kept++;
  const float rate = -exponential(how.a_log[head]);
  for (int64_t t = 0; t < job.columns; t++) {
    const int64_t r = row * job.columns + t, parent = job.parent(row, t);
    const float *from = (parent < 0 ? states.before[row] : after[std::max(parent, kept)]) + head * size;
    float *to = after[std::max(t, kept)] + head * size, *out = job.made + r * how.width + head * values;
    const float step = *job.at(how.decay, r, group, own) + how.dt_bias[head];
    const float time = step > 20.f ? step : std::log1p(exponential(step));
    Token token{job.at(how.query, r, group, 0), job.at(how.key, r, group, 0),
                job.at(how.value, r, group, own), exponential(rate * time), time};
    if (how.kind == SCAN) {
      scan(token, from, to, keys, values, how.d[head], out);
      continue;
    }
    token.beta = 1.f / (exponential(-*job.at(how.beta, r, group, own)) + 1.f);
    int64_t at = 0;
    for (; at + WIDE * LANES <= values; at += WIDE * LANES)
      delta_step<WIDE>(token, from, to, keys, values, at, out);
    for (; at < values; at += LANES) delta_step<1>(token, from, to, keys, values, at, out);
    float *gate = job.at(how.gate, r, group, own);
    normalise(how.norm, out, values, out);
    activate(how.activation, gate, out, values);
    std::memcpy(out, gate, values * sizeof(float));
  }
}

// Gates what a scan has made of token r, and normalises what the heads of a key head have made together.
inline void gate_scanned(const Recurring &job, int64_t r, int64_t group) {
  const Recurrence &how = job.how;
  const int64_t size = how.each * how.value_dim;
  float *out = job.made + r * how.width + group * size, *gate = job.at(how.gate, r, group, 0);
  activate(how.activation, gate, out, size);
  normalise(how.norm, gate, size, out, group * size);
}

} // namespace
