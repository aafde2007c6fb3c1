#include <metal_stdlib>
using namespace metal;

#include "arithmetic.h"
#include "kv_write.h"

// threads (D, T, B * H)
template <typename T>
[[kernel]] void kv_write_kernel(
    const device T* rows [[buffer(0)]],
    const device int* lengths [[buffer(1)]],
    device T* cache [[buffer(2)]],
    constant int& heads [[buffer(3)]],
    constant int& capacity [[buffer(4)]],
    constant int& inputs [[buffer(5)]],
    constant int& dim [[buffer(6)]],
    uint3 at [[thread_position_in_grid]]) {
  kv_write<T>(rows, lengths, cache, heads, capacity, inputs, dim, int(at.x), int(at.y), int(at.z));
}

// threads (D, rows): a cache that something else holds is copied before it is written
template <typename T>
[[kernel]] void kv_copy_kernel(
    const device T* from [[buffer(0)]],
    device T* to [[buffer(1)]],
    uint2 at [[thread_position_in_grid]],
    uint2 size [[threads_per_grid]]) {
  const size_t i = size_t(at.y) * size.x + at.x;
  to[i] = from[i];
}

#ifndef DFLASH_JIT  // the host instantiates what it needs
#define KV_WRITE(type)                                                                       \
  template [[host_name(                                                                      \
      "kv_write_" #type)]] [[kernel]] decltype(kv_write_kernel<type>) kv_write_kernel<type>; \
  template [[host_name(                                                                      \
      "kv_copy_" #type)]] [[kernel]] decltype(kv_copy_kernel<type>) kv_copy_kernel<type>;
KV_WRITE(float)
KV_WRITE(half)
KV_WRITE(bfloat)
#endif
