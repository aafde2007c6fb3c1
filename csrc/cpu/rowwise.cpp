// Norms, gates and rotary positions: fp32 inside, one rounding. Each row by itself, so that no tail
// of a flat loop gets other bits; squares add in the order of vec.h.
#include "kernels_isa.h"
#include "vec.h"
#include "widen.h"

namespace dflash::cpu {
namespace {

constexpr int kPiece = 256;  // values of a row at a time

/// Values first .. first + n - 1 of row `row`, as fp32.
template <typename T>
void load_piece(const Rows& x, long row, int first, int n, float* to) {
  long at = 0;
  for (int d = x.leading - 1; d >= 0; --d) {
    at += row % x.shape[d] * x.strides[d];
    row /= x.shape[d];
  }
  const T* from = static_cast<const T*>(x.data) + at + first * x.step;
  if (x.step == 1) {
    widen(from, n, to);
  } else {
    for (int i = 0; i < n; ++i) to[i] = to_float(from[i * x.step]);
  }
}

/// Calls run(first, n) for the pieces of a row.
template <typename Run>
inline void pieces(int size, Run&& run) {
  for (int first = 0; first < size; first += kPiece) {
    run(first, size - first < kPiece ? size - first : kPiece);
  }
}

/// x <- x + y, rounded.
template <typename T>
void add_rounded(float* x, const float* y, int n, T* sum) {
  for (int i = 0; i < n; ++i) x[i] += y[i];
  narrow(x, n, sum);
  widen(sum, n, x);
}

void multiply_silu(float* x, const float* gate, int n) {
  for (int i = 0; i < n; ++i) x[i] *= gate[i] / (1.0f + exp_f32(-gate[i]));
}

void multiply_sigmoid(float* x, const float* gate, int n) {
  for (int i = 0; i < n; ++i) x[i] *= 1.0f / (1.0f + exp_f32(-gate[i]));
}

template <typename T>
void norm_row(const Rowwise& p, long row) {
  const bool adds = p.kind == RowwiseKind::add_rms_norm;
  const bool gated = p.kind == RowwiseKind::rms_norm_gated;
  alignas(64) float x[kPiece], y[kPiece], lanes[kLanes];
  T* const out = static_cast<T*>(p.out) + row * p.size;
  T* const sum = adds ? static_cast<T*>(p.sum) + row * p.size : nullptr;
  Vec squares = splat(0.0f);
  pieces(p.size, [&](int first, int n) {
    load_piece<T>(p.x, row, first, n, x);
    if (adds) {
      load_piece<T>(p.y, row, first, n, y);
      add_rounded(x, y, n, sum + first);
    }
    for (int i = n; i % kLanes; ++i) x[i] = 0.0f;
    for (int i = 0; i < n; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  });
  store(lanes, squares);
  for (int i = 0; i < 8; ++i) lanes[i] += lanes[i + 8];
  const float total = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
                      ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
  const float factor = 1.0f / __builtin_sqrtf(total / float(p.size) + p.eps);
  pieces(p.size, [&](int first, int n) {
    if (adds) {
      widen(sum + first, n, x);
    } else {
      load_piece<T>(p.x, row, first, n, x);
    }
    for (int i = 0; i < n; ++i) x[i] *= factor;
    if (p.weight) {
      widen(static_cast<const T*>(p.weight) + first, n, y);
      for (int i = 0; i < n; ++i) x[i] *= y[i];
    }
    if (gated) {
      load_piece<T>(p.y, row, first, n, y);
      multiply_silu(x, y, n);
    }
    narrow(x, n, out + first);
  });
}

template <typename T>
void run(const Rowwise& p, int part, int parts) {
  const bool norm = p.kind != RowwiseKind::swiglu && p.kind != RowwiseKind::sigmoid_gate;
  const long in_row = norm ? 1 : (p.size + kPiece - 1) / kPiece;
  const long tasks = p.rows * in_row, end = tasks * (part + 1) / parts;
  for (long task = tasks * part / parts; task < end; ++task) {
    const long row = task / in_row;
    if (norm) {
      norm_row<T>(p, row);
      continue;
    }
    alignas(64) float x[kPiece], gate[kPiece];
    const int first = int(task % in_row) * kPiece;
    const int n = p.size - first < kPiece ? p.size - first : kPiece;
    load_piece<T>(p.x, row, first, n, x);
    load_piece<T>(p.y, row, first, n, gate);
    if (p.kind == RowwiseKind::swiglu) {
      multiply_silu(x, gate, n);
    } else {
      multiply_sigmoid(x, gate, n);
    }
    narrow(x, n, static_cast<T*>(p.out) + row * p.size + first);
  }
}

/// cos x and sin x, to about one unit of 2^-24 for |x| up to 2^24; the same bits in a vector and
/// alone.
inline void cos_sin(float x, float* cosine, float* sine) {
  const float shifted = __builtin_fmaf(x, 0.636619772f, 12582912.0f);  // quarters of a turn
  const float n = shifted - 12582912.0f;
  float r = __builtin_fmaf(n, -1.57079637f, x);  // pi / 2 in three parts
  r = __builtin_fmaf(n, 4.37113883e-8f, r);
  r = __builtin_fmaf(n, 1.71512451e-15f, r);
  const float z = r * r;
  float s = __builtin_fmaf(z, 2.75573192e-6f, -1.98412698e-4f);  // Taylor, |r| <= pi / 4
  s = __builtin_fmaf(z, s, 8.33333333e-3f);
  s = __builtin_fmaf(z, s, -1.66666667e-1f);
  s = __builtin_fmaf(z * r, s, r);
  float c = __builtin_fmaf(z, -2.75573192e-7f, 2.48015873e-5f);
  c = __builtin_fmaf(z, c, -1.38888889e-3f);
  c = __builtin_fmaf(z, c, 4.16666667e-2f);
  c = __builtin_fmaf(z, c, -0.5f);
  c = __builtin_fmaf(z, c, 1.0f);
  int32_t quarter;
  std::memcpy(&quarter, &shifted, sizeof quarter);
  const float first = quarter & 1 ? s : c, second = quarter & 1 ? c : s;
  *cosine = (quarter + 1) & 2 ? -first : first;
  *sine = quarter & 2 ? -second : second;
}

template <typename T>
void rotate(const Rope& p, int part, int parts) {
  const int tasks = p.batch * p.inputs, pairs = p.dims / 2;
  const int end = int(size_t(tasks) * (part + 1) / parts);
  alignas(64) float cosines[kMaxRopeDim / 2], sines[kMaxRopeDim / 2];
  alignas(64) float x[kMaxRopeDim], y[kMaxRopeDim];
  for (int task = int(size_t(tasks) * part / parts); task < end; ++task) {
    const int b = task / p.inputs, t = task % p.inputs;
    const float position = float(p.lengths[b] + t) * p.scale;
    for (int i = 0; i < pairs; ++i) {
      cos_sin(position * p.frequencies[i], cosines + i, sines + i);
    }
    for (int head = 0; head < p.heads; ++head) {
      const long row = (long(b) * p.heads + head) * p.inputs + t;
      load_piece<T>(p.x, row, 0, p.size, x);
      // Pair i: (i, i + pairs), or neighbours.
      const int step = p.traditional ? 2 : 1, other = p.traditional ? 1 : pairs;
      for (int i = 0; i < pairs; ++i) {
        const float a = x[i * step], c = x[i * step + other];
        y[i * step] = __builtin_fmaf(a, cosines[i], -(c * sines[i]));
        y[i * step + other] = __builtin_fmaf(c, cosines[i], a * sines[i]);
      }
      for (int i = p.dims; i < p.size; ++i) y[i] = x[i];
      narrow(y, p.size, static_cast<T*>(p.out) + row * p.size);
    }
  }
}

}  // namespace

namespace DFLASH_ISA {

void rowwise(const Rowwise& p, int part, int parts) {
  switch (p.type) {
    case Type::f32:
      return run<float>(p, part, parts);
    case Type::f16:
      return run<Half>(p, part, parts);
    case Type::bf16:
      return run<BFloat>(p, part, parts);
  }
}

void rope(const Rope& p, int part, int parts) {
  switch (p.type) {
    case Type::f32:
      return rotate<float>(p, part, parts);
    case Type::f16:
      return rotate<Half>(p, part, parts);
    case Type::bf16:
      return rotate<BFloat>(p, part, parts);
  }
}

}  // namespace DFLASH_ISA
}  // namespace dflash::cpu
