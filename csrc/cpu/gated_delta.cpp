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
void widen_as(const void* from, size_t at, float* to, int n) {
  for (int i = 0; i < n; ++i) to[i] = to_float(static_cast<const T*>(from)[at + i]);
}

void widen(Type type, const void* from, size_t at, float* to, int n) {
  type == Type::f32   ? widen_as<float>(from, at, to, n)
  : type == Type::f16 ? widen_as<Half>(from, at, to, n)
                      : widen_as<BFloat>(from, at, to, n);
}

template <typename T>
void narrow_as(const float* from, void* to, size_t at, int n) {
  for (int i = 0; i < n; ++i) static_cast<T*>(to)[at + i] = from_float<T>(from[i]);
}

void narrow(Type type, const float* from, void* to, size_t at, int n) {
  type == Type::f32   ? narrow_as<float>(from, to, at, n)
  : type == Type::f16 ? narrow_as<Half>(from, to, at, n)
                      : narrow_as<BFloat>(from, to, at, n);
}

template <int N>
struct ScalarDecay {  // one factor for a whole row
  Vec all;
  ScalarDecay(const float* g, size_t at) : all(splat(g[at])) {
  }
  Vec operator[](int) const {
    return all;
  }
};

template <int N>
struct VectorDecay {  // one for each column
  const float* columns;
  VectorDecay(const float* g, size_t at) : columns(g + at * N * kLanes) {
  }
  Vec operator[](int i) const {
    return load(columns + i * kLanes);
  }
};

template <int N, int R, typename Decay>
void replay_rows(float* s, const float* k, const float* delta, Decay g) {
  for (int i = 0; i < N; ++i) {
    const Vec gi = g[i], ki = load(k + i * kLanes);
    for (int r = 0; r < R; ++r) {
      float* at = s + (r * N + i) * kLanes;
      store(at, fma(splat(delta[r]), ki, mul(load(at), gi)));
    }
  }
}

template <int N, int R, typename Decay>
void verify_rows(
    float* s,
    const float* q,
    const float* k,
    const float* v,
    Decay g,
    float beta,
    float* y,
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
    const float error = v[r] - sum[r];
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
    y[r] = sum[r];
    if (delta) delta[r] = innovation[r];
  }
}

/// Rows first .. last of one value head.
template <int N, typename Decay>
void head_rows(const GatedDelta& p, int b, int hv, int first, int last) {
  constexpr int Dk = N * kLanes;
  const int hk = hv / (p.value_heads / p.key_heads);
  alignas(64) float s[kRowsOfTask * Dk];
  alignas(64) float kt[kTile * Dk];
  alignas(64) float qt[kTile * Dk];
  float vt[kTile * kRowsOfTask];
  float yt[kTile * kRowsOfTask];
  const size_t state_at = ((size_t(b) * p.value_heads + hv) * p.value_dim + first) * Dk;
  const int rows = last - first;
  std::memcpy(s, p.state + state_at, sizeof(float) * rows * Dk);

  const int kept = p.tape_g ? p.keep[b] : 0;
  for (int start = 0; start < kept; start += kTile) {
    const int end = start + kTile < kept ? start + kTile : kept;
    for (int t = start; t < end; ++t) {
      const size_t at = (size_t(b) * p.tape_inputs + t) * p.key_heads + hk;
      widen(p.type, p.tape_k, at * Dk, kt + (t - start) * Dk, Dk);
    }
    auto replay = [&]<int R>(int row) {
      for (int t = start; t < end; ++t) {
        const size_t input = size_t(b) * p.tape_inputs + t;
        if (p.tape_valid && !p.tape_valid[input]) continue;
        const size_t at = input * p.value_heads + hv;
        const float* delta = p.tape_delta + at * p.value_dim + first + row;
        replay_rows<N, R>(s + row * Dk, kt + (t - start) * Dk, delta, Decay(p.tape_g, at));
      }
    };
    int row = 0;
    for (; row + kRows <= rows; row += kRows) replay.template operator()<kRows>(row);
    for (; row < rows; ++row) replay.template operator()<1>(row);
  }
  if (p.tape_g && !p.commits && p.state_out) {
    std::memcpy(p.state_out + state_at, s, sizeof(float) * rows * Dk);
  }

  auto value_at = [&](int t) {  // the task's first row in v, y and delta
    return ((size_t(b) * p.inputs + t) * p.value_heads + hv) * p.value_dim + first;
  };
  for (int start = 0; start < p.inputs; start += kTile) {
    const int end = start + kTile < p.inputs ? start + kTile : p.inputs;
    for (int t = start; t < end; ++t) {
      const size_t at = (size_t(b) * p.inputs + t) * p.key_heads + hk;
      widen(p.type, p.k, at * Dk, kt + (t - start) * Dk, Dk);
      widen(p.type, p.q, at * Dk, qt + (t - start) * Dk, Dk);
      widen(p.type, p.v, value_at(t), vt + (t - start) * kRowsOfTask, rows);
    }
    auto verify = [&]<int R>(int row) {
      for (int t = start; t < end; ++t) {
        const size_t input = size_t(b) * p.inputs + t;
        const size_t at = input * p.value_heads + hv;
        const int in_tile = (t - start) * kRowsOfTask + row;
        float* delta = p.delta ? p.delta + value_at(t) + row : nullptr;
        if (p.mask && !p.mask[input]) {
          for (int r = 0; r < R; ++r) {
            yt[in_tile + r] = 0.0f;
            if (delta) delta[r] = 0.0f;
          }
          continue;
        }
        verify_rows<N, R>(
            s + row * Dk,
            qt + (t - start) * Dk,
            kt + (t - start) * Dk,
            vt + in_tile,
            Decay(p.g, at),
            p.beta[at],
            yt + in_tile,
            delta);
      }
    };
    int row = 0;
    for (; row + kRows <= rows; row += kRows) verify.template operator()<kRows>(row);
    for (; row < rows; ++row) verify.template operator()<1>(row);
    for (int t = start; t < end; ++t) {
      narrow(p.type, yt + (t - start) * kRowsOfTask, p.y, value_at(t), rows);
    }
  }
  if (p.commits) std::memcpy(p.state_out + state_at, s, sizeof(float) * rows * Dk);
}

template <int N, typename Decay>
void run(const GatedDelta& p, int part, int parts) {
  const int blocks = (p.value_dim + kRowsOfTask - 1) / kRowsOfTask;
  const int tasks = p.batch * p.value_heads * blocks;
  const int begin = int(size_t(tasks) * part / parts);
  const int end = int(size_t(tasks) * (part + 1) / parts);
  for (int task = begin; task < end; ++task) {
    const int head = task / blocks, first = task % blocks * kRowsOfTask;
    const int last = first + kRowsOfTask < p.value_dim ? first + kRowsOfTask : p.value_dim;
    head_rows<N, Decay>(p, head / p.value_heads, head % p.value_heads, first, last);
  }
}

template <int N>
void run_decay(const GatedDelta& p, int part, int parts) {
  if (p.vector_decay) {
    run<N, VectorDecay<N>>(p, part, parts);
  } else {
    run<N, ScalarDecay<N>>(p, part, parts);
  }
}

}  // namespace

namespace DFLASH_ISA {

void gated_delta(const GatedDelta& p, int part, int parts) {
  switch (p.key_dim) {
    case 32:
      return run_decay<2>(p, part, parts);
    case 64:
      return run_decay<4>(p, part, parts);
    case 96:
      return run_decay<6>(p, part, parts);
    case 128:
      return run_decay<8>(p, part, parts);
    case 160:
      return run_decay<10>(p, part, parts);
    case 192:
      return run_decay<12>(p, part, parts);
    case 224:
      return run_decay<14>(p, part, parts);
    case 256:
      return run_decay<16>(p, part, parts);
  }
}

}  // namespace DFLASH_ISA
}  // namespace dflash::cpu
