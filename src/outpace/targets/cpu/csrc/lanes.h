// Vectors of floats as wide as the processor has them, and numbers of other types widened to them.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define AVX 512
#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#define AVX 256
#else
#define AVX 0
#endif

// Whether there are float16 numbers: before version 13 g++ knows them in C++ on x86 only.
#if defined(__FLT16_MANT_DIG__) &&                                                                         \
    (defined(__clang__) || defined(__x86_64__) || !defined(__GNUC__) || __GNUC__ >= 13)
#define HAS_FLOAT16
#endif

namespace {

#if AVX == 512
constexpr int LANES = 16, REGISTERS = 32;
#elif AVX == 256
constexpr int LANES = 8, REGISTERS = 16;
#else
constexpr int LANES = 4, REGISTERS = 32;
#endif

template <typename T> struct Lanes {
  typedef T type __attribute__((vector_size(sizeof(T) * LANES)));
};
template <typename T> using lanes = typename Lanes<T>::type;
using floats = lanes<float>;

struct bfloat16 {
  uint16_t bits;
};

template <typename V> inline V load(const void *from) {
  V loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return loaded;
}

// A number in all lanes. Added to zeros it would have to be added: -0 + 0 is 0.
inline floats broadcast(float x) { return x - floats{}; }

inline float to_float(float w) { return w; }
inline float to_float(int8_t w) { return w; }
inline float to_float(bfloat16 w) {
  uint32_t bits = uint32_t(w.bits) << 16;
  return load<float>(&bits);
}

// a * b + c, rounded once. The compiler is kept from doing this on its own: it would do so in one
// tile and not in another, and a token's bits would depend on its company.
inline floats fmadd(floats a, floats b, floats c) {
#if AVX == 512
  return _mm512_fmadd_ps(a, b, c);
#elif AVX == 256
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return floats(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
#else
  return a * b + c;
#endif
}

// The compilers' own conversions of vectors from narrow types come out one by one on x86.
inline floats widen(const float *w) { return load<floats>(w); }
#if AVX == 512
inline floats widen(const int8_t *w) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(w))); }
inline floats widen(const bfloat16 *w) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(w)), 16));
}
#elif AVX == 256
inline floats widen(const int8_t *w) {
  int64_t bytes = load<int64_t>(w);
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes)));
}
inline floats widen(const bfloat16 *w) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(w)), 16));
}
#else
inline floats widen(const int8_t *w) { return __builtin_convertvector(load<lanes<int8_t>>(w), floats); }
inline floats widen(const bfloat16 *w) {
  auto bits = __builtin_convertvector(load<lanes<uint16_t>>(w), lanes<uint32_t>) << 16;
  return load<floats>(&bits);
}
#endif

#ifdef HAS_FLOAT16
inline float to_float(_Float16 w) { return w; }
#if AVX == 512
inline floats widen(const _Float16 *w) { return _mm512_cvtph_ps(load<__m256i>(w)); }
#elif AVX == 256
inline floats widen(const _Float16 *w) { return _mm256_cvtph_ps(load<__m128i>(w)); }
#else
inline floats widen(const _Float16 *w) { return __builtin_convertvector(load<lanes<_Float16>>(w), floats); }
#endif
#endif

// The upper half of what is left is added to the lower one until one number is left.
inline float sum(floats v) {
#if AVX
#if AVX == 512
  __m256 eights[2];
  std::memcpy(eights, &v, sizeof v);
  __m256 eight = eights[0] + eights[1];
#else
  __m256 eight = v;
#endif
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float part[LANES];
  std::memcpy(part, &v, sizeof part);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) part[i] += part[i + half];
  return part[0];
#endif
}

constexpr int SUMS_AT_ONCE = 4;

// The sums of four vectors: of each the upper half of what is left is added to the lower one until
// one number is left, as in `sum`.
inline void sums_of(const floats (&v)[SUMS_AT_ONCE], float *to) {
#if AVX == 512
  auto half = [](floats a, floats b) { // eight numbers of each
    __m512 x = __m512(a), y = __m512(b);
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
  };
  __m512 ab = half(v[0], v[1]), cd = half(v[2], v[3]);
  __m512 four = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  __m512 two = _mm512_add_ps(four, _mm512_permute_ps(four, 0x4e));
  __m512 one = _mm512_add_ps(two, _mm512_permute_ps(two, 0xb1));
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, one)));
#else
  for (int u = 0; u < SUMS_AT_ONCE; u++) to[u] = sum(v[u]);
#endif
}

// e^x to some 2 units in the last place; what is below the smallest normal number becomes that.
inline floats exponential(floats x) {
  const floats top = broadcast(88.3762626647949f), bottom = broadcast(-87.3365478515625f);
  x = x > top ? top : x;
  x = x < bottom ? bottom : x;
  const float rounder = 12582912.f; // 1.5 * 2^23: adding it rounds to an integer
  floats n = (x * 1.44269504088896341f + rounder) - rounder;
  floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  floats p = broadcast(1.9875691500e-4f);
  p = fmadd(p, r, broadcast(1.3981999507e-3f));
  p = fmadd(p, r, broadcast(8.3334519073e-3f));
  p = fmadd(p, r, broadcast(4.1665795894e-2f));
  p = fmadd(p, r, broadcast(1.6666665459e-1f));
  p = fmadd(p, r, broadcast(5.0000001201e-1f));
  p = p * (r * r) + r + 1.f;
  lanes<int32_t> power = (__builtin_convertvector(n, lanes<int32_t>) + 127) << 23;
  return p * load<floats>(&power);
}

inline float exponential(float x) { return exponential(broadcast(x))[0]; }

// Says that a value is needed in a register. It costs no instruction, and keeps the compiler from
// reading the value again for each use: loads are what a tile is short of.
inline void keep_in_register(floats &value) {
#if AVX == 512
  asm("" : "+v"(value));
#elif AVX == 256
  asm("" : "+x"(value));
#else
  (void)value;
#endif
}

} // namespace
