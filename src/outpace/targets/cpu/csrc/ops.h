// The small operations of a decoder layer: norms, activations, rotary position embeddings, soft caps.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace {

// The numbers of kinds, as in Python.
enum { NO_NORM = 0, RMS_NORM = 1, LAYER_NORM = 2 };                                     // of norms
enum { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3, RELU_SQUARED = 4, SWIGLU_OAI = 5 }; // of activations
enum {
  NO_ROTARY = 0,
  HALVES = 1,
  INTERLEAVED = 2,
  INTERLEAVED_HALF_TABLE = 3,
  HALVES_HALF_TABLE = 4,
  DEINTERLEAVED = 5
}; // of rotary position embeddings

constexpr int64_t MOST_ROTARY = 256; // numbers of a head that are DEINTERLEAVED (as in Python)

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
      squares[u] = fmadd(v, v, squares[u]);
    }
  for (; i < n; i += LANES) {
    floats v = load<floats>(x + i) - less;
    squares[0] = fmadd(v, v, squares[0]);
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
  if (norm.kind == NO_NORM) {
    if (x != y) std::memcpy(y, x, n * sizeof(float));
    return;
  }
  const float less = norm.kind == LAYER_NORM ? mean_of(x, n) : 0.f;
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
  floats p = broadcast(1.061405429f);
  p = fmadd(p, t, broadcast(-1.453152027f));
  p = fmadd(p, t, broadcast(1.421413741f));
  p = fmadd(p, t, broadcast(-0.284496736f));
  p = fmadd(p, t, broadcast(0.254829592f));
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

// gpt-oss's SwiGLU: g sigmoid(alpha g) (u + 1), with g at most `limit` and u between -limit and limit.
struct Clip {
  float alpha, limit;
};

inline void swiglu_oai(Clip clip, float *gate, const float *up, int64_t n) {
  const floats most = broadcast(clip.limit), least = broadcast(-clip.limit);
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
inline void soft_cap(float *x, int64_t n, float scale, float cap) {
  auto bounded = [&](floats v) {
    v = v * scale;
    return cap ? hyperbolic_tangent(v / cap) * cap : v;
  };
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    floats v = bounded(load<floats>(x + i));
    std::memcpy(x + i, &v, sizeof v);
  }
  for (; i < n; i++) x[i] = bounded(broadcast(x[i]))[0];
}

// Rotates the first dimensions of a head by the angles of its position. Two numbers are rotated together:
// HALVES: i and i + half (NeoX). INTERLEAVED: 2 i and 2 i + 1 (GPT-J), each with its own entry of the
// table. INTERLEAVED_HALF_TABLE: with the entries of the first half. HALVES_HALF_TABLE: as HALVES, with one
// entry for both, so that a table of `dim` rotates twice as many dimensions. DEINTERLEAVED: as
// INTERLEAVED_HALF_TABLE, and then all first numbers come before all second ones.
inline void apply_rotary(float *head, const float *cosines, const float *sines, int64_t dim,
                         int64_t style) {
  const int64_t half = dim / 2;
  auto rotate = [&](float &first, float &second, int64_t one, int64_t other) {
    const float a = first, b = second;
    first = a * cosines[one] - b * sines[one];
    second = b * cosines[other] + a * sines[other];
  };
  if (style == HALVES)
    for (int64_t i = 0; i < half; i++) rotate(head[i], head[i + half], i, i + half);
  else if (style == HALVES_HALF_TABLE)
    for (int64_t i = 0; i < dim; i++) rotate(head[i], head[i + dim], i, i);
  else if (style == INTERLEAVED)
    for (int64_t i = 0; i < half; i++) rotate(head[2 * i], head[2 * i + 1], 2 * i, 2 * i + 1);
  else
    for (int64_t i = 0; i < half; i++) rotate(head[2 * i], head[2 * i + 1], i, i);
  if (style != DEINTERLEAVED) return;
  float pairs[MOST_ROTARY];
  std::copy(head, head + dim, pairs);
  for (int64_t i = 0; i < half; i++) head[i] = pairs[2 * i], head[half + i] = pairs[2 * i + 1];
}

} // namespace
