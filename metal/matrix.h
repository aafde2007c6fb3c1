// Products of blocks by a SIMD group, fp32 sums: Sums [16, 8] += Left [16, 32] Right [32, 8].
//
// A lane has a row r = matrix_row, 0 .. 7, and a quad c = matrix_quad, 0 .. 3. It holds
//   of Left   rows r and r + 8, k = 8c .. 8c + 7 of each: an Eight a row
//   of Sums   x[0], x[1]: row r, columns 2c and 2c + 1; x[2], x[3]: the same of row r + 8.
// What it holds of Right is the hardware's matter: load_right reads columns that lie in memory.
// Which k stands in which slot is free, as long as Left and Right agree. A column of the result
// depends on its own column of Right alone, and one column goes through the same instructions as
// eight.
#pragma once

METAL_FUNC int matrix_row(int lane) {
  return ((lane >> 4) & 1) * 4 + ((lane >> 1) & 3);
}

METAL_FUNC int matrix_quad(int lane) {
  return ((lane >> 3) & 1) * 2 + (lane & 1);
}

/// Bits of the lane that count rows, lowest first, and quads.
#define DFLASH_ROW_BITS ushort(2), ushort(4), ushort(16)
#define DFLASH_QUAD_BITS ushort(1), ushort(8)

template <typename T>
struct Eight {
  T x[8];
};

template <typename T>
METAL_FUNC T element(Eight<T> a, int i) {
  return a.x[i];
}

template <typename T>
METAL_FUNC Eight<T> zero8() {
  Eight<T> a;
  for (int i = 0; i < 8; ++i) {
    a.x[i] = T(0.0f);
  }
  return a;
}

/// The first `count` of eight, zeros after them. `whole`: p is aligned to 16 bytes and count is at
/// least 8, or at most 0.
template <typename T, typename W, bool whole>
METAL_FUNC Eight<T> load_eight(const device W* p, int count) {
  Eight<T> a;
  for (int i = 0; i < 8; ++i) {
    a.x[i] = (whole ? count > 0 : i < count) ? T(float(p[i])) : T(0.0f);
  }
  return a;
}

/// The same, of memory that nobody reads again soon.
template <typename T, typename W, bool whole>
METAL_FUNC Eight<T> stream_eight(const device W* p, int count) {
  return load_eight<T, W, whole>(p, count);
}

/// Eight neighbours of threadgroup memory, aligned to 16 bytes.
template <typename T>
METAL_FUNC Eight<T> read_eight(const threadgroup T* p) {
  Eight<T> a;
  for (int i = 0; i < 8; ++i) {
    a.x[i] = p[i];
  }
  return a;
}

template <typename T>
METAL_FUNC void store_eight(threadgroup T* p, Eight<T> a) {
  for (int i = 0; i < 8; ++i) {
    p[i] = a.x[i];
  }
}

/// `count` words, aligned to as many.
template <int count>
METAL_FUNC void load_words(const device uint* p, thread uint* out) {
  for (int i = 0; i < count; ++i) {
    out[i] = p[i];
  }
}

/// The bare integers of a word of 4 bits, or of two words of 8 bits, lowest first.
template <typename T>
METAL_FUNC Eight<T> nibbles8(uint word) {
  Eight<T> a;
  for (int i = 0; i < 8; ++i) {
    a.x[i] = T(float((word >> (4 * i)) & 15u));
  }
  return a;
}

template <typename T>
METAL_FUNC Eight<T> bytes8(uint low, uint high) {
  Eight<T> a;
  for (int i = 0; i < 4; ++i) {
    a.x[i] = T(float((low >> (8 * i)) & 255u));
    a.x[i + 4] = T(float((high >> (8 * i)) & 255u));
  }
  return a;
}

/// out[j] = element j of each of the eight.
template <typename T>
METAL_FUNC void transpose8(thread const Eight<T>* in, thread Eight<T>* out) {
  for (int j = 0; j < 8; ++j) {
    for (int i = 0; i < 8; ++i) {
      out[j].x[i] = in[i].x[j];
    }
  }
}

/// Bit i set where element i is NaN or infinite; those elements become zero.
template <typename T>
METAL_FUNC uint remove_nonfinite(thread Eight<T>& a) {
  uint found = 0;
  for (int i = 0; i < 8; ++i) {
    const bool bad = !isfinite(float(a.x[i]));
    found |= bad ? 1u << i : 0u;
    a.x[i] = bad ? T(0.0f) : a.x[i];
  }
  return found;
}

template <typename T>
struct Left {
  vec<T, 2> m[2][4];  // of 8 x 8 matrices
};

template <typename T>
METAL_FUNC void set_row(thread Left<T>& left, int half_, Eight<T> a) {
  for (int f = 0; f < 4; ++f) {
    left.m[half_][f][0] = a.x[2 * f];
    left.m[half_][f][1] = a.x[2 * f + 1];
  }
}

template <typename T>
struct Right {
  vec<T, 2> m[4];
};

/// Column n = 0 .. columns - 1 starts at x + n column_stride, the others are zero. Slot 8c + i is
/// k = c quad_stride + i, and zero from k = limit on. `whole`: aligned, and there is no limit.
#define DFLASH_LOAD_RIGHT(space)                                                                \
  template <typename T, bool whole>                                                             \
  METAL_FUNC Right<T> load_right(                                                               \
      const space T* x, int column_stride, int columns, int quad_stride, int limit, int lane) { \
    Right<T> right;                                                                             \
    const int row = matrix_row(lane);                                                           \
    const int column = matrix_quad(lane) * 2;                                                   \
    for (int f = 0; f < 4; ++f) {                                                               \
      const int k = (row >> 1) * quad_stride + 2 * f + (row & 1);                               \
      for (int e = 0; e < 2; ++e) {                                                             \
        const bool there = column + e < columns && (whole || k < limit);                        \
        right.m[f][e] = there ? x[size_t(column + e) * column_stride + k] : T(0.0f);            \
      }                                                                                         \
    }                                                                                           \
    return right;                                                                               \
  }
DFLASH_LOAD_RIGHT(device)
DFLASH_LOAD_RIGHT(threadgroup)
#undef DFLASH_LOAD_RIGHT

/// A block of ones: its product is the sum of each column.
template <typename T>
METAL_FUNC Left<T> ones() {
  Left<T> left;
  Eight<T> one;
  for (int i = 0; i < 8; ++i) {
    one.x[i] = T(1.0f);
  }
  set_row(left, 0, one);
  set_row(left, 1, one);
  return left;
}

struct Sums {
  float x[4];
};

METAL_FUNC Sums no_sums() {
  Sums sums;
  for (int i = 0; i < 4; ++i) {
    sums.x[i] = 0.0f;
  }
  return sums;
}

template <typename T>
METAL_FUNC void multiply_add(
    thread Sums& sums, thread const Left<T>& left, thread const Right<T>& right) {
  for (int h = 0; h < 2; ++h) {
    simdgroup_matrix<float, 8, 8> total;
    simdgroup_matrix<T, 8, 8> a, b;
    reinterpret_cast<thread float2&>(total.thread_elements()) =
        float2(sums.x[2 * h], sums.x[2 * h + 1]);
    for (int f = 0; f < 4; ++f) {
      reinterpret_cast<thread vec<T, 2>&>(a.thread_elements()) = left.m[h][f];
      reinterpret_cast<thread vec<T, 2>&>(b.thread_elements()) = right.m[f];
      simdgroup_multiply_accumulate(total, a, b, total);
    }
    const float2 held = reinterpret_cast<thread float2&>(total.thread_elements());
    sums.x[2 * h] = held[0];
    sums.x[2 * h + 1] = held[1];
  }
}
