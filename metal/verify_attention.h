// Attention of a block of T inputs over a cache of any length, in two passes.
//
// attend_chunk: chunk c covers the absolute positions 256 c .. 256 c + 255, the block's own keys
// included; a SIMD group takes them 32 after 32 with running statistics. combine_chunks: stripe s
// of sixteen adds chunks s, s + 16, ... in ascending order, and the stripes add in ascending order.
// So a row's order is a function of positions alone; a key that a row does not see adds an exact
// zero, and groups of keys that none sees are skipped.
//
// The T rows of the G heads that share a key head are G T columns of the matrix unit, column g T +
// t.
#pragma once

#define DFLASH_CHUNK 256
#define DFLASH_STRIPES 16
#define DFLASH_WEIGHTS_STRIDE 40  // 32 keys, and 8 so that columns start in other banks
#define DFLASH_UNROLL _Pragma("unroll")

/// The part of a call that concerns one batch row and key head.
struct Block {
  int length;   // committed keys
  int end;      // length + inputs
  int inputs;   // T
  int columns;  // G T
  int window;   // 0: none
  bool causal;
  bool has_mask;
};

/// Whether the cache has room for the block. Of a length that is out of range, `end` means nothing.
METAL_FUNC bool in_cache(Block block, int capacity) {
  return block.length >= 0 && block.length <= capacity - block.inputs;
}

/// Whether input t sees the key at a position.
METAL_FUNC bool sees(Block block, const device bool* mask, int t, int key) {
  const int position = block.length + t;
  if (key >= block.end || (block.window > 0 && position - key >= block.window)) {
    return false;
  }
  if (key < block.length) {
    return true;
  }
  return block.has_mask ? mask[t * block.inputs + key - block.length]
                        : !block.causal || key <= position;
}

/// The first position that some input sees.
METAL_FUNC int first_seen(Block block) {
  const int first = block.window > 0 ? block.length - block.window + 1 : 0;
  return first > 0 ? first : 0;
}

METAL_FUNC float minus_infinity() {
  return as_type<float>(0xff800000u);
}

METAL_FUNC float max_of_rows(float x) {
  const ushort bits[3] = {DFLASH_ROW_BITS};
  for (int i = 0; i < 3; ++i) {
    x = max_rn(x, simd_shuffle_xor(x, bits[i]));
  }
  return x;
}

METAL_FUNC float sum_of_rows(float x) {
  const ushort bits[3] = {DFLASH_ROW_BITS};
  for (int i = 0; i < 3; ++i) {
    x = add_rn(x, simd_shuffle_xor(x, bits[i]));
  }
  return x;
}

METAL_FUNC uint union_of_quads(uint x) {
  const ushort bits[2] = {DFLASH_QUAD_BITS};
  for (int i = 0; i < 2; ++i) {
    x |= as_type<uint>(simd_shuffle_xor(as_type<float>(x), bits[i]));
  }
  return x;
}

METAL_FUNC uint union_of_rows(uint x) {
  const ushort bits[3] = {DFLASH_ROW_BITS};
  for (int i = 0; i < 3; ++i) {
    x |= as_type<uint>(simd_shuffle_xor(as_type<float>(x), bits[i]));
  }
  return x;
}

/// 2^(m - base), 0 for m = -inf; base is finite. Scores count in powers of two.
METAL_FUNC float weight_of(float m, float base) {
  return exp2_rn(add_rn(m, -base));
}

/// x, or the one NaN. An infinite value that a row sees leaves an infinity or a NaN, depending on
/// whether some other row does not see it.
METAL_FUNC float finite_or_poison(float x) {
  return (as_type<uint>(x) & 0x7f800000u) == 0x7f800000u ? poison() : x;
}

#define DFLASH_LOG2_E 1.44269504f

/// Of 32 staged keys or values of D elements: rows apart so that lanes read from different banks.
constexpr int key_stride(int D) {
  return D + (D % 64 == 0 ? 32 : 0);
}

constexpr int value_stride(int Dv) {
  return Dv + (Dv % 64 == 0 ? 16 : 48);
}

/// This thread's part of 32 rows of a cache from `first` on, those before `end`.
template <typename T, int D, int threads, bool whole>
METAL_FUNC void fetch(const device T* rows, int first, int end, int thread_, thread Eight<T>* to) {
  DFLASH_UNROLL
  for (int i = 0; i < 4 * D / threads; ++i) {
    const int at = i * threads + thread_;
    const int row = first + at / (D / 8), d = at % (D / 8) * 8;
    to[i] = load_eight<T, T, whole>(rows + size_t(row) * D + d, row < end ? 8 : 0);
  }
}

template <typename T, int D, int threads>
METAL_FUNC void put(thread const Eight<T>* rows, int stride, int thread_, threadgroup T* to) {
  DFLASH_UNROLL
  for (int i = 0; i < 4 * D / threads; ++i) {
    const int at = i * threads + thread_;
    store_eight<T>(to + at / (D / 8) * stride + at % (D / 8) * 8, rows[i]);
  }
}

/// A SIMD group's 8 tiles columns of one chunk. `staged`: the threadgroup's SIMD groups have
/// columns of their own and read keys and values from threadgroup memory, which they fill together;
/// otherwise each reads them from the cache. The arithmetic is the same.
template <typename T, int D, int Dv, int tiles, int simdgroups, bool staged, bool whole>
METAL_FUNC void attend_chunk(
    const device T* q,         // [columns, D]
    const device T* k,         // [capacity, D]
    const device T* v,         // [capacity, Dv]
    const device bool* mask,   // [T, T]
    device float* partial,     // [columns, chunks, Dv]
    device float* statistics,  // [columns, chunks, 2]
    Block block,
    float scale,
    int chunks,
    int chunk,
    int first_column,
    int simdgroup,
    int lane,
    threadgroup T* weights,   // [8 tiles, DFLASH_WEIGHTS_STRIDE], of this SIMD group
    threadgroup T* shared) {  // 32 rows of key_stride(D), or of value_stride(Dv)
  constexpr int value_blocks = (Dv + 63) / 64;
  constexpr bool early = !staged && sizeof(T) == 2 && D <= 128;  // while there are registers
  const int start = chunk * DFLASH_CHUNK;
  const int first = first_seen(block);
  if (start >= block.end || start + DFLASH_CHUNK <= first) {
    return;
  }
  const int row = matrix_row(lane), quad = matrix_quad(lane);
  const float scale2 = mul_rn(scale, DFLASH_LOG2_E);
  const int own_thread = simdgroup * 32 + lane;
  constexpr int threads = simdgroups * 32;
  // On the way from the cache to threadgroup memory, a step ahead of where they are needed.
  Eight<T> keys_ahead[staged ? 4 * D / threads : 1], values_ahead[staged ? 4 * Dv / threads : 1];

  float largest[tiles][2], total[tiles][2];
  Sums sums[value_blocks * 4][tiles];
  DFLASH_UNROLL
  for (int c = 0; c < tiles; ++c) {
    DFLASH_UNROLL
    for (int e = 0; e < 2; ++e) {
      largest[c][e] = minus_infinity();
      total[c][e] = 0.0f;
    }
    DFLASH_UNROLL
    for (int i = 0; i < value_blocks * 4; ++i) {
      sums[i][c] = no_sums();
    }
  }

  const int from = first > start ? first / 32 * 32 : start;
  const int stop = block.end < start + DFLASH_CHUNK ? block.end : start + DFLASH_CHUNK;
  if (staged) {
    fetch<T, D, threads, whole>(k, from, block.end, own_thread, keys_ahead);
  }
  for (int key0 = from; key0 < stop; key0 += 32) {
    Eight<T> values[value_blocks][8];  // of keys key0 + quad + 4 i, elements 64 b + 8 row ...
    if (early) {
      DFLASH_UNROLL
      for (int b = 0; b < value_blocks; ++b) {
        DFLASH_UNROLL
        for (int i = 0; i < 8; ++i) {
          const int key = key0 + quad + 4 * i, d = 64 * b + 8 * row;
          const bool there = key < block.end && d < Dv;
          values[b][i] = load_eight<T, T, whole>(v + size_t(key) * Dv + d, there ? 8 : 0);
        }
      }
    }
    if (staged) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      put<T, D, threads>(keys_ahead, key_stride(D), own_thread, shared);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      fetch<T, Dv, threads, whole>(v, key0, block.end, own_thread, values_ahead);
    }
    Sums scores[2][tiles];
    DFLASH_UNROLL
    for (int c = 0; c < tiles; ++c) {
      scores[0][c] = scores[1][c] = no_sums();
    }
    DFLASH_UNROLL
    for (int d = 0; d < D; d += 32) {
      Left<T> left[2];
      DFLASH_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int own = 8 * i + row, at = d + 8 * quad;
        const int there = key0 + own < block.end ? 8 : 0;
        set_row(
            left[i / 2],
            i % 2,
            staged ? read_eight<T>(shared + own * key_stride(D) + at)
                   : load_eight<T, T, whole>(k + size_t(key0 + own) * D + at, there));
      }
      DFLASH_UNROLL
      for (int c = 0; c < tiles; ++c) {
        const int column = first_column + 8 * c;
        const Right<T> right = load_right<T, whole>(
            q + size_t(column) * D + d, D, block.columns - column, 8, 32, lane);
        multiply_add(scores[0][c], left[0], right);
        multiply_add(scores[1][c], left[1], right);
      }
    }
    if (staged) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      put<T, Dv, threads>(values_ahead, value_stride(Dv), own_thread, shared);
      if (key0 + 32 < stop) {
        fetch<T, D, threads, whole>(k, key0 + 32, block.end, own_thread, keys_ahead);
      }
    }

    const bool seen_by_all =
        key0 + 32 <= block.length && (block.window == 0 || key0 >= block.end - block.window);
    uint seen[tiles][2];  // bit i: key0 + i
    float factor[tiles][2];
    DFLASH_UNROLL
    for (int c = 0; c < tiles; ++c) {
      DFLASH_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int own = 8 * c + 2 * quad + e;
        seen[c][e] = 0xffffffffu;
        if (!seen_by_all) {
          seen[c][e] = 0;
          for (int i = 0; i < 4; ++i) {
            const int t = (first_column + own) % block.inputs;
            const bool one = sees(block, mask, t, key0 + 8 * i + row);
            seen[c][e] |= one ? 1u << (8 * i + row) : 0u;
          }
        }
        float score[4];
        float best = minus_infinity();
        DFLASH_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float x = mul_rn(scores[i / 2][c].x[2 * (i % 2) + e], scale2);
          score[i] = ((seen[c][e] >> (8 * i + row)) & 1u) != 0 ? x : minus_infinity();
          best = max_rn(best, score[i]);
        }
        const float before = largest[c][e];
        largest[c][e] = max_rn(before, max_of_rows(best));
        const float base = largest[c][e] == minus_infinity() ? 0.0f : largest[c][e];
        DFLASH_UNROLL
        for (int i = 0; i < 4; ++i) {
          score[i] = weight_of(score[i], base);
          const int slot = 8 * (row % 4) + 2 * i + row / 4;  // 8 c + j is key c + 4 j
          weights[own * DFLASH_WEIGHTS_STRIDE + slot] = T(score[i]);
        }
        const float sum = add_rn(add_rn(score[0], score[1]), add_rn(score[2], score[3]));
        factor[c][e] = weight_of(before, base);
        total[c][e] = fma_rn(total[c][e], factor[c][e], sum_of_rows(sum));
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    Right<T> right[tiles];
    DFLASH_UNROLL
    for (int c = 0; c < tiles; ++c) {
      right[c] = load_right<T, true>(
          weights + 8 * c * DFLASH_WEIGHTS_STRIDE, DFLASH_WEIGHTS_STRIDE, 8, 8, 32, lane);
      DFLASH_UNROLL
      for (int i = 0; i < value_blocks * 4; ++i) {
        DFLASH_UNROLL
        for (int e = 0; e < 4; ++e) {
          sums[i][c].x[e] = mul_rn(sums[i][c].x[e], factor[c][e % 2]);
        }
      }
    }
    if (staged) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    } else {
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }

    DFLASH_UNROLL
    for (int b = 0; b < value_blocks; ++b) {
      Eight<T> by_dim[8];
      if (!early) {
        DFLASH_UNROLL
        for (int i = 0; i < 8; ++i) {
          const int own = quad + 4 * i, d = 64 * b + 8 * row;
          const bool there = key0 + own < block.end && d < Dv;
          values[b][i] =
              staged ? (d < Dv ? read_eight<T>(shared + own * value_stride(Dv) + d) : zero8<T>())
                     : load_eight<T, T, whole>(v + size_t(key0 + own) * Dv + d, there ? 8 : 0);
        }
      }
      transpose8(values[b], by_dim);
      // Where some row does not see some key, 0 times NaN or infinity must not reach it.
      uint bad[8];
      uint any = 0;
      if (!seen_by_all) {
        DFLASH_UNROLL
        for (int j = 0; j < 8; ++j) {
          bad[j] = remove_nonfinite(by_dim[j]);
          any |= bad[j];
        }
      }
      DFLASH_UNROLL
      for (int i = 0; i < 4; ++i) {
        Left<T> left;
        set_row(left, 0, by_dim[2 * i]);
        set_row(left, 1, by_dim[2 * i + 1]);
        DFLASH_UNROLL
        for (int c = 0; c < tiles; ++c) {
          multiply_add(sums[4 * b + i][c], left, right[c]);
        }
      }
      if (!seen_by_all && simd_any(any != 0)) {
        DFLASH_UNROLL
        for (int j = 0; j < 8; ++j) {
          uint keys = 0;
          for (int i = 0; i < 8; ++i) {
            keys |= ((bad[j] >> i) & 1u) << (quad + 4 * i);
          }
          keys = union_of_quads(keys);
          DFLASH_UNROLL
          for (int c = 0; c < tiles; ++c) {
            DFLASH_UNROLL
            for (int e = 0; e < 2; ++e) {
              const float sum = sums[4 * b + j / 2][c].x[2 * (j % 2) + e];
              const bool touched = (keys & union_of_rows(seen[c][e])) != 0;
              sums[4 * b + j / 2][c].x[2 * (j % 2) + e] = touched ? poison() : sum;
            }
          }
        }
      }
    }
  }

  DFLASH_UNROLL
  for (int c = 0; c < tiles; ++c) {
    DFLASH_UNROLL
    for (int e = 0; e < 2; ++e) {
      const int column = first_column + 8 * c + 2 * quad + e;
      if (column >= block.columns) {
        continue;
      }
      const size_t at = size_t(column) * chunks + chunk;
      DFLASH_UNROLL
      for (int b = 0; b < value_blocks; ++b) {
        const int d = 64 * b + 8 * row;
        if (d < Dv) {
          DFLASH_UNROLL
          for (int j = 0; j < 8; ++j) {
            partial[at * Dv + d + j] = sums[4 * b + j / 2][c].x[2 * (j % 2) + e];
          }
        }
      }
      if (row == 0) {
        statistics[2 * at] = largest[c][e];
        statistics[2 * at + 1] = total[c][e];
      }
    }
  }
}

/// 32 values of one row of one head: `column` counts columns of all batch rows and key heads.
template <typename T, int Dv>
METAL_FUNC void combine_chunks(
    const device float* partial,     // [columns, chunks, Dv]
    const device float* statistics,  // [columns, chunks, 2]
    const device float* sinks,       // [Hq]
    device T* out,                   // [columns, Dv]
    Block block,
    bool has_sinks,
    bool in_range,
    int head,
    int chunks,
    int column,
    int first_value,
    int stripe,
    int lane,
    threadgroup float* shared) {  // [stripes, 33]
  const int position = block.length + column % block.inputs;
  const int first_key = block.window > 0 ? position - block.window + 1 : 0;
  const int first = (first_key > 0 ? first_key : 0) / DFLASH_CHUNK;
  const int last_key = block.causal && !block.has_mask ? position : block.end - 1;
  const int stop = in_range ? last_key / DFLASH_CHUNK + 1 : 0;
  const device float* own_statistics = statistics + size_t(column) * chunks * 2;
  const device float* own_partial = partial + size_t(column) * chunks * Dv + first_value + lane;

  const float sink = has_sinks ? mul_rn(sinks[head], DFLASH_LOG2_E) : minus_infinity();
  float largest = sink;
  for (int c = first + lane; c < stop; c += 32) {
    largest = max_rn(largest, own_statistics[2 * c]);
  }
  for (int bit = 1; bit < 32; bit *= 2) {
    largest = max_rn(largest, simd_shuffle_xor(largest, ushort(bit)));
  }
  const float base = largest == minus_infinity() ? 0.0f : largest;
  float total = 0.0f, sum = 0.0f;
  const int behind = (first - stripe + DFLASH_STRIPES - 1) / DFLASH_STRIPES;
  _Pragma("unroll 8") for (int c = stripe + (first > stripe ? behind : 0) * DFLASH_STRIPES;
                           c < stop;
                           c += DFLASH_STRIPES) {
    const float weight = weight_of(own_statistics[2 * c], base);
    total = fma_rn(own_statistics[2 * c + 1], weight, total);
    sum = fma_rn(own_partial[size_t(c) * Dv], weight, sum);
  }
  shared[stripe * 33 + lane] = sum;
  if (lane == 0) {
    shared[stripe * 33 + 32] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (stripe == 0) {
    for (int s = 1; s < DFLASH_STRIPES; ++s) {
      sum = add_rn(sum, shared[s * 33 + lane]);
      total = s == 1 ? add_rn(shared[32], shared[33 + 32]) : add_rn(total, shared[s * 33 + 32]);
    }
    if (has_sinks) {
      total = add_rn(total, weight_of(sink, base));
    }
    const float value = total == 0.0f ? 0.0f : sum / total;
    out[size_t(column) * Dv + first_value + lane] =
        T(in_range ? finite_or_poison(value) : poison());
  }
}
