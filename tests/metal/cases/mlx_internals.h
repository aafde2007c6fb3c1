// Names inside Apple's standard library that MLX's bf16_math.h calls. Not for shaders of our own.
#pragma once
#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 0

#define ONE(f)                             \
  METAL_FUNC float __metal_##f(float x, int) { \
    return metal::f(x);                    \
  }
#define TWO(f)                                      \
  METAL_FUNC float __metal_##f(float x, float y, int) { \
    return metal::f(x, y);                          \
  }
ONE(acos) ONE(acosh) ONE(asin) ONE(asinh) ONE(atan) ONE(atanh) ONE(ceil) ONE(cos) ONE(cosh)
ONE(cospi) ONE(exp) ONE(exp10) ONE(exp2) ONE(fabs) ONE(floor) ONE(log) ONE(log10) ONE(log2)
ONE(rint) ONE(round) ONE(rsqrt) ONE(sin) ONE(sinh) ONE(sinpi) ONE(sqrt) ONE(tan) ONE(tanh)
ONE(tanpi) ONE(trunc)
TWO(atan2) TWO(divide) TWO(fmax) TWO(fmin) TWO(fmod) TWO(pow) TWO(powr)
METAL_FUNC float __metal_fma(float a, float b, float c) {
  return metal::fma(a, b, c);
}
METAL_FUNC float __metal_ldexp(float x, int e, int) {
  return metal::ldexp(x, e);
}
METAL_FUNC float __metal_fract(float x, int) {
  return x - metal::floor(x);
}
// declared only: a kernel that calls one does not link
float __metal_fmax3(float, float, float, int);
float __metal_fmin3(float, float, float, int);
float __metal_fmedian3(float, float, float, int);
float __metal_frexp(float, thread int*);
float __metal_nextafter(float, float);
float __metal_simd_xor(float);

#define REDUCTION(f)                       \
  template <typename T>                    \
  METAL_FUNC T __metal_##f(T x) {          \
    return metal::f(x);                    \
  }
#define SHUFFLE(f)                         \
  template <typename T>                    \
  METAL_FUNC T __metal_##f(T x, ushort n) { \
    return metal::f(x, n);                 \
  }
#define SHUFFLE_AND_FILL(f)                                   \
  template <typename T>                                       \
  METAL_FUNC T __metal_##f(T x, T y, ushort n, ushort m) {    \
    return metal::f(x, y, n, m);                              \
  }
REDUCTION(simd_sum) REDUCTION(simd_product) REDUCTION(simd_min) REDUCTION(simd_max)
REDUCTION(simd_prefix_inclusive_sum) REDUCTION(simd_prefix_exclusive_sum)
REDUCTION(simd_prefix_inclusive_product) REDUCTION(simd_prefix_exclusive_product)
SHUFFLE(simd_shuffle) SHUFFLE(simd_shuffle_xor) SHUFFLE(simd_shuffle_up) SHUFFLE(simd_shuffle_down)
SHUFFLE(simd_shuffle_rotate_up) SHUFFLE(simd_shuffle_rotate_down) SHUFFLE(simd_broadcast)
SHUFFLE_AND_FILL(simd_shuffle_and_fill_up) SHUFFLE_AND_FILL(simd_shuffle_and_fill_down)
METAL_FUNC ushort __metal_get_simdgroup_size(ushort) {
  return metal::get_simdgroup_size();
}
