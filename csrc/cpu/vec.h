// Sixteen floats, whatever the registers: the unit of the CPU kernels' reduction order.
//
// Element i of a row adds to lane i % 16, in ascending i; then lane l and l + 8 add, then
// ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). Each instruction set gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace dflash::cpu {
namespace {

inline constexpr int kLanes = 16;

#if defined(__AVX512F__)
struct Vec {
  __m512 x;
};
inline Vec load(const float* p) {
  return {_mm512_loadu_ps(p)};
}
inline void store(float* p, Vec a) {
  _mm512_storeu_ps(p, a.x);
}
inline Vec splat(float a) {
  return {_mm512_set1_ps(a)};
}
inline Vec add(Vec a, Vec b) {
  return {_mm512_add_ps(a.x, b.x)};
}
inline Vec mul(Vec a, Vec b) {
  return {_mm512_mul_ps(a.x, b.x)};
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm512_fmadd_ps(a.x, b.x, c.x)};
}
inline __m256 halves(Vec a) {
  __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.x), 1));
  return _mm256_add_ps(_mm512_castps512_ps256(a.x), high);
}
#elif defined(__AVX2__)
struct Vec {
  __m256 low, high;
};
inline Vec load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
inline void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
inline Vec splat(float a) {
  return {_mm256_set1_ps(a), _mm256_set1_ps(a)};
}
inline Vec add(Vec a, Vec b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline Vec mul(Vec a, Vec b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline __m256 halves(Vec a) {
  return _mm256_add_ps(a.low, a.high);
}
#elif defined(__ARM_NEON)
struct Vec {
  float32x4_t x[4];
};
inline Vec load(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
inline void store(float* p, Vec a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.x[i]);
}
inline Vec splat(float a) {
  float32x4_t x = vdupq_n_f32(a);
  return {{x, x, x, x}};
}
inline Vec add(Vec a, Vec b) {
  for (int i = 0; i < 4; ++i) a.x[i] = vaddq_f32(a.x[i], b.x[i]);
  return a;
}
inline Vec mul(Vec a, Vec b) {
  for (int i = 0; i < 4; ++i) a.x[i] = vmulq_f32(a.x[i], b.x[i]);
  return a;
}
inline Vec fma(Vec a, Vec b, Vec c) {
  for (int i = 0; i < 4; ++i) c.x[i] = vfmaq_f32(c.x[i], a.x[i], b.x[i]);
  return c;
}
#else
struct Vec {
  float x[kLanes];
};
inline Vec load(const float* p) {
  Vec a;
  std::memcpy(a.x, p, sizeof a.x);
  return a;
}
inline void store(float* p, Vec a) {
  std::memcpy(p, a.x, sizeof a.x);
}
inline Vec splat(float b) {
  Vec a;
  for (float& x : a.x) x = b;
  return a;
}
inline Vec add(Vec a, Vec b) {
  for (int i = 0; i < kLanes; ++i) a.x[i] += b.x[i];
  return a;
}
inline Vec mul(Vec a, Vec b) {
  for (int i = 0; i < kLanes; ++i) a.x[i] *= b.x[i];
  return a;
}
inline Vec fma(Vec a, Vec b, Vec c) {
  for (int i = 0; i < kLanes; ++i) c.x[i] = __builtin_fmaf(a.x[i], b.x[i], c.x[i]);
  return c;
}
#endif

/// The sums of four rows' lanes, in the order above.
#if defined(__AVX512F__) || defined(__AVX2__)
inline void sum4(const Vec* a, float* out) {
  __m256 pairs = _mm256_hadd_ps(
      _mm256_hadd_ps(halves(a[0]), halves(a[1])), _mm256_hadd_ps(halves(a[2]), halves(a[3])));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}
#elif defined(__ARM_NEON)
inline void sum4(const Vec* a, float* out) {
  float32x4_t low[4], high[4];
  for (int i = 0; i < 4; ++i) {
    low[i] = vaddq_f32(a[i].x[0], a[i].x[2]);
    high[i] = vaddq_f32(a[i].x[1], a[i].x[3]);
  }
  float32x4_t l = vpaddq_f32(vpaddq_f32(low[0], low[1]), vpaddq_f32(low[2], low[3]));
  float32x4_t h = vpaddq_f32(vpaddq_f32(high[0], high[1]), vpaddq_f32(high[2], high[3]));
  vst1q_f32(out, vaddq_f32(l, h));
}
#else
inline void sum4(const Vec* a, float* out) {
  for (int i = 0; i < 4; ++i) {
    float t[8];
    for (int l = 0; l < 8; ++l) t[l] = a[i].x[l] + a[i].x[l + 8];
    out[i] = ((t[0] + t[1]) + (t[2] + t[3])) + ((t[4] + t[5]) + (t[6] + t[7]));
  }
}
#endif

inline float to_float(float x) {
  return x;
}

struct Half {
  _Float16 x;
};
inline float to_float(Half h) {
  return static_cast<float>(h.x);
}

struct BFloat {
  uint16_t bits;
};
inline float to_float(BFloat b) {
  uint32_t bits = uint32_t(b.bits) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

template <typename T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline Half from_float<Half>(float x) {
  return {static_cast<_Float16>(x)};
}
template <>
inline BFloat from_float<BFloat>(float x) {  // round to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return {uint16_t((bits >> 16) | 0x40)};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

/// e^x to about one unit in the last place for x in -87.3 .. 88.3, infinity above; the same bits in
/// a vector and alone.
inline float exp_f32(float x) {
  x = x > 88.72283f ? 88.72283f : x;
  x = x < -87.33654f ? -87.33654f : x;
  const float shifted = __builtin_fmaf(x, 1.44269504f, 12582912.0f);
  const float n = shifted - 12582912.0f;
  float r = __builtin_fmaf(n, -0.693145752f, x);  // ln 2 in two parts
  r = __builtin_fmaf(n, -1.42860677e-6f, r);
  float p = 1.98412698e-4f;  // Taylor, |r| <= ln 2 / 2
  p = __builtin_fmaf(p, r, 1.38888889e-3f);
  p = __builtin_fmaf(p, r, 8.33333333e-3f);
  p = __builtin_fmaf(p, r, 4.16666667e-2f);
  p = __builtin_fmaf(p, r, 1.66666667e-1f);
  p = __builtin_fmaf(p, r, 0.5f);
  p = __builtin_fmaf(p, r, 1.0f);
  p = __builtin_fmaf(p, r, 1.0f);
  int32_t bits, scale;
  std::memcpy(&bits, &shifted, sizeof bits);
  scale = (bits - 0x4b400000 + 127) << 23;
  float power;
  std::memcpy(&power, &scale, sizeof power);
  return p * power;
}

}  // namespace
}  // namespace dflash::cpu
