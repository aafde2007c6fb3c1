// Built-ins that Apple's compiler calls and that in the shim are plain C++: conversions, integers.
#include <algorithm>
#include <cmath>
#include <limits>

#include "simt.h"

typedef __bf16 bfloat;
typedef float float4 __attribute__((vector_size(16)));
typedef half half4 __attribute__((vector_size(8)));
typedef bfloat bfloat4 __attribute__((vector_size(8)));

// clang-format off
#define SITE __builtin_return_address(0)
#define BUILTIN(RET, AIR, NAME, ...) RET NAME(__VA_ARGS__) __asm__(AIR); RET NAME(__VA_ARGS__)

template <typename T>
static T saturated(float x) {
  if (std::isnan(x)) return 0;
  if (x <= (float)std::numeric_limits<T>::min()) return std::numeric_limits<T>::min();
  if (x >= (float)std::numeric_limits<T>::max()) return std::numeric_limits<T>::max();
  return (T)x;
}

extern "C" {
// small integers come and go in registers of which the upper bits mean nothing
#define TO_REAL(REAL, R, T, REG, I) \
  BUILTIN(REAL, "air.convert.f." #R "." I, R##_of_##T, REG x) { return (REAL)(T)x; }
#define FROM_REAL(REAL, R, T, REG, I) \
  BUILTIN(REG, "air.convert." I ".f." #R, T##_of_##R, REAL x) { \
    return (REG)saturated<T>((float)x); \
  }
#define CONVERT(T, REG, I) \
  TO_REAL(float, f32, T, REG, I) TO_REAL(half, f16, T, REG, I) TO_REAL(bfloat, bf16, T, REG, I) \
  FROM_REAL(float, f32, T, REG, I) FROM_REAL(half, f16, T, REG, I) FROM_REAL(bfloat, bf16, T, REG, I)
CONVERT(int8_t, uint, "s.i8")
CONVERT(uint8_t, uint, "u.i8")
CONVERT(int16_t, uint, "s.i16")
CONVERT(uint16_t, uint, "u.i16")
CONVERT(int32_t, uint, "s.i32")
CONVERT(uint32_t, uint, "u.i32")
CONVERT(int64_t, uint64_t, "s.i64")
CONVERT(uint64_t, uint64_t, "u.i64")
#define CONVERT_BOOL(REAL, R) \
  BUILTIN(REAL, "air.convert.f." #R ".u.i1", R##_of_bool, uint x) { return (REAL)(float)(x & 1); } \
  BUILTIN(uint, "air.convert.u.i1.f." #R, bool_of_##R, REAL x) { return (float)x != 0.0f; }
CONVERT_BOOL(float, f32) CONVERT_BOOL(half, f16) CONVERT_BOOL(bfloat, bf16)
BUILTIN(bfloat, "air.convert.f.bf16.f.f16", bf16_of_f16, half x) { return (bfloat)(float)x; }
BUILTIN(half, "air.convert.f.f16.f.bf16", f16_of_bf16, bfloat x) { return (half)(float)x; }
BUILTIN(float4, "air.convert.f.v4f32.f.v4f16", f32_of_half4, half4 x) {
  return __builtin_convertvector(x, float4);
}
BUILTIN(float4, "air.convert.f.v4f32.f.v4bf16", f32_of_bfloat4, bfloat4 x) {
  return __builtin_convertvector(x, float4);
}

#define LARGER_SMALLER(T, REG, S) \
  BUILTIN(REG, "air.max." S, max_of_##T, REG x, REG y) { return (REG)std::max((T)x, (T)y); } \
  BUILTIN(REG, "air.min." S, min_of_##T, REG x, REG y) { return (REG)std::min((T)x, (T)y); }
LARGER_SMALLER(int8_t, uint, "s.i8") LARGER_SMALLER(uint8_t, uint, "u.i8")
LARGER_SMALLER(int16_t, uint, "s.i16") LARGER_SMALLER(uint16_t, uint, "u.i16")
LARGER_SMALLER(int32_t, uint, "s.i32") LARGER_SMALLER(uint32_t, uint, "u.i32")
LARGER_SMALLER(int64_t, uint64_t, "s.i64") LARGER_SMALLER(uint64_t, uint64_t, "u.i64")
BUILTIN(uint, "air.abs.s.i16", abs_of_i16, uint x) { return std::abs((int)(int16_t)x); }
BUILTIN(uint, "air.abs.s.i32", abs_of_i32, uint x) { return (int)x < 0 ? -x : x; }
BUILTIN(uint64_t, "air.abs.s.i64", abs_of_i64, uint64_t x) { return (int64_t)x < 0 ? -x : x; }
BUILTIN(int, "air.clamp.s.i32", clamp_of_i32, int x, int low, int high) {
  return std::min(std::max(x, low), high);
}

BUILTIN(float, "air.ldexp.f32", ldexp_of_f32, float x, int e) { return ldexpf(x, e); }
BUILTIN(float, "air.dot.v4f32", dot_of_f32, float4 a, float4 b) {
  return fmaf(a[3], b[3], fmaf(a[2], b[2], fmaf(a[1], b[1], a[0] * b[0])));
}
BUILTIN(uint, "air.is_uniform.i1", is_uniform_i1, uint) { return 0; }
BUILTIN(uint, "air.is_uniform.i32", is_uniform_i32, uint) { return 0; }
BUILTIN(uint, "air.normalize_function_constant_predicate.i8", predicate, uint x) {
  return x & 0xff;
}
BUILTIN(float, "air.atomic.global.add.f32", atomic_add_f32, float* p, float x, int, int, uint) {
  const float before = *p;
  *p = before + x;
  return before;
}

// two integers travel as one
typedef uint uint2 __attribute__((vector_size(8)));
static uint64_t packed(uint2 x) { return (uint64_t)x[1] << 32 | x[0]; }
static uint2 unpacked(uint64_t x) { return uint2{(uint)x, (uint)(x >> 32)}; }
BUILTIN(uint2, "air.simd_shuffle.u.v2i32", shuffle_v2, uint2 x, uint n) {
  return unpacked(simd_op(SHUFFLE, packed(x), 0, 0, (int16_t)n, 0, SITE));
}
BUILTIN(uint2, "air.simd_shuffle_down.u.v2i32", shuffle_down_v2, uint2 x, uint n) {
  return unpacked(simd_op(SHUFFLE_DOWN, packed(x), 0, 0, (int16_t)n, 0, SITE));
}
BUILTIN(uint2, "air.simd_shuffle_and_fill_up.u.v2i32", fill_up_v2, uint2 x, uint2 y, uint d, uint m) {
  return unpacked(simd_op(FILL_UP, packed(x), packed(y), 0, d & 0xffff, m & 0xffff, SITE));
}

// called by the code that oracle.py writes: the lane's two neighbours of a matrix in memory
static uint64_t in_memory(int i, uint64_t row_length, uint64_t x, uint64_t y, uint transposed) {
  const int lane = current_context().lane;
  const uint64_t row = matrix_row(lane), col = matrix_col(lane) + i;
  return transposed ? (col + y) * row_length + row + x : (row + y) * row_length + col + x;
}
void rt_matrix_load(
    float* d, const float* p, uint64_t row_length, uint64_t x, uint64_t y, uint transposed) {
  for (int i = 0; i < 2; i++) d[i] = p[in_memory(i, row_length, x, y, transposed)];
}
void rt_matrix_store(
    const float* d, float* p, uint64_t row_length, uint64_t x, uint64_t y, uint transposed) {
  for (int i = 0; i < 2; i++) p[in_memory(i, row_length, x, y, transposed)] = d[i];
}
}
