// Sixteen weights from packed memory to floats: one lane each, exact. `integers`: `Bits` bits of a
// word as they stand, so times 2^Shift, which saves a shift; the last ones come shifted.
#pragma once

#include "vec.h"

namespace dflash::cpu {
namespace {

#if defined(__AVX512F__)
inline __m512i load_words(const uint32_t* p) {
  return _mm512_loadu_si512(p);
}
inline Vec bfloats(const uint16_t* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
inline Vec halves(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Vec low_bfloats(const uint32_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(load_words(p), 16))};
}
inline Vec high_bfloats(const uint32_t* p) {
  const __m512i mask = _mm512_set1_epi32(int(0xffff0000));
  return {_mm512_castsi512_ps(_mm512_and_si512(load_words(p), mask))};
}
template <int Shift, int Bits>
inline Vec integers(const uint32_t* p) {
  const __m512i x = load_words(p);
  if constexpr (Shift + Bits == 32) return {_mm512_cvtepi32_ps(_mm512_srli_epi32(x, Shift))};
  const __m512i mask = _mm512_set1_epi32(((1 << Bits) - 1) << Shift);
  return {_mm512_cvtepi32_ps(_mm512_and_si512(x, mask))};
}
#elif defined(__AVX2__)
inline __m256i load_words(const uint32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline __m256 bfloats8(const uint16_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline Vec bfloats(const uint16_t* p) {
  return {bfloats8(p), bfloats8(p + 8)};
}
inline __m256 halves8(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec halves(const uint16_t* p) {
  return {halves8(p), halves8(p + 8)};
}
inline __m256 low_bfloats8(const uint32_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(load_words(p), 16));
}
inline Vec low_bfloats(const uint32_t* p) {
  return {low_bfloats8(p), low_bfloats8(p + 8)};
}
inline __m256 high_bfloats8(const uint32_t* p) {
  const __m256i mask = _mm256_set1_epi32(int(0xffff0000));
  return _mm256_castsi256_ps(_mm256_and_si256(load_words(p), mask));
}
inline Vec high_bfloats(const uint32_t* p) {
  return {high_bfloats8(p), high_bfloats8(p + 8)};
}
template <int Shift, int Bits>
inline __m256 integers8(const uint32_t* p) {
  const __m256i x = load_words(p);
  if constexpr (Shift + Bits == 32) return _mm256_cvtepi32_ps(_mm256_srli_epi32(x, Shift));
  const __m256i mask = _mm256_set1_epi32(((1 << Bits) - 1) << Shift);
  return _mm256_cvtepi32_ps(_mm256_and_si256(x, mask));
}
template <int Shift, int Bits>
inline Vec integers(const uint32_t* p) {
  return {integers8<Shift, Bits>(p), integers8<Shift, Bits>(p + 8)};
}
#elif defined(__ARM_NEON)
inline Vec bfloats(const uint16_t* p) {
  Vec a;
  for (int i = 0; i < 4; ++i) a.x[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
  return a;
}
inline Vec halves(const uint16_t* p) {
  Vec a;
  for (int i = 0; i < 4; ++i) a.x[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
  return a;
}
inline Vec low_bfloats(const uint32_t* p) {
  Vec a;
  for (int i = 0; i < 4; ++i) a.x[i] = vreinterpretq_f32_u32(vshlq_n_u32(vld1q_u32(p + 4 * i), 16));
  return a;
}
inline Vec high_bfloats(const uint32_t* p) {
  const uint32x4_t mask = vdupq_n_u32(0xffff0000);
  Vec a;
  for (int i = 0; i < 4; ++i) {
    a.x[i] = vreinterpretq_f32_u32(vandq_u32(vld1q_u32(p + 4 * i), mask));
  }
  return a;
}
template <int Shift, int Bits>
inline Vec integers(const uint32_t* p) {
  Vec a;
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t x = vld1q_u32(p + 4 * i);
    if constexpr (Shift + Bits == 32) {
      a.x[i] = vcvtq_f32_u32(vshrq_n_u32(x, Shift));
    } else {
      a.x[i] = vcvtq_f32_u32(vandq_u32(x, vdupq_n_u32(((1u << Bits) - 1) << Shift)));
    }
  }
  return a;
}
#else
inline float bfloat(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t load_word(const uint32_t* p) {  // which may have been written as halves
  uint32_t x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline Vec bfloats(const uint16_t* p) {
  Vec a;
  for (int i = 0; i < kLanes; ++i) a.x[i] = bfloat(uint32_t(p[i]) << 16);
  return a;
}
inline Vec halves(const uint16_t* p) {
  Half half[kLanes];
  std::memcpy(half, p, sizeof half);
  Vec a;
  for (int i = 0; i < kLanes; ++i) a.x[i] = to_float(half[i]);
  return a;
}
inline Vec low_bfloats(const uint32_t* p) {
  Vec a;
  for (int i = 0; i < kLanes; ++i) a.x[i] = bfloat(load_word(p + i) << 16);
  return a;
}
inline Vec high_bfloats(const uint32_t* p) {
  Vec a;
  for (int i = 0; i < kLanes; ++i) a.x[i] = bfloat(load_word(p + i) & 0xffff0000);
  return a;
}
template <int Shift, int Bits>
inline Vec integers(const uint32_t* p) {
  Vec a;
  for (int i = 0; i < kLanes; ++i) {
    a.x[i] = float(Shift + Bits == 32 ? p[i] >> Shift : p[i] & ((1u << Bits) - 1) << Shift);
  }
  return a;
}
#endif

}  // namespace
}  // namespace dflash::cpu
