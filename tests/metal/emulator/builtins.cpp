// The built-ins, under the names that Apple's compiler gives them ("air.*").
// Mathematics is the C library's, for the fast_ forms too; half is computed in float and rounded.
#include "simt.h"

#include <cmath>

// clang-format off
#define SITE __builtin_return_address(0)
#define BUILTIN(RET, AIR, NAME, ...) RET NAME(__VA_ARGS__) __asm__(AIR); RET NAME(__VA_ARGS__)
extern "C" {
BUILTIN(void, "air.wg.barrier", b_wg_barrier, int, int) { threadgroup_barrier(SITE); }
BUILTIN(void, "air.simdgroup.barrier", b_sg_barrier, int, int) {
  simd_op(SIMD_BARRIER, 0, 0, 0, 0, 0, SITE);
}
BUILTIN(uint, "air.get_simdgroup_size.i16", b_simdgroup_size) { return 32; }
BUILTIN(uint, "air.simd_all", b_all, uint x) { return simd_op(ALL, x & 1, 0, 0, 0, 0, SITE); }
BUILTIN(uint, "air.simd_any", b_any, uint x) { return simd_op(ANY, x & 1, 0, 0, 0, 0, SITE); }
BUILTIN(uint64_t, "air.simd_ballot.i64", b_ballot, uint x) {
  return simd_op(BALLOT, x & 1, 0, 0, 0, 0, SITE);
}
BUILTIN(uint, "air.simd_is_first", b_is_first) { return simd_op(IS_FIRST, 0, 0, 0, 0, 0, SITE); }

// SIMD-group operations of float and half
#define REDUCE_F(T, S, F, OP) \
  BUILTIN(T, "air." #F "." #S, F##_##S, T x) { \
    return (T)as_float(simd_op(OP, bits((float)x), 0, 0, 0, 0, SITE)); \
  }
#define SHUFFLE_F(T, S, F, OP) \
  BUILTIN(T, "air." #F "." #S, F##_##S, T x, uint n) { \
    return (T)as_float(simd_op(OP, bits((float)x), 0, 0, (int16_t)n, 0, SITE)); \
  }
#define FILL_F(T, S, F, OP) \
  BUILTIN(T, "air." #F "." #S, F##_##S, T x, T y, uint d, uint m) { \
    const uint64_t a = bits((float)x), b = bits((float)y); \
    return (T)as_float(simd_op(OP, a, b, 0, d & 0xffff, m & 0xffff, SITE)); \
  }
#define SIMD_F(T, S) \
  REDUCE_F(T, S, simd_sum, SUM_F) REDUCE_F(T, S, simd_product, PRODUCT_F) \
  REDUCE_F(T, S, simd_min, MIN_F) REDUCE_F(T, S, simd_max, MAX_F) \
  REDUCE_F(T, S, simd_prefix_inclusive_sum, INCLUSIVE_SUM_F) \
  REDUCE_F(T, S, simd_prefix_exclusive_sum, EXCLUSIVE_SUM_F) \
  REDUCE_F(T, S, simd_prefix_inclusive_product, INCLUSIVE_PRODUCT_F) \
  REDUCE_F(T, S, simd_prefix_exclusive_product, EXCLUSIVE_PRODUCT_F) \
  REDUCE_F(T, S, simd_broadcast_first, BROADCAST_FIRST) \
  REDUCE_F(T, S, quad_sum, QUAD_SUM_F) \
  SHUFFLE_F(T, S, simd_shuffle, SHUFFLE) SHUFFLE_F(T, S, simd_shuffle_xor, SHUFFLE_XOR) \
  SHUFFLE_F(T, S, simd_shuffle_up, SHUFFLE_UP) SHUFFLE_F(T, S, simd_shuffle_down, SHUFFLE_DOWN) \
  SHUFFLE_F(T, S, simd_shuffle_rotate_up, ROTATE_UP) \
  SHUFFLE_F(T, S, simd_shuffle_rotate_down, ROTATE_DOWN) \
  SHUFFLE_F(T, S, simd_broadcast, BROADCAST) \
  FILL_F(T, S, simd_shuffle_and_fill_up, FILL_UP) \
  FILL_F(T, S, simd_shuffle_and_fill_down, FILL_DOWN)
SIMD_F(float, f32)
SIMD_F(half, f16)

// and of the integers
#define WIDEN(T, x) (uint64_t)(int64_t)(T)(x)
#define REDUCE_I(T, ID, S, F, OP) \
  BUILTIN(int, "air." #F "." S, F##_##ID, uint x) { \
    return (T)simd_op(OP, WIDEN(T, x), 0, 0, 0, 0, SITE); \
  }
#define SHUFFLE_I(T, ID, S, F, OP) \
  BUILTIN(int, "air." #F "." S, F##_##ID, uint x, uint n) { \
    return (T)simd_op(OP, WIDEN(T, x), 0, 0, (int16_t)n, 0, SITE); \
  }
#define FILL_I(T, ID, S, F, OP) \
  BUILTIN(int, "air." #F "." S, F##_##ID, uint x, uint y, uint d, uint m) { \
    return (T)simd_op(OP, WIDEN(T, x), WIDEN(T, y), 0, d & 0xffff, m & 0xffff, SITE); \
  }
#define SIMD_I(T, ID, S) \
  REDUCE_I(T, ID, S, simd_sum, SUM_I) REDUCE_I(T, ID, S, simd_product, PRODUCT_I) \
  REDUCE_I(T, ID, S, simd_min, MIN_I) REDUCE_I(T, ID, S, simd_max, MAX_I) \
  REDUCE_I(T, ID, S, simd_prefix_inclusive_sum, INCLUSIVE_SUM_I) \
  REDUCE_I(T, ID, S, simd_prefix_exclusive_sum, EXCLUSIVE_SUM_I) \
  REDUCE_I(T, ID, S, simd_prefix_inclusive_product, INCLUSIVE_PRODUCT_I) \
  REDUCE_I(T, ID, S, simd_prefix_exclusive_product, EXCLUSIVE_PRODUCT_I) \
  REDUCE_I(T, ID, S, simd_and, AND) REDUCE_I(T, ID, S, simd_or, OR) \
  REDUCE_I(T, ID, S, simd_xor, XOR) \
  REDUCE_I(T, ID, S, simd_broadcast_first, BROADCAST_FIRST) \
  SHUFFLE_I(T, ID, S, simd_shuffle, SHUFFLE) \
  SHUFFLE_I(T, ID, S, simd_shuffle_xor, SHUFFLE_XOR) \
  SHUFFLE_I(T, ID, S, simd_shuffle_up, SHUFFLE_UP) \
  SHUFFLE_I(T, ID, S, simd_shuffle_down, SHUFFLE_DOWN) \
  SHUFFLE_I(T, ID, S, simd_shuffle_rotate_up, ROTATE_UP) \
  SHUFFLE_I(T, ID, S, simd_shuffle_rotate_down, ROTATE_DOWN) \
  SHUFFLE_I(T, ID, S, simd_broadcast, BROADCAST) \
  FILL_I(T, ID, S, simd_shuffle_and_fill_up, FILL_UP) \
  FILL_I(T, ID, S, simd_shuffle_and_fill_down, FILL_DOWN)
SIMD_I(int32_t, s32, "s.i32")
SIMD_I(uint32_t, u32, "u.i32")
SIMD_I(int16_t, s16, "s.i16")
SIMD_I(uint16_t, u16, "u.i16")
SIMD_I(int8_t, s8, "s.i8")
SIMD_I(uint8_t, u8, "u.i8")

// mathematics
#define MATH1_AS(AIR, F, E) \
  BUILTIN(float, "air." AIR ".f32", m_##F, float x) { return E; } \
  BUILTIN(half, "air." AIR ".f16", mh_##F, half x_) { float x = x_; return (half)(E); }
#define MATH2_AS(AIR, F, E) \
  BUILTIN(float, "air." AIR ".f32", m_##F, float x, float y) { return E; } \
  BUILTIN(half, "air." AIR ".f16", mh_##F, half x_, half y_) { \
    float x = x_, y = y_; \
    return (half)(E); \
  }
#define MATH1(F, E) MATH1_AS(#F, F, E) MATH1_AS("fast_" #F, fast_##F, E)
#define MATH2(F, E) MATH2_AS(#F, F, E) MATH2_AS("fast_" #F, fast_##F, E)
static const float PI_F = 3.14159265358979f;
MATH1(acos, acosf(x)) MATH1(acosh, acoshf(x)) MATH1(asin, asinf(x)) MATH1(asinh, asinhf(x))
MATH1(atan, atanf(x)) MATH1(atanh, atanhf(x)) MATH1(cos, cosf(x)) MATH1(cosh, coshf(x))
MATH1(cospi, cosf(x * PI_F)) MATH1(exp, expf(x)) MATH1(exp2, exp2f(x)) MATH1(exp10, exp10f(x))
MATH1(log, logf(x)) MATH1(log2, log2f(x)) MATH1(log10, log10f(x)) MATH1(rsqrt, 1.0f / sqrtf(x))
MATH1(sin, sinf(x)) MATH1(sinh, sinhf(x)) MATH1(sinpi, sinf(x * PI_F)) MATH1(sqrt, sqrtf(x))
MATH1(tan, tanf(x)) MATH1(tanh, tanhf(x)) MATH1(tanpi, tanf(x * PI_F)) MATH1(ceil, ceilf(x))
MATH1(floor, floorf(x)) MATH1(rint, rintf(x)) MATH1(round, roundf(x)) MATH1(trunc, truncf(x))
MATH1(fabs, fabsf(x)) MATH2(atan2, atan2f(x, y)) MATH2(pow, powf(x, y)) MATH2(powr, powf(x, y))
MATH2(fmod, fmodf(x, y)) MATH2(fmax, fmaxf(x, y)) MATH2(fmin, fminf(x, y))
MATH2(fdim, fdimf(x, y))
BUILTIN(float, "air.fma.f32", m_fma, float x, float y, float z) { return fmaf(x, y, z); }
BUILTIN(half, "air.fma.f16", mh_fma, half x, half y, half z) { return (half)fmaf(x, y, z); }

// called by the shim
uint rt_lane() { return current_context().lane; }
void rt_mma_f32(float* d, const float* a, const float* b, const float* c) {
  uint64_t x, y, z;
  memcpy(&x, a, 8);
  memcpy(&y, b, 8);
  memcpy(&z, c, 8);
  x = simd_op(MATRIX_MULTIPLY, x, y, z, 0, 0, SITE);
  memcpy(d, &x, 8);
}
// float -> bfloat, nearest even: LLVM calls it, and older libgcc lacks it
__attribute__((weak)) __bf16 __truncsfbf2(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  const bool nan = (b & 0x7fffffff) > 0x7f800000;
  const uint16_t r = nan ? (b >> 16) | 0x40 : (b + 0x7fff + ((b >> 16) & 1)) >> 16;
  __bf16 out;
  memcpy(&out, &r, 2);
  return out;
}
}
