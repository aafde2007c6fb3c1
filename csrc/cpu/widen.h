// Rows of activations to fp32 and back, eight values at a time.
#pragma once

#include "vec.h"

namespace dflash::cpu {
namespace {

typedef float Eight __attribute__((vector_size(32)));
typedef uint32_t EightWords __attribute__((vector_size(32)));

template <typename T>
inline void read(const void* from, T& to) {
  std::memcpy(&to, from, sizeof to);
}

/// Eight values to fp32.
template <typename T>
inline void widen8(const T* from, Eight& to) {
  for (int i = 0; i < 8; ++i) to[i] = to_float(from[i]);
}
template <>
inline void widen8<float>(const float* from, Eight& to) {
  read(from, to);
}
#if defined(__AVX2__)
template <>
inline void widen8<BFloat>(const BFloat* from, Eight& to) {
  __m128i narrow;
  read(from, narrow);
  to = Eight(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}
template <>
inline void widen8<Half>(const Half* from, Eight& to) {
  __m128i narrow;
  read(from, narrow);
  to = Eight(_mm256_cvtph_ps(narrow));
}
#endif

/// `size` values to fp32.
template <typename T>
inline void widen(const T* from, int size, float* to) {
  int i = 0;
  for (; i + 8 <= size; i += 8) {
    Eight x;
    widen8(from + i, x);
    std::memcpy(to + i, &x, sizeof x);
  }
  for (; i < size; ++i) to[i] = to_float(from[i]);
}

/// `size` values from fp32, each rounded.
template <typename T>
inline void narrow(const float* from, int size, T* to) {
  for (int i = 0; i < size; ++i) to[i] = from_float<T>(from[i]);
}
#if defined(__AVX2__)
template <>
inline void narrow<Half>(const float* from, int size, Half* to) {
  int i = 0;
  for (; i + 8 <= size; i += 8) {
    const __m128i x = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to + i, &x, sizeof x);
  }
  for (; i < size; ++i) to[i] = from_float<Half>(from[i]);
}
#endif

}  // namespace
}  // namespace dflash::cpu
