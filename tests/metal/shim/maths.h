// Functions of one thread. A built-in is declared under its air.* name, see emulator/builtins.cpp.
#pragma once
// clang-format off

// element by element forms for vectors of 2, 3 and 4
#define MSL_EACH(T, N, E) { T##N r; for (int i = 0; i < N; i++) r[i] = E; return r; }
#define MSL_VN1(T, N, f) INL T##N f(T##N x) MSL_EACH(T, N, f(x[i]))
#define MSL_VN2(T, N, f) INL T##N f(T##N x, T##N y) MSL_EACH(T, N, f(x[i], y[i]))
#define MSL_VN3(T, N, f) INL T##N f(T##N x, T##N y, T##N z) MSL_EACH(T, N, f(x[i], y[i], z[i]))
#define MSL_V1(T, f) MSL_VN1(T, 2, f) MSL_VN1(T, 3, f) MSL_VN1(T, 4, f)
#define MSL_V2(T, f) MSL_VN2(T, 2, f) MSL_VN2(T, 3, f) MSL_VN2(T, 4, f)
#define MSL_V3(T, f) MSL_VN3(T, 2, f) MSL_VN3(T, 3, f) MSL_VN3(T, 4, f)
// functions of one, two and three arguments in float and half; PRE is "" or "fast_"
#define MSL_F1(PRE, f) \
  float f(float x) AIR(PRE #f ".f32"); half f(half x) AIR(PRE #f ".f16"); \
  MSL_V1(float, f) MSL_V1(half, f)
#define MSL_F2(PRE, f) \
  float f(float x, float y) AIR(PRE #f ".f32"); half f(half x, half y) AIR(PRE #f ".f16"); \
  MSL_V2(float, f) MSL_V2(half, f)
#define MSL_F3(PRE, f) \
  float f(float x, float y, float z) AIR(PRE #f ".f32"); \
  half f(half x, half y, half z) AIR(PRE #f ".f16"); \
  MSL_V3(float, f) MSL_V3(half, f)
#define MSL_REAL_OF(T) \
  INL T abs(T x) { return fabs(x); } MSL_V1(T, abs) \
  INL T max(T a, T b) { return fmax(a, b); } MSL_V2(T, max) \
  INL T min(T a, T b) { return fmin(a, b); } MSL_V2(T, min) \
  INL T clamp(T x, T a, T b) { return fmin(fmax(x, a), b); } MSL_V3(T, clamp) \
  INL T divide(T a, T b) { return a / b; }
#define MSL_REAL_FUNCTIONS(P) \
  MSL_F1(P, acos) MSL_F1(P, acosh) MSL_F1(P, asin) MSL_F1(P, asinh) \
  MSL_F1(P, atan) MSL_F1(P, atanh) \
  MSL_F1(P, cos) MSL_F1(P, cosh) MSL_F1(P, cospi) MSL_F1(P, exp) MSL_F1(P, exp2) MSL_F1(P, exp10) \
  MSL_F1(P, log) MSL_F1(P, log2) MSL_F1(P, log10) MSL_F1(P, rsqrt) MSL_F1(P, sin) MSL_F1(P, sinh) \
  MSL_F1(P, sinpi) MSL_F1(P, sqrt) MSL_F1(P, tan) MSL_F1(P, tanh) MSL_F1(P, tanpi) \
  MSL_F1(P, ceil) MSL_F1(P, floor) MSL_F1(P, rint) MSL_F1(P, round) \
  MSL_F1(P, trunc) MSL_F1(P, fabs) \
  MSL_F2(P, atan2) MSL_F2(P, pow) MSL_F2(P, powr) MSL_F2(P, fmod) \
  MSL_F2(P, fmax) MSL_F2(P, fmin) MSL_F2(P, fdim) \
  MSL_EACH_REAL(MSL_REAL_OF)
namespace metal {
namespace precise { MSL_REAL_FUNCTIONS("") }
namespace fast { MSL_REAL_FUNCTIONS("fast_") }
inline namespace __plain { MSL_REAL_FUNCTIONS("") }
MSL_F3("", fma)
INL float mad(float a, float b, float c) { return fma(a, b, c); }
INL float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
INL float copysign(float x, float y) { return __builtin_copysignf(x, y); }
INL float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }
INL float saturate(float x) { return clamp(x, 0.0f, 1.0f); }
INL float mix(float a, float b, float t) { return a + (b - a) * t; }
INL float step(float edge, float x) { return x < edge ? 0.0f : 1.0f; }
INL bool isnan(float x) { return x != x; }
INL bool isnan(half x) { return x != x; }
INL bool isinf(float x) { return __builtin_isinf(x); }
INL bool isinf(half x) { return __builtin_isinf((float)x); }
INL bool isfinite(float x) { return __builtin_isfinite(x); }
INL bool isfinite(half x) { return __builtin_isfinite((float)x); }
INL bool signbit(float x) { return __builtin_signbitf(x); }
#define MSL_M(T) \
  INL T dot(T##2 a, T##2 b) { return a.x * b.x + a.y * b.y; } \
  INL T dot(T##3 a, T##3 b) { return a.x * b.x + a.y * b.y + a.z * b.z; } \
  INL T dot(T##4 a, T##4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; } \
  INL T length_squared(T##2 a) { return dot(a, a); } \
  INL T length_squared(T##4 a) { return dot(a, a); }
MSL_EACH_REAL(MSL_M)
#undef MSL_M
INL float length(float2 a) { return sqrt(dot(a, a)); }
INL float length(float4 a) { return sqrt(dot(a, a)); }
#define MSL_M(T) INL T select(T a, T b, bool c) { return c ? b : a; }
MSL_EACH_SCALAR(MSL_M) MSL_M(bool)
#undef MSL_M

// integers
#define MSL_M(T) \
  INL T max(T a, T b) { return a > b ? a : b; } MSL_V2(T, max) \
  INL T min(T a, T b) { return a < b ? a : b; } MSL_V2(T, min) \
  INL T clamp(T x, T a, T b) { return min(max(x, a), b); } MSL_V3(T, clamp) \
  INL T max3(T a, T b, T c) { return max(max(a, b), c); } \
  INL T min3(T a, T b, T c) { return min(min(a, b), c); }
MSL_EACH_INT(MSL_M)
#undef MSL_M
#define MSL_M(T) INL T abs(T x) { return x < 0 ? -x : x; }
MSL_M(char) MSL_M(short) MSL_M(int) MSL_M(long)
#undef MSL_M
#define MSL_M(T) INL T abs(T x) { return x; }
MSL_M(uchar) MSL_M(ushort) MSL_M(uint) MSL_M(ulong)
#undef MSL_M
INL uint popcount(uint x) { return __builtin_popcount(x); }
INL int popcount(int x) { return __builtin_popcount(x); }
INL ulong popcount(ulong x) { return __builtin_popcountl(x); }
INL uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
INL int clz(int x) { return x ? __builtin_clz(x) : 32; }
INL uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
INL int ctz(int x) { return x ? __builtin_ctz(x) : 32; }
INL uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
INL int mulhi(int a, int b) { return (int)(((long)a * b) >> 32); }
INL uint rotate(uint x, uint n) { n &= 31; return n ? (x << n) | (x >> (32 - n)) : x; }
INL uint extract_bits(uint x, uint offset, uint n) {
  return n ? (x >> offset) & (0xffffffffu >> (32 - n)) : 0;
}
INL uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
INL bool any(bool x) { return x; }
INL bool all(bool x) { return x; }
}  // namespace metal
