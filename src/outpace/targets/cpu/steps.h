// The small steps of a decoder layer: norms, activations, and how heads are turned to their positions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace {

// The numbers of kinds, as in Python.
enum { UNCHANGED = 0, ROOT_MEAN_SQUARE = 1, CENTRED = 2 };             // of norms
enum { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3, RELU_SQUARED = 4, CLIPPED = 5 }; // of activations
enum { STILL = 0, BY_HALVES = 1, BY_PAIRS = 2, PAIRS_BY_HALVES = 3, HALVES_ONCE = 4,
       PAIRS_APART = 5 }; // of turning

constexpr int64_t MOST_TURNED = 256; // numbers of a head whose pairs are put apart (as in Python)

// y = x / sqrt(mean of x^2 + eps) * (offset + weight) + bias, maybe with the mean of x taken away first.
struct Norm {
  const float *weight; // [n], or null: ones
  const float *bias;   // [n], or null: zeros
  int64_t kind;
  float eps, offset;
};

inline float mean_square(const float *x, int64_t n, float less) {
  floats squares[4] = {};
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    for (int u = 0; u < 4; u++) {
      floats v = load<floats>(x + i + u * LANES) - less;
      squares[u] = fused(v, v, squares[u]);
    }
  for (; i < n; i += LANES) {
    floats v = load<floats>(x + i) - less;
    squares[0] = fused(v, v, squares[0]);
  }
  return sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / float(n);
}

inline float mean_of(const float *x, int64_t n) {
  floats total = {};
  for (int64_t i = 0; i < n; i += LANES) total += load<floats>(x + i);
  return sum(total) / float(n);
}

// n: a multiple of LANES. at: where the weights of these numbers begin. y may be x.
inline void normalise(const Norm &norm, const float *x, int64_t n, float *y, int64_t at = 0) {
  if (norm.kind == UNCHANGED) {
    if (x != y) std::memcpy(y, x, n * sizeof(float));
    return;
  }
  const float less = norm.kind == CENTRED ? mean_of(x, n) : 0.f;
  const float factor = 1.f / std::sqrt(mean_square(x, n, less) + norm.eps);
  for (int64_t i = 0; i < n; i += LANES) {
    floats v = (load<floats>(x + i) - less) * factor;
    if (norm.weight) v = v * (load<floats>(norm.weight + at + i) + norm.offset);
    if (norm.bias) v = v + load<floats>(norm.bias + at + i);
    std::memcpy(y + i, &v, sizeof v);
  }
}

// tanh(x) to some 1e-7.
inline floats hyperbolic_tangent(floats x) { return 1.f - 2.f / (exponential(x + x) + 1.f); }

// The error function to some 2e-7: Abramowitz and Stegun, 7.1.26.
inline floats error_function(floats x) {
  const floats zero = {}, size = x < zero ? -x : x;
  const floats t = 1.f / (0.3275911f * size + 1.f);
  floats p = all(1.061405429f);
  p = fused(p, t, all(-1.453152027f));
  p = fused(p, t, all(1.421413741f));
  p = fused(p, t, all(-0.284496736f));
  p = fused(p, t, all(0.254829592f));
  const floats found = 1.f - p * t * exponential(-(size * size));
  return x < zero ? -found : found;
}

template <int KIND> inline floats activated(floats g) {
  const floats zero = {};
  switch (KIND) {
  case SILU: return g / (exponential(-g) + 1.f);
  case GELU_TANH: // x (1 + tanh(u)) / 2 = x sigmoid(2 u)
    return g / (exponential(g * (g * g * -0.0713548162726f - 1.5957691216057308f)) + 1.f);
  case GELU: return g * 0.5f * (error_function(g * 0.70710678118654752f) + 1.f);
  case RELU: return g > zero ? g : zero;
  default: return g > zero ? g * g : zero;
  }
}

template <int KIND> inline void activate(float *gate, const float *up, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) {
    floats v = activated<KIND>(load<floats>(gate + i));
    if (up) v = v * load<floats>(up + i);
    std::memcpy(gate + i, &v, sizeof v);
  }
}

// gpt-oss's: g sigmoid(alpha g) (u + 1), with g at most `limit` and u between -limit and limit.
struct Clip {
  float alpha, limit;
};

inline void activate_clipped(Clip clip, float *gate, const float *up, int64_t n) {
  const floats most = all(clip.limit), least = all(-clip.limit);
  for (int64_t i = 0; i < n; i += LANES) {
    floats g = load<floats>(gate + i), u = load<floats>(up + i);
    g = g > most ? most : g;
    u = u > most ? most : u < least ? least : u;
    floats v = g / (exponential(g * -clip.alpha) + 1.f) * (u + 1.f);
    std::memcpy(gate + i, &v, sizeof v);
  }
}

// gate = f(gate) * up, or f(gate) where up is null; n a multiple of LANES.
inline void activate(int64_t kind, float *gate, const float *up, int64_t n) {
  switch (kind) {
  case SILU: return activate<SILU>(gate, up, n);
  case GELU_TANH: return activate<GELU_TANH>(gate, up, n);
  case GELU: return activate<GELU>(gate, up, n);
  case RELU: return activate<RELU>(gate, up, n);
  default: return activate<RELU_SQUARED>(gate, up, n);
  }
}

inline void add(float *x, const float *y, float factor, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] += factor * y[i];
}

// Multiplies numbers by a scale, and bounds them softly if there is a cap.
inline void bound(float *x, int64_t n, float scale, float cap) {
  auto bounded = [&](floats v) {
    v = v * scale;
    return cap ? hyperbolic_tangent(v / cap) * cap : v;
  };
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    floats v = bounded(load<floats>(x + i));
    std::memcpy(x + i, &v, sizeof v);
  }
  for (; i < n; i++) x[i] = bounded(all(x[i]))[0];
}

// Turns the first dimensions of a head by the angles of its position. Two numbers are turned together:
// half of these dimensions apart, or neighbours, which have an angle each or (by halves) one together.
// HALVES_ONCE: there is one angle for the two, so that `rotary` angles turn twice as many dimensions.
// PAIRS_APART: neighbours, as by halves, of which all first ones come before all second ones afterwards.
inline void turn(float *head, const float *cosines, const float *sines, int64_t rotary, int64_t how) {
  const int64_t half = rotary / 2;
  auto turned = [&](float &first, float &second, int64_t one, int64_t other) {
    const float a = first, b = second;
    first = a * cosines[one] - b * sines[one];
    second = b * cosines[other] + a * sines[other];
  };
  if (how == BY_HALVES)
    for (int64_t i = 0; i < half; i++) turned(head[i], head[i + half], i, i + half);
  else if (how == HALVES_ONCE)
    for (int64_t i = 0; i < rotary; i++) turned(head[i], head[i + rotary], i, i);
  else if (how == BY_PAIRS)
    for (int64_t i = 0; i < half; i++) turned(head[2 * i], head[2 * i + 1], 2 * i, 2 * i + 1);
  else
    for (int64_t i = 0; i < half; i++) turned(head[2 * i], head[2 * i + 1], i, i);
  if (how != PAIRS_APART) return;
  float pairs[MOST_TURNED];
  std::copy(head, head + rotary, pairs);
  for (int64_t i = 0; i < half; i++) head[i] = pairs[2 * i], head[half + i] = pairs[2 * i + 1];
}

} // namespace
