#include <metal_stdlib>
using namespace metal;

#include "arithmetic.h"
#include "matrix.h"
#include "verify_matmul.h"

constant bool has_bias [[function_constant(0)]];
constant bool gathers [[function_constant(1)]];

// threadgroups (blocks of 16 tiles outputs times pairs, blocks of 8 column_tiles rows),
// threads (32, 8)
template <typename T, typename W, int tiles, int column_tiles>
[[kernel]] void verify_matmul_dense_kernel(
    const device T* x [[buffer(0)]],
    const device W* weight [[buffer(1)]],
    const device T* bias [[buffer(2)]],
    const device int* indices [[buffer(3)]],
    device T* out [[buffer(4)]],
    constant int& rows [[buffer(5)]],
    constant int& outputs [[buffer(6)]],
    constant int& depth [[buffer(7)]],
    constant int& experts [[buffer(8)]],
    constant int& repeat [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint slice [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float shared[DFLASH_SLICES * 16 * tiles * 8 * column_tiles];
  const MatmulPlace at = matmul_place(
      indices,
      gathers,
      experts,
      rows,
      outputs,
      depth,
      8 * column_tiles,
      16 * tiles,
      int(group.x),
      int(group.y),
      int(slice),
      int(lane));
  verify_matmul_dense<T, W, tiles, column_tiles, false>(
      x, weight, bias, out, has_bias, repeat, at, shared);
}

template <typename T, typename S, int bits, int quantised_group, int tiles, int column_tiles>
[[kernel]] void verify_matmul_affine_kernel(
    const device T* x [[buffer(0)]],
    const device uint* weight [[buffer(1)]],
    const device T* bias [[buffer(2)]],
    const device int* indices [[buffer(3)]],
    device T* out [[buffer(4)]],
    constant int& rows [[buffer(5)]],
    constant int& outputs [[buffer(6)]],
    constant int& depth [[buffer(7)]],
    constant int& experts [[buffer(8)]],
    constant int& repeat [[buffer(9)]],
    const device S* scales [[buffer(10)]],
    const device S* offsets [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint slice [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float shared[DFLASH_SLICES * 16 * tiles * 8 * column_tiles];
  const MatmulPlace at = matmul_place(
      indices,
      gathers,
      experts,
      rows,
      outputs,
      depth,
      8 * column_tiles,
      16 * tiles,
      int(group.x),
      int(group.y),
      int(slice),
      int(lane));
  verify_matmul_affine<T, S, bits, quantised_group, tiles, column_tiles, false>(
      x, weight, scales, offsets, bias, out, has_bias, repeat, at, shared);
}

#ifndef DFLASH_JIT  // the host instantiates what it needs
#define DENSE(T, W, tiles, columns)                                                           \
  template [[host_name("verify_matmul_dense_" #T "_" #W "_" #tiles "_" #columns)]] [[kernel]] \
  decltype(verify_matmul_dense_kernel<T, W, tiles, columns>)                                  \
      verify_matmul_dense_kernel<T, W, tiles, columns>;
#define AFFINE(T, S, bits, group, tiles, columns)                                                  \
  template [[host_name(                                                                            \
      "verify_matmul_affine_" #T "_" #S "_" #bits "_" #group "_" #tiles "_" #columns)]] [[kernel]] \
  decltype(verify_matmul_affine_kernel<T, S, bits, group, tiles, columns>)                         \
      verify_matmul_affine_kernel<T, S, bits, group, tiles, columns>;
#define WIDTHS(MACRO, ...) \
  MACRO(__VA_ARGS__, 1, 1) \
  MACRO(__VA_ARGS__, 1, 2) \
  MACRO(__VA_ARGS__, 1, 4) \
  MACRO(__VA_ARGS__, 2, 1) \
  MACRO(__VA_ARGS__, 2, 2) \
  MACRO(__VA_ARGS__, 2, 4)
#define GROUPS(T, S, bits)       \
  WIDTHS(AFFINE, T, S, bits, 32) \
  WIDTHS(AFFINE, T, S, bits, 64) \
  WIDTHS(AFFINE, T, S, bits, 128)
WIDTHS(DENSE, float, float)
WIDTHS(DENSE, float, half)
WIDTHS(DENSE, float, bfloat)
WIDTHS(DENSE, half, half)
WIDTHS(DENSE, bfloat, bfloat)
GROUPS(float, float, 4)
GROUPS(float, float, 8)
GROUPS(float, half, 4)
GROUPS(float, half, 8)
GROUPS(float, bfloat, 4)
GROUPS(float, bfloat, 8)
GROUPS(half, half, 4)
GROUPS(half, half, 8)
GROUPS(bfloat, bfloat, 4)
GROUPS(bfloat, bfloat, 8)
#endif
