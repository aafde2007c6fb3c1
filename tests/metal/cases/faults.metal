// Broken kernels, each with one fault that the emulator has to show.
#include <metal_stdlib>
using namespace metal;

kernel void missing_barrier(const device float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]],
                            uint l [[thread_position_in_threadgroup]], uint n [[threads_per_threadgroup]]) {
  threadgroup float s[64];
  s[l] = x[i];
  y[i] = s[n - 1 - l];
}

kernel void divergent_barrier(const device float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]],
                              uint l [[thread_position_in_threadgroup]]) {
  if (l < 10) threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = simd_sum(x[i]);
}

kernel void divergent_simd(const device float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]],
                           uint l [[thread_position_in_threadgroup]]) {
  float a = x[i];
  if (l & 1) a = simd_sum(a);
  y[i] = simd_sum(a);
}

kernel void out_of_bounds(const device float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  y[i + 1] = x[i];
}

kernel void read_out_of_bounds(const device float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  y[i] = x[i + 1] > 0.0f ? 1.0f : 2.0f;
}

kernel void write_to_no_buffer(const device float* x [[buffer(0)]], device float* y [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  y[i] = x[i];
}

kernel void uninitialised(const device float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]],
                          uint l [[thread_position_in_threadgroup]]) {
  threadgroup float s[65];
  s[l] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = s[l + 1];
}

kernel void shuffle_past_edge(const device float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]],
                              ushort l [[thread_index_in_simdgroup]]) {
  y[i] = simd_shuffle(x[i], l + 1);
}

kernel void write_race(const device float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  y[i / 2] = x[i];
}

kernel void sum_of_a_simdgroup(const device float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  y[i] = simd_sum(x[i]);
}
