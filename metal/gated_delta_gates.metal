#include <metal_stdlib>
using namespace metal;

#include "arithmetic.h"
#include "gated_delta_gates.h"

// threads (B * T * Hv)
template <typename T>
[[kernel]] void gated_delta_gates_kernel(
    const device T* a [[buffer(0)]],
    const device T* b [[buffer(1)]],
    const device float* A_log [[buffer(2)]],
    const device float* dt_bias [[buffer(3)]],
    device float* g [[buffer(4)]],
    device float* beta [[buffer(5)]],
    constant int& value_heads [[buffer(6)]],
    uint at [[thread_position_in_grid]]) {
  gated_delta_gates<T>(a, b, A_log, dt_bias, g, beta, value_heads, int(at));
}

#ifndef DFLASH_JIT  // the host instantiates what it needs
#define GATES(type)                                  \
  template [[host_name("gated_delta_gates_" #type)]] \
  [[kernel]] decltype(gated_delta_gates_kernel<type>) gated_delta_gates_kernel<type>;
GATES(float)
GATES(half)
GATES(bfloat)
#endif
