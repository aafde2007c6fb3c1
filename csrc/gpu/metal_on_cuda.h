// What the bodies in metal/ need of Metal, in CUDA. Address spaces are empty words, a SIMD group is
// a warp, and the arithmetic is spelled so that the compiler contracts nothing.
#pragma once

#define METAL_FUNC __forceinline__  // on the device, as everything is: `device` is a word of Metal
#define device
#define thread
#define threadgroup
#define constant

typedef unsigned short ushort;
typedef unsigned int uint;

// CUDA's headers of these two types take NVRTC seconds to read.
struct half {
  ushort bits;
  half() = default;
  METAL_FUNC explicit half(float x) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  }
  METAL_FUNC operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};

struct bfloat {
  ushort bits;
  bfloat() = default;
  METAL_FUNC explicit bfloat(float x) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  }
  METAL_FUNC operator float() const {
    return __uint_as_float(uint(bits) << 16);
  }
};

template <bool b>
struct Constant {
  static constexpr bool value = b;
};

template <typename A, typename B>
constexpr bool same_type = false;
template <typename A>
constexpr bool same_type<A, A> = true;

METAL_FUNC float mul_rn(float a, float b) {
  return __fmul_rn(a, b);
}

METAL_FUNC float add_rn(float a, float b) {
  return __fadd_rn(a, b);
}

METAL_FUNC float fma_rn(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}

METAL_FUNC float max_rn(float a, float b) {
  return fmaxf(a, b);
}

METAL_FUNC float exp_rn(float x) {
  return ::expf(x);
}

METAL_FUNC float exp2_rn(float x) {
  return ::exp2f(x);
}

METAL_FUNC float log_rn(float x) {
  return ::logf(x);
}

METAL_FUNC float poison() {
  return __int_as_float(0x7fc00000);
}

METAL_FUNC float simd_shuffle_xor(float x, ushort mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}

#define float4(x, y, z, w) make_float4(x, y, z, w)
