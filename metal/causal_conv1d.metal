#include <metal_stdlib>
using namespace metal;

#include "arithmetic.h"
#include "causal_conv1d.h"

// threads (C, T, B)
template <typename T>
[[kernel]] void causal_conv1d_kernel(
    const device T* x [[buffer(0)]],
    const device T* weight [[buffer(1)]],
    const device T* window [[buffer(2)]],
    device T* out [[buffer(3)]],
    constant int& inputs [[buffer(4)]],
    constant int& channels [[buffer(5)]],
    constant int& taps [[buffer(6)]],
    uint3 at [[thread_position_in_grid]]) {
  causal_conv1d<T>(x, weight, window, out, inputs, channels, taps, int(at.x), int(at.y), int(at.z));
}

// threads (C, K - 1, B)
template <typename T>
[[kernel]] void conv_window_kernel(
    const device T* window [[buffer(0)]],
    const device T* x [[buffer(1)]],
    const device int* keep [[buffer(2)]],
    device T* out [[buffer(3)]],
    constant int& inputs [[buffer(4)]],
    constant int& channels [[buffer(5)]],
    constant int& taps [[buffer(6)]],
    uint3 at [[thread_position_in_grid]]) {
  conv_window<T>(window, x, keep, out, inputs, channels, taps, int(at.x), int(at.y), int(at.z));
}

#ifndef DFLASH_JIT  // the host instantiates what it needs
#define CAUSAL_CONV1D(type)                                                                      \
  template [[host_name("causal_conv1d_" #type)]] [[kernel]] decltype(causal_conv1d_kernel<type>) \
      causal_conv1d_kernel<type>;                                                                \
  template [[host_name("conv_window_" #type)]] [[kernel]] decltype(conv_window_kernel<type>)     \
      conv_window_kernel<type>;
CAUSAL_CONV1D(float)
CAUSAL_CONV1D(half)
CAUSAL_CONV1D(bfloat)
#endif
