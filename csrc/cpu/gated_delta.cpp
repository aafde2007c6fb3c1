// The gated delta rule on the CPU. A block of four rows of S stays in the first-level cache for a
// tile of inputs whose q and k were converted once; sums run in the order of vec.h.
#include "kernels.h"
#include "kernels_isa.h"
#include "vec.h"

namespace dflash::cpu {
namespace {

constexpr int kTile = 16;  // inputs
constexpr int kRows = 4;   // rows of S
constexpr int kRowsOfTask = 32;

template <typename T>
void widen(const T* from, float* to, int n) {
  for (int i = 0; i < n; ++i) to[i] = to_float(from[i]);
}

template <int N>
struct Decay {  // a factor for N vectors of a row: one number, or one for each column
  const float* columns;
  float all;
  Vec operator[](int i) const {
    return columns ? load(columns + i * kLanes) : splat(all);
  }
};

template <int N, int R>
void replay_rows(float* s, const float* k, const float* delta, Decay<N> g) {
  for (int i = 0; i < N; ++i) {
    const Vec gi = g[i], ki = load(k + i * kLanes);
    for (int r = 0; r < R; ++r) {
      float* at = s + (r * N + i) * kLanes;
      store(at, fma(splat(delta[r]), ki, mul(load(at), gi)));
    }
  }
}

template <int N, int R, typename T>
void verify_rows(
    float* s,
    const float* q,
    const float* k,
    const T* v,
    Decay<N> g,
    float beta,
    T* y,
    float* delta) {
  Vec part[kRows];
  float sum[kRows], innovation[R];
  for (int r = 0; r < kRows; ++r) part[r] = splat(0.0f);
  for (int i = 0; i < N; ++i) {
    const Vec gi = g[i], ki = load(k + i * kLanes);
    for (int r = 0; r < R; ++r) {
      float* at = s + (r * N + i) * kLanes;
      const Vec decayed = mul(load(at), gi);
      store(at, decayed);
      part[r] = fma(decayed, ki, part[r]);
    }
  }
  sum4(part, sum);
  for (int r = 0; r < R; ++r) {
    const float error = to_float(v[r]) - sum[r];
    innovation[r] = beta * error;
    part[r] = splat(0.0f);
  }
  for (int i = 0; i < N; ++i) {
    const Vec ki = load(k + i * kLanes), qi = load(q + i * kLanes);
    for (int r = 0; r < R; ++r) {
      float* at = s + (r * N + i) * kLanes;
      const Vec updated = fma(splat(innovation[r]), ki, load(at));
      store(at, updated);
      part[r] = fma(updated, qi, part[r]);
    }
  }
  sum4(part, sum);
  for (int r = 0; r < R; ++r) {
    y[r] = from_float<T>(sum[r]);
    if (delta) delta[r] = innovation[r];
  }
}

/// Rows first .. last of one value head.
template <int N, typename T>
void head_rows(const GatedDelta& p, int b, int hv, int first, int last) {
  constexpr int Dk = N * kLanes;
  const int hk = hv / (p.value_heads / p.key_heads);
  const T *q = static_cast<const T*>(p.q), *k = static_cast<const T*>(p.k);
  const T *v = static_cast<const T*>(p.v), *tape_k = static_cast<const T*>(p.tape_k);
  T* y = static_cast<T*>(p.y);
  alignas(64) float s[kRowsOfTask * Dk];
  alignas(64) float kt[kTile * Dk];
  alignas(64) float qt[kTile * Dk];
  const size_t state_at = ((size_t(b) * p.value_heads + hv) * p.value_dim + first) * Dk;
  const int rows = last - first;
  std::memcpy(s, p.state + state_at, sizeof(float) * rows * Dk);
  auto decay = [&](const float* g, size_t at) {
    return p.vector_decay ? Decay<N>{g + at * Dk, 0.0f} : Decay<N>{nullptr, g[at]};
  };

  const int kept = p.tape_g ? p.keep[b] : 0;
  for (int start = 0; start < kept; start += kTile) {
    const int end = start + kTile < kept ? start + kTile : kept;
    for (int t = start; t < end; ++t) {
      const size_t at = (size_t(b) * p.tape_inputs + t) * p.key_heads + hk;
      widen(tape_k + at * Dk, kt + (t - start) * Dk, Dk);
    }
    auto replay = [&]<int R>(int row) {
      for (int t = start; t < end; ++t) {
        const size_t input = size_t(b) * p.tape_inputs + t;
        if (p.tape_valid && !p.tape_valid[input]) continue;
        const size_t at = input * p.value_heads + hv;
        const float* delta = p.tape_delta + at * p.value_dim + first + row;
        replay_rows<N, R>(s + row * Dk, kt + (t - start) * Dk, delta, decay(p.tape_g, at));
      }
    };
    int row = 0;
    for (; row + kRows <= rows; row += kRows) replay.template operator()<kRows>(row);
    for (; row < rows; ++row) replay.template operator()<1>(row);
  }
  if (p.tape_g && !p.commits && p.state_out) {
    std::memcpy(p.state_out + state_at, s, sizeof(float) * rows * Dk);
  }

  for (int start = 0; start < p.inputs; start += kTile) {
    const int end = start + kTile < p.inputs ? start + kTile : p.inputs;
    for (int t = start; t < end; ++t) {
      const size_t at = (size_t(b) * p.inputs + t) * p.key_heads + hk;
      widen(k + at * Dk, kt + (t - start) * Dk, Dk);
      widen(q + at * Dk, qt + (t - start) * Dk, Dk);
    }
    auto verify = [&]<int R>(int row) {
      for (int t = start; t < end; ++t) {
        const size_t input = size_t(b) * p.inputs + t;
        const size_t at = input * p.value_heads + hv;
        const size_t value_at = at * p.value_dim + first + row;
        float* delta = p.delta ? p.delta + value_at : nullptr;
        if (p.mask && !p.mask[input]) {
          for (int r = 0; r < R; ++r) {
            y[value_at + r] = from_float<T>(0.0f);
            if (delta) delta[r] = 0.0f;
          }
          continue;
        }
        verify_rows<N, R, T>(
            s + row * Dk,
            qt + (t - start) * Dk,
            kt + (t - start) * Dk,
            v + value_at,
            decay(p.g, at),
            p.beta[at],
            y + value_at,
            delta);
      }
    };
    int row = 0;
    for (; row + kRows <= rows; row += kRows) verify.template operator()<kRows>(row);
    for (; row < rows; ++row) verify.template operator()<1>(row);
  }
  if (p.commits) std::memcpy(p.state_out + state_at, s, sizeof(float) * rows * Dk);
}

template <int N, typename T>
void run(const GatedDelta& p, int part, int parts) {
  const int blocks = (p.value_dim + kRowsOfTask - 1) / kRowsOfTask;
  const int tasks = p.batch * p.value_heads * blocks;
  const int begin = int(size_t(tasks) * part / parts);
  const int end = int(size_t(tasks) * (part + 1) / parts);
  for (int task = begin; task < end; ++task) {
    const int head = task / blocks, first = task % blocks * kRowsOfTask;
    const int last = first + kRowsOfTask < p.value_dim ? first + kRowsOfTask : p.value_dim;
    head_rows<N, T>(p, head / p.value_heads, head % p.value_heads, first, last);
  }
}

template <typename T>
void run_dim(const GatedDelta& p, int part, int parts) {
  switch (p.key_dim) {
    case 32:
      return run<2, T>(p, part, parts);
    case 64:
      return run<4, T>(p, part, parts);
    case 96:
      return run<6, T>(p, part, parts);
    case 128:
      return run<8, T>(p, part, parts);
    case 160:
      return run<10, T>(p, part, parts);
    case 192:
      return run<12, T>(p, part, parts);
    case 224:
      return run<14, T>(p, part, parts);
    case 256:
      return run<16, T>(p, part, parts);
  }
}

}  // namespace

namespace DFLASH_ISA {

void gated_delta(const GatedDelta& p, int part, int parts) {
  switch (p.type) {
    case Type::f32:
      return run_dim<float>(p, part, parts);
    case Type::f16:
      return run_dim<Half>(p, part, parts);
    case Type::bf16:
      return run_dim<BFloat>(p, part, parts);
  }
}

}  // namespace DFLASH_ISA
}  // namespace dflash::cpu
