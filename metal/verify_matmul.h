// y[m, n] = sum over k of x[m, k] w[n, k], then + bias[n]; w dense, or scale q + offset by groups.
//
// k falls into units (64, or a group). SIMD group s of the eight of a threadgroup adds units s, s +
// 8, s + 16, ... in this order, a block of 32 after the other, and the eight sums add in ascending
// order. Quantised, the bare integers q are multiplied; at the end of a group
//   sum = fma(scale, products of the group, sum),  sum = fma(offset, sum of the group's x, sum).
// The order depends on K and the group alone; rows of x stand in columns of the matrix unit, which
// do not touch each other, and one row takes the instructions of eight.
#pragma once

#define DFLASH_SLICES 8
#define DFLASH_UNROLL _Pragma("unroll")

/// What a threadgroup works on: outputs n0 .. n0 + 16 tiles - 1 of rows m0 .. m0 + 8 column_tiles
/// - 1.
struct MatmulPlace {
  int rows;     // M
  int outputs;  // N
  int depth;    // K
  int m0;
  int n0;
  int slice;  // of the SIMD group
  int lane;
  int pair;    // with indices: a row of x and an expert; else 0
  int expert;  // 0 without indices
  bool poisoned;
};

/// `block` counts blocks of 16 tiles outputs, and pairs above them.
METAL_FUNC MatmulPlace matmul_place(
    const device int* indices,  // [pairs]
    bool gathers,
    int experts,
    int rows,
    int outputs,
    int depth,
    int tile_rows,
    int tile_outputs,
    int block,
    int row_block,
    int slice,
    int lane) {
  const int blocks = (outputs + tile_outputs - 1) / tile_outputs;
  MatmulPlace at;
  at.rows = gathers ? 1 : rows;
  at.outputs = outputs;
  at.depth = depth;
  at.m0 = row_block * tile_rows;
  at.n0 = block % blocks * tile_outputs;
  at.slice = slice;
  at.lane = lane;
  at.pair = block / blocks;
  at.expert = gathers ? indices[at.pair] : 0;
  at.poisoned = at.expert < 0 || at.expert >= experts;
  at.expert = at.poisoned ? 0 : at.expert;
  return at;
}

template <typename T, typename W, int tiles, int column_tiles, bool whole>
METAL_FUNC void add_dense(
    const device T* x,       // [M, K]
    const device W* weight,  // [N, K]
    MatmulPlace at,
    thread Sums (&total)[tiles][column_tiles]) {
  const int row = matrix_row(at.lane), quad = matrix_quad(at.lane);
  for (int start = at.slice * 64; start < at.depth; start += DFLASH_SLICES * 64) {
    DFLASH_UNROLL
    for (int b = 0; b < 2; ++b) {
      const int k = start + 32 * b;
      if (k >= at.depth) {  // nothing of x may be read there, not even to be multiplied by zero
        continue;
      }
      Left<T> left[tiles];
      DFLASH_UNROLL
      for (int tile = 0; tile < tiles; ++tile) {
        DFLASH_UNROLL
        for (int h = 0; h < 2; ++h) {
          const int n = at.n0 + 16 * tile + 8 * h + row;
          const int left_over = n < at.outputs ? at.depth - k - 8 * quad : 0;
          const device W* p = weight + size_t(n) * at.depth + k + 8 * quad;
          set_row(left[tile], h, stream_eight<T, W, whole>(p, left_over));
        }
      }
      DFLASH_UNROLL
      for (int c = 0; c < column_tiles; ++c) {
        const int m = at.m0 + 8 * c;
        const Right<T> right = load_right<T, whole>(
            x + size_t(m) * at.depth + k, at.depth, at.rows - m, 8, at.depth - k, at.lane);
        DFLASH_UNROLL
        for (int tile = 0; tile < tiles; ++tile) {
          multiply_add(total[tile][c], left[tile], right);
        }
      }
    }
  }
}

template <typename T, typename S, int bits, int group, int tiles, int column_tiles, bool whole>
METAL_FUNC void add_quantised(
    const device T* x,          // [M, K]
    const device uint* weight,  // [N, K bits / 32]
    const device S* scales,     // [N, K / group]
    const device S* offsets,    // [N, K / group]
    MatmulPlace at,
    thread Sums (&total)[tiles][column_tiles]) {
  constexpr int blocks = group / 32;
  constexpr int words = group * bits / 128;  // of a row, for each quad
  const int row = matrix_row(at.lane), quad = matrix_quad(at.lane);
  const int groups = at.depth / group;
  const Left<T> one = ones<T>();
  for (int g = at.slice; g < groups; g += DFLASH_SLICES) {
    Left<T> left[tiles][blocks];
    float scale[tiles][2], offset[tiles][2];
    DFLASH_UNROLL
    for (int tile = 0; tile < tiles; ++tile) {
      DFLASH_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int own = at.n0 + 16 * tile + 8 * h + row;
        const int n = own < at.outputs ? own : at.outputs - 1;
        const size_t in_groups = size_t(n) * groups + g;
        scale[tile][h] = float(scales[in_groups]);
        offset[tile][h] = float(offsets[in_groups]);
        uint word[words];
        load_words<words>(weight + (in_groups * 4 + quad) * words, word);
        DFLASH_UNROLL
        for (int b = 0; b < blocks; ++b) {
          set_row(
              left[tile][b],
              h,
              bits == 4 ? nibbles8<T>(word[b * bits / 4])
                        : bytes8<T>(word[b * bits / 4], word[b * bits / 4 + bits / 8]));
        }
      }
    }
    DFLASH_UNROLL
    for (int c = 0; c < column_tiles; ++c) {
      const int m = at.m0 + 8 * c;
      Sums sums = no_sums();
      Sums part[tiles];
      DFLASH_UNROLL
      for (int tile = 0; tile < tiles; ++tile) {
        part[tile] = no_sums();
      }
      DFLASH_UNROLL
      for (int b = 0; b < blocks; ++b) {
        const Right<T> right = load_right<T, whole>(
            x + size_t(m) * at.depth + g * group + 8 * b,
            at.depth,
            at.rows - m,
            group / 4,
            group,
            at.lane);
        multiply_add(sums, one, right);
        DFLASH_UNROLL
        for (int tile = 0; tile < tiles; ++tile) {
          multiply_add(part[tile], left[tile][b], right);
        }
      }
      DFLASH_UNROLL
      for (int tile = 0; tile < tiles; ++tile) {
        DFLASH_UNROLL
        for (int i = 0; i < 4; ++i) {
          float sum = fma_rn(scale[tile][i / 2], part[tile].x[i], total[tile][c].x[i]);
          total[tile][c].x[i] = fma_rn(offset[tile][i / 2], sums.x[i], sum);
        }
      }
    }
  }
}

/// Where output n of column m stands in its row of shared memory: the four quads of a SIMD group
/// write to different banks.
METAL_FUNC int swizzled(int n, int m, int outputs) {
  return (n ^ (((m >> 1) & 3) << 3)) & (outputs - 1);
}

/// The eight slices' sums, in ascending order, to memory.
template <typename T, int tiles, int column_tiles>
METAL_FUNC void finish_matmul(
    const device T* bias,  // [N]
    device T* out,         // [M, N]
    bool has_bias,
    MatmulPlace at,
    thread Sums (&total)[tiles][column_tiles],
    threadgroup float* shared) {  // [slices, 8 column_tiles, 16 tiles]
  constexpr int outputs = 16 * tiles, columns = 8 * column_tiles;
  const int row = matrix_row(at.lane), quad = matrix_quad(at.lane);
  DFLASH_UNROLL
  for (int tile = 0; tile < tiles; ++tile) {
    DFLASH_UNROLL
    for (int c = 0; c < column_tiles; ++c) {
      DFLASH_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int n = 16 * tile + 8 * (i / 2) + row;
        const int m = 8 * c + 2 * quad + i % 2;
        shared[(at.slice * columns + m) * outputs + swizzled(n, m, outputs)] = total[tile][c].x[i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = at.slice * 32 + at.lane; i < outputs * columns; i += 32 * DFLASH_SLICES) {
    const int n = i % outputs, m = i / outputs;
    if (at.n0 + n >= at.outputs || at.m0 + m >= at.rows) {
      continue;
    }
    const int place = m * outputs + swizzled(n, m, outputs);
    float sum = shared[place];
    for (int s = 1; s < DFLASH_SLICES; ++s) {
      sum = add_rn(sum, shared[s * columns * outputs + place]);
    }
    if (has_bias) {
      sum = add_rn(sum, float(bias[at.n0 + n]));
    }
    out[size_t(at.m0 + m) * at.outputs + at.n0 + n] = T(at.poisoned ? poison() : sum);
  }
}

template <typename T, typename W, int tiles, int column_tiles, bool whole>
METAL_FUNC void verify_matmul_dense(
    const device T* x,       // [M, K], or a row for every `repeat` pairs
    const device W* weight,  // [N, K], or [experts, N, K]
    const device T* bias,    // [N], or [experts, N]
    device T* out,           // [M, N], or [pairs, N]
    bool has_bias,
    int repeat,
    MatmulPlace at,
    threadgroup float* shared) {
  Sums total[tiles][column_tiles];
  DFLASH_UNROLL
  for (int tile = 0; tile < tiles; ++tile) {
    DFLASH_UNROLL
    for (int c = 0; c < column_tiles; ++c) {
      total[tile][c] = no_sums();
    }
  }
  const size_t expert_outputs = size_t(at.expert) * at.outputs;
  add_dense<T, W, tiles, column_tiles, whole>(
      x + size_t(at.pair / repeat) * at.depth, weight + expert_outputs * at.depth, at, total);
  finish_matmul<T, tiles, column_tiles>(
      bias + expert_outputs, out + size_t(at.pair) * at.outputs, has_bias, at, total, shared);
}

template <typename T, typename S, int bits, int group, int tiles, int column_tiles, bool whole>
METAL_FUNC void verify_matmul_affine(
    const device T* x,
    const device uint* weight,  // [N, K bits / 32], or [experts, N, K bits / 32]
    const device S* scales,     // [N, K / group], or [experts, N, K / group]
    const device S* offsets,    // like scales
    const device T* bias,
    device T* out,
    bool has_bias,
    int repeat,
    MatmulPlace at,
    threadgroup float* shared) {
  Sums total[tiles][column_tiles];
  DFLASH_UNROLL
  for (int tile = 0; tile < tiles; ++tile) {
    DFLASH_UNROLL
    for (int c = 0; c < column_tiles; ++c) {
      total[tile][c] = no_sums();
    }
  }
  const size_t expert_outputs = size_t(at.expert) * at.outputs;
  const size_t expert_groups = expert_outputs * (at.depth / group);
  add_quantised<T, S, bits, group, tiles, column_tiles, whole>(
      x + size_t(at.pair / repeat) * at.depth,
      weight + expert_groups * (group * bits / 32),
      scales + expert_groups,
      offsets + expert_groups,
      at,
      total);
  finish_matmul<T, tiles, column_tiles>(
      bias + expert_outputs, out + size_t(at.pair) * at.outputs, has_bias, at, total, shared);
}
