// matrix.h for CUDA: the same blocks on mma.sync, fp32 operands by warp shuffles.
#pragma once

#define threadgroup_barrier(flags) __syncthreads()
#define simdgroup_barrier(flags) __syncwarp()

template <typename To, typename From>
METAL_FUNC To as_type(From x) {
  return *reinterpret_cast<const To*>(&x);
}

METAL_FUNC bool simd_any(bool x) {
  return __any_sync(0xffffffffu, x);
}

METAL_FUNC int matrix_row(int lane) {
  return lane >> 2;
}

METAL_FUNC int matrix_quad(int lane) {
  return lane & 3;
}

#define DFLASH_ROW_BITS ushort(4), ushort(8), ushort(16)
#define DFLASH_QUAD_BITS ushort(1), ushort(2)

// Eight 16-bit values fill four registers, the even one of a pair in the low half.
template <typename T>
struct Eight {
  uint w[4];
};
template <>
struct Eight<float> {
  float x[8];
};

METAL_FUNC float from_bits(half x, uint bits) {
  x.bits = ushort(bits);
  return x;
}

METAL_FUNC float from_bits(bfloat, uint bits) {
  return __uint_as_float(bits << 16);
}

METAL_FUNC uint to_bits(half, float low, float high) {
  uint pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

METAL_FUNC uint to_bits(bfloat, float low, float high) {
  uint pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

template <typename T>
METAL_FUNC float element(const Eight<T>& a, int i) {
  return from_bits(T(), (a.w[i / 2] >> (16 * (i % 2))) & 0xffffu);
}

METAL_FUNC float element(const Eight<float>& a, int i) {
  return a.x[i];
}

METAL_FUNC void set_element(Eight<float>& a, int i, float x) {
  a.x[i] = x;
}

template <typename T>
METAL_FUNC Eight<T> zero8() {
  Eight<T> a = {};
  return a;
}

template <typename T>
METAL_FUNC Eight<T> pack8(const float* x) {
  Eight<T> a;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a.w[i] = to_bits(T(), x[2 * i], x[2 * i + 1]);
  }
  return a;
}

template <>
METAL_FUNC Eight<float> pack8<float>(const float* x) {
  Eight<float> a;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    a.x[i] = x[i];
  }
  return a;
}

template <typename T, typename W, bool whole>
METAL_FUNC Eight<T> load_eight(const W* p, int count) {
  if constexpr (whole && same_type<T, W>) {
    Eight<T> a = {};
    if (count > 0) {
#pragma unroll
      for (int i = 0; i < int(sizeof a) / 16; ++i) {
        reinterpret_cast<uint4*>(&a)[i] = reinterpret_cast<const uint4*>(p)[i];
      }
    }
    return a;
  }
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = i < count ? float(p[i]) : 0.0f;
  }
  return pack8<T>(x);
}

// Past the L1 cache, where the rows of x stay.
template <typename T, typename W, bool whole>
METAL_FUNC Eight<T> stream_eight(const W* p, int count) {
  if constexpr (whole && same_type<T, W>) {
    Eight<T> a = {};
    if (count > 0) {
#pragma unroll
      for (int i = 0; i < int(sizeof a) / 16; ++i) {
        uint4& to = reinterpret_cast<uint4*>(&a)[i];
        asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
            : "l"(reinterpret_cast<const uint4*>(p) + i));
      }
    }
    return a;
  } else {
    return load_eight<T, W, whole>(p, count);
  }
}

template <typename T>
METAL_FUNC Eight<T> read_eight(const T* p) {
  return load_eight<T, T, true>(p, 8);
}

template <typename T>
METAL_FUNC void store_eight(T* p, const Eight<T>& a) {
#pragma unroll
  for (int i = 0; i < int(sizeof a) / 16; ++i) {
    reinterpret_cast<uint4*>(p)[i] = reinterpret_cast<const uint4*>(&a)[i];
  }
}

template <int count>
METAL_FUNC void load_words(const uint* p, uint* out) {
  if constexpr (count % 4 == 0) {
#pragma unroll
    for (int i = 0; i < count / 4; ++i) {
      reinterpret_cast<uint4*>(out)[i] = reinterpret_cast<const uint4*>(p)[i];
    }
  } else if constexpr (count == 2) {
    *reinterpret_cast<uint2*>(out) = *reinterpret_cast<const uint2*>(p);
  } else {
    out[0] = p[0];
  }
}

template <typename T>
METAL_FUNC Eight<T> nibbles8(uint word) {
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = float((word >> (4 * i)) & 15u);
  }
  return pack8<T>(x);
}

// 0x43 .. is 128 as bfloat, whose last bit counts 1; 0x64 .. is 1024 as half.
template <>
METAL_FUNC Eight<bfloat> nibbles8<bfloat>(uint word) {
  Eight<bfloat> a;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint bits =
        0x43004300u | ((word >> (8 * i)) & 15u) | (((word >> (8 * i + 4)) & 15u) << 16);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(a.w[i])
        : "r"(bits), "r"(0x3f803f80u), "r"(0xc300c300u));  // bits * 1 - 128
  }
  return a;
}

template <>
METAL_FUNC Eight<half> nibbles8<half>(uint word) {
  Eight<half> a;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint bits =
        0x64006400u | ((word >> (8 * i)) & 15u) | (((word >> (8 * i + 4)) & 15u) << 16);
    asm("sub.f16x2 %0, %1, %2;" : "=r"(a.w[i]) : "r"(bits), "r"(0x64006400u));
  }
  return a;
}

template <typename T>
METAL_FUNC Eight<T> bytes8(uint low, uint high) {
  float x[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = float((low >> (8 * i)) & 255u);
    x[i + 4] = float((high >> (8 * i)) & 255u);
  }
  return pack8<T>(x);
}

template <typename T>
METAL_FUNC void transpose8(const Eight<T>* in, Eight<T>* out) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * j].w[i] = __byte_perm(in[2 * i].w[j], in[2 * i + 1].w[j], 0x5410);
      out[2 * j + 1].w[i] = __byte_perm(in[2 * i].w[j], in[2 * i + 1].w[j], 0x7632);
    }
  }
}

template <>
METAL_FUNC void transpose8<float>(const Eight<float>* in, Eight<float>* out) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      out[j].x[i] = in[i].x[j];
    }
  }
}

template <typename T>
METAL_FUNC uint remove_nonfinite(Eight<T>& a) {
  float x[8];
  uint found = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = element(a, i);
    const bool bad = (__float_as_uint(x[i]) & 0x7f800000u) == 0x7f800000u;
    found |= bad ? 1u << i : 0u;
    x[i] = bad ? 0.0f : x[i];
  }
  a = pack8<T>(x);
  return found;
}

template <typename T>
struct Left {
  Eight<T> rows[2];
};

template <typename T>
METAL_FUNC void set_row(Left<T>& left, int half_, const Eight<T>& a) {
  left.rows[half_] = a;
}

template <typename T>
struct Right {
  Eight<T> column;
};

template <typename T, bool whole>
METAL_FUNC Right<T> load_right(
    const T* x, int column_stride, int columns, int quad_stride, int limit, int lane) {
  const int n = matrix_row(lane);
  const int k = matrix_quad(lane) * quad_stride;
  const int count = n < columns ? (whole ? 8 : limit - k) : 0;
  return {load_eight<T, T, whole>(x + size_t(n) * column_stride + k, count)};
}

template <typename T>
METAL_FUNC Left<T> ones() {
  const float one[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  Left<T> left;
  left.rows[0] = left.rows[1] = pack8<T>(one);
  return left;
}

struct Sums {
  float x[4];
};

METAL_FUNC Sums no_sums() {
  Sums sums = {};
  return sums;
}

#define DFLASH_MMA(type, T)                                                               \
  METAL_FUNC void mma(Sums& s, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1, T) { \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                            \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"            \
        : "+f"(s.x[0]), "+f"(s.x[1]), "+f"(s.x[2]), "+f"(s.x[3])                          \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                          \
  }
DFLASH_MMA("f16", half)
DFLASH_MMA("bf16", bfloat)
#undef DFLASH_MMA

template <typename T>
METAL_FUNC void multiply_add(Sums& sums, const Left<T>& left, const Right<T>& right) {
  const uint *a = left.rows[0].w, *b = left.rows[1].w, *x = right.column.w;
  mma(sums, a[0], b[0], a[1], b[1], x[0], x[1], T());
  mma(sums, a[2], b[2], a[3], b[3], x[2], x[3], T());
}

template <>
METAL_FUNC void multiply_add<float>(
    Sums& sums, const Left<float>& left, const Right<float>& right) {
  const int lane = int(threadIdx.x);
  const int own = lane & ~3;
  const int first = (lane & 3) * 8;
#pragma unroll 1
  for (int c = 0; c < 4; ++c) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float a = __shfl_sync(0xffffffffu, left.rows[0].x[i], own + c);
      const float b = __shfl_sync(0xffffffffu, left.rows[1].x[i], own + c);
      const float x = __shfl_sync(0xffffffffu, right.column.x[i], first + c);
      const float y = __shfl_sync(0xffffffffu, right.column.x[i], first + 4 + c);
      sums.x[0] = __fmaf_rn(a, x, sums.x[0]);
      sums.x[1] = __fmaf_rn(a, y, sums.x[1]);
      sums.x[2] = __fmaf_rn(b, x, sums.x[2]);
      sums.x[3] = __fmaf_rn(b, y, sums.x[3]);
    }
  }
}
