#include <metal_stdlib>
using namespace metal;

#include "arithmetic.h"
#include "gated_delta.h"

constant bool has_mask [[function_constant(0)]];
constant bool has_tape [[function_constant(1)]];
constant bool has_valid [[function_constant(2)]];
constant bool writes_delta [[function_constant(3)]];
constant bool commits [[function_constant(4)]];

// threadgroups (1, ceil(Dv / rows of a threadgroup), B * Hv), threads (32, SIMD groups)
template <typename T, int Dk, bool vector_decay>
[[kernel]] void gated_delta_kernel(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device float* g [[buffer(3)]],
    const device float* beta [[buffer(4)]],
    const device float* state [[buffer(5)]],
    const device bool* mask [[buffer(6)]],
    const device float* tape_g [[buffer(7)]],
    const device T* tape_k [[buffer(8)]],
    const device float* tape_delta [[buffer(9)]],
    const device bool* tape_valid [[buffer(10)]],
    const device int* keep [[buffer(11)]],
    device T* y [[buffer(12)]],
    device float* delta [[buffer(13)]],
    device float* state_out [[buffer(14)]],
    constant int& inputs [[buffer(15)]],
    constant int& tape_inputs [[buffer(16)]],
    constant int& key_heads [[buffer(17)]],
    constant int& value_heads [[buffer(18)]],
    constant int& value_dim [[buffer(19)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  gated_delta<T, Dk, vector_decay>(
      q,
      k,
      v,
      g,
      beta,
      state,
      mask,
      tape_g,
      tape_k,
      tape_delta,
      tape_valid,
      keep,
      y,
      delta,
      state_out,
      inputs,
      tape_inputs,
      key_heads,
      value_heads,
      value_dim,
      has_mask,
      has_tape,
      has_valid,
      writes_delta,
      commits,
      int(group.z),
      int(group.y * simdgroups + simdgroup),
      int(lane));
}

#ifndef DFLASH_JIT  // the host instantiates what it needs
#define GATED_DELTA(type, Dk)                                                        \
  template [[host_name("gated_delta_" #type "_" #Dk "_scalar")]] [[kernel]]          \
  decltype(gated_delta_kernel<type, Dk, false>) gated_delta_kernel<type, Dk, false>; \
  template [[host_name("gated_delta_" #type "_" #Dk "_vector")]] [[kernel]]          \
  decltype(gated_delta_kernel<type, Dk, true>) gated_delta_kernel<type, Dk, true>;
#define GATED_DELTA_DIMS(type) \
  GATED_DELTA(type, 32)        \
  GATED_DELTA(type, 64)        \
  GATED_DELTA(type, 96)        \
  GATED_DELTA(type, 128)       \
  GATED_DELTA(type, 160)       \
  GATED_DELTA(type, 192)       \
  GATED_DELTA(type, 224)       \
  GATED_DELTA(type, 256)
GATED_DELTA_DIMS(float)
GATED_DELTA_DIMS(half)
GATED_DELTA_DIMS(bfloat)
#endif
