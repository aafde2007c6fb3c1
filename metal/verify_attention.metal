#include <metal_stdlib>
using namespace metal;

#include "arithmetic.h"
#include "matrix.h"
#include "verify_attention.h"

constant bool has_mask [[function_constant(0)]];
constant bool causal [[function_constant(1)]];
constant bool has_sinks [[function_constant(2)]];

METAL_FUNC Block
attention_block(const device int* lengths, int b, int inputs, int group, int window) {
  Block block;
  block.length = lengths[b];
  block.end = block.length + inputs;
  block.inputs = inputs;
  block.columns = group * inputs;
  block.window = window;
  block.causal = causal;
  block.has_mask = has_mask;
  return block;
}

// threadgroups (blocks of columns, chunks, B * Hkv), threads (32, SIMD groups): each SIMD group has
// 8 tiles columns
template <typename T, int D, int Dv, int tiles, int simdgroups, bool staged>
[[kernel]] void attend_chunk_kernel(
    const device T* q [[buffer(0)]],          // [B, Hq, T, D]
    const device T* k [[buffer(1)]],          // [B, Hkv, capacity, D]
    const device T* v [[buffer(2)]],          // [B, Hkv, capacity, Dv]
    const device int* lengths [[buffer(3)]],  // [B]
    const device bool* mask [[buffer(4)]],    // [T, T]
    device float* partial [[buffer(5)]],      // [B, Hq, T, chunks, Dv]
    device float* statistics [[buffer(6)]],   // [B, Hq, T, chunks, 2]
    constant int& inputs [[buffer(7)]],       // T
    constant int& key_heads [[buffer(8)]],    // Hkv
    constant int& group [[buffer(9)]],        // Hq / Hkv
    constant int& capacity [[buffer(10)]],
    constant int& chunks [[buffer(11)]],
    constant int& window [[buffer(12)]],
    constant float& scale [[buffer(13)]],
    uint3 at [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int of_keys = key_stride(D), of_values = value_stride(Dv);
  threadgroup T weights[simdgroups * 8 * tiles * DFLASH_WEIGHTS_STRIDE];
  threadgroup T shared[staged ? 32 * (of_keys > of_values ? of_keys : of_values) : 1];
  const Block block = attention_block(lengths, int(at.z) / key_heads, inputs, group, window);
  if (!in_cache(block, capacity)) {
    return;
  }
  const size_t columns = size_t(at.z) * block.columns;
  attend_chunk<T, D, Dv, tiles, simdgroups, staged, false>(
      q + columns * D,
      k + size_t(at.z) * capacity * D,
      v + size_t(at.z) * capacity * Dv,
      mask,
      partial + columns * chunks * Dv,
      statistics + columns * chunks * 2,
      block,
      scale,
      chunks,
      int(at.y),
      int(at.x * simdgroups + simdgroup) * 8 * tiles,
      int(simdgroup),
      int(lane),
      weights + simdgroup * (8 * tiles * DFLASH_WEIGHTS_STRIDE),
      shared);
}

// threadgroups (B * Hq * T, Dv / 32), threads (32, 16)
template <typename T, int Dv>
[[kernel]] void combine_chunks_kernel(
    const device float* partial [[buffer(0)]],     // [B, Hq, T, chunks, Dv]
    const device float* statistics [[buffer(1)]],  // [B, Hq, T, chunks, 2]
    const device int* lengths [[buffer(2)]],       // [B]
    const device float* sinks [[buffer(3)]],       // [Hq]
    device T* out [[buffer(4)]],                   // [B, Hq, T, Dv]
    constant int& inputs [[buffer(5)]],            // T
    constant int& heads [[buffer(6)]],             // Hq
    constant int& capacity [[buffer(7)]],
    constant int& chunks [[buffer(8)]],
    constant int& window [[buffer(9)]],
    uint3 at [[threadgroup_position_in_grid]],
    uint stripe [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float shared[DFLASH_STRIPES * 33];
  const int column = int(at.x);
  const int head = column / inputs;
  const Block block = attention_block(lengths, head / heads, inputs, 1, window);
  combine_chunks<T, Dv>(
      partial,
      statistics,
      sinks,
      out,
      block,
      has_sinks,
      in_cache(block, capacity),
      head % heads,
      chunks,
      column,
      int(at.y) * 32,
      int(stripe),
      int(lane),
      shared);
}

#ifndef DFLASH_JIT  // the host instantiates what it needs
#define ATTEND(T, D, Dv, tiles, simdgroups, staged)                                                \
  template [[host_name(                                                                            \
      "attend_chunk_" #T "_" #D "_" #Dv "_" #tiles "_" #simdgroups                                 \
      "_" #staged)]] [[kernel]] decltype(attend_chunk_kernel<T, D, Dv, tiles, simdgroups, staged>) \
      attend_chunk_kernel<T, D, Dv, tiles, simdgroups, staged>;
#define COMBINE(T, Dv)     \
  template [[host_name(    \
      "combine_chunks_" #T \
      "_" #Dv)]] [[kernel]] decltype(combine_chunks_kernel<T, Dv>) combine_chunks_kernel<T, Dv>;
#define DIMS(MACRO, T, ...)       \
  MACRO(T, 32, 32, __VA_ARGS__)   \
  MACRO(T, 64, 64, __VA_ARGS__)   \
  MACRO(T, 96, 96, __VA_ARGS__)   \
  MACRO(T, 128, 128, __VA_ARGS__) \
  MACRO(T, 192, 128, __VA_ARGS__) \
  MACRO(T, 256, 256, __VA_ARGS__)
#define ATTENTION(T)           \
  DIMS(ATTEND, T, 1, 1, false) \
  COMBINE(T, 32)               \
  COMBINE(T, 64)               \
  COMBINE(T, 96)               \
  COMBINE(T, 128)              \
  COMBINE(T, 256)
ATTENTION(float)
ATTENTION(half)
ATTENTION(bfloat)
DIMS(ATTEND, half, 2, 1, true)
DIMS(ATTEND, half, 2, 2, true)
DIMS(ATTEND, half, 2, 4, true)
DIMS(ATTEND, bfloat, 2, 1, true)
DIMS(ATTEND, bfloat, 2, 2, true)
DIMS(ATTEND, bfloat, 2, 4, true)
#endif
