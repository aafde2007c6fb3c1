// Attention over fixed chunks of key positions. A sub-block of 16 keys is converted once for all of
// a key head's queries: keys transposed, so that a score is one chain of fmas over d with 16 keys
// side by side, and values as rows. Within a chunk p v adds in ascending position, the denominator
// in lane position % 16, and lanes as in vec.h; chunks add in ascending order.
#include "kernels_isa.h"
#include "vec.h"
#include "widen.h"

namespace dflash::cpu {
namespace {

constexpr int kChunk = kAttentionChunk;
constexpr int kBlocks = kChunk / kLanes;  // sub-blocks of a chunk
constexpr int kQueries = kAttentionQueries;
constexpr int kMaxDim = 256;
#if defined(__AVX512F__)
constexpr int kRows = 12;  // queries whose accumulators fit into the registers
#else
constexpr int kRows = 6;
#endif
constexpr uint32_t kAll = (1u << kLanes) - 1;

/// Rows become columns.
inline void transpose(Eight* x) {
  Eight a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    a[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    a[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int from = i / 2 * 4 + i % 2, to = i / 2 * 4 + i % 2 * 2;
    b[to] = __builtin_shufflevector(a[from], a[from + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    b[to + 1] = __builtin_shufflevector(a[from], a[from + 2], 2, 3, 10, 11, 6, 7, 14, 15);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    x[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

/// Values d .. d + 15 of eight rows, as eight columns of [16, 16].
template <typename T>
inline void load_columns(const T* const* rows, int d, float* to) {
  for (int part = 0; part < 16; part += 8) {
    Eight x[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) widen8(rows[i] + d + part, x[i]);
    transpose(x);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) std::memcpy(to + (part + i) * kLanes, &x[i], sizeof x[i]);
  }
}
template <>
inline void load_columns<BFloat>(const BFloat* const* rows, int d, float* to) {
  Eight x[8];  // pairs of values
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) read(rows[i] + d, x[i]);
  transpose(x);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const EightWords pair = EightWords(x[i]), even = pair << 16, odd = pair & 0xffff0000u;
    std::memcpy(to + 2 * i * kLanes, &even, sizeof even);
    std::memcpy(to + (2 * i + 1) * kLanes, &odd, sizeof odd);
  }
}

/// 16 rows as the columns of [D, 16]; if there are fewer, the last one also in the others' place.
template <typename T>
void load_keys(const T* from, int count, int D, float* to) {
  for (int half = 0; half < kLanes; half += 8) {
    const T* rows[8];
    for (int i = 0; i < 8; ++i) {
      rows[i] = from + size_t(half + i < count ? half + i : count - 1) * D;
    }
    for (int d = 0; d < D; d += 16) {
      load_columns(rows, d, to + d * kLanes + half);
    }
  }
}

/// What comes two sub-blocks later: fetched bit by bit, while this one is multiplied.
struct Ahead {
  const char* at;
  int bytes;  // of 16 values
  template <typename T>
  Ahead(const T* block, int dim)
      : at(reinterpret_cast<const char*>(block + 2 * kLanes * dim)), bytes(kLanes * sizeof(T)) {
  }
  void fetch(int i) const {
    __builtin_prefetch(at + i * bytes);
  }
};

/// Calls run.operator()<n>() for n in 1 .. kRows.
template <int N = kRows, typename Run>
inline void with_rows(int n, Run&& run) {
  if (n == N) return run.template operator()<N>();
  if constexpr (N > 1) with_rows<N - 1>(n, run);
}

/// Scores of n queries with 16 keys: [n, 16] in rows of kChunk.
template <int N>
void score_rows(const float* q, const float* keys, int D, float scale, Ahead ahead, float* to) {
  Vec sum[N];
  for (Vec& x : sum) x = splat(0.0f);
  for (int d = 0; d < D; ++d) {
    ahead.fetch(d);
    const Vec key = load(keys + d * kLanes);
    for (int r = 0; r < N; ++r) sum[r] = fma(splat(q[r * D + d]), key, sum[r]);
  }
  for (int r = 0; r < N; ++r) store(to + r * kChunk, mul(sum[r], splat(scale)));
}

/// Adds p v of keys first .. last - 1 of a sub-block to o [n, Dv].
template <int N>
void value_rows(
    const float* p, const float* values, int Dv, int first, int last, Ahead ahead, float* o) {
  for (int d = 0; d < Dv; d += kLanes) {
    Vec sum[N];
    for (int r = 0; r < N; ++r) sum[r] = load(o + r * Dv + d);
    for (int key = first; key < last; ++key) {
      ahead.fetch(d + key);
      const Vec value = load(values + key * Dv + d);
      for (int r = 0; r < N; ++r) sum[r] = fma(splat(p[r * kChunk + key]), value, sum[r]);
    }
    for (int r = 0; r < N; ++r) store(o + r * Dv + d, sum[r]);
  }
}

/// Bits first .. last - 1 of a sub-block, wherever the two lie.
inline uint32_t run_of_bits(int first, int last) {
  first = first < 0 ? 0 : first > kLanes ? kLanes : first;
  last = last < first ? first : last > kLanes ? kLanes : last;
  return (1u << last) - (1u << first);
}

/// Bit i: whether the block's row t sees the key at position start + i.
uint32_t seen_by(const VerifyAttention& p, int length, int t, int start) {
  const int own = length + t, given = length + p.inputs;
  const int begin = (own < p.window ? 0 : own - p.window + 1) - start;
  if (!p.mask) return run_of_bits(begin, (p.causal ? own + 1 : given) - start);
  uint32_t bits = run_of_bits(begin, length - start);
  for (int at = length > start ? length : start; at < given && at < start + kLanes; ++at) {
    bits |= uint32_t(p.mask[t * p.inputs + at - length]) << (at - start);
  }
  return bits & run_of_bits(begin, kLanes);
}

/// Where the block's keys are unseen, `other` replaces their entries.
inline void replace_unseen(float* at, uint32_t seen, float other) {
  if (seen == kAll) return;
  for (int i = 0; i < kLanes; ++i) at[i] = seen >> i & 1 ? at[i] : other;
}

/// Scores of a chunk to exp(score - m) in place, zero where unseen; m and l.
void exponentials(float* s, const uint32_t* seen, float* m, float* l) {
  int first = 0, last = kBlocks;
  while (first < last && !seen[first]) ++first;
  while (first < last && !seen[last - 1]) --last;
  Eight top[2], sum[2] = {};
  for (int i = 0; i < 8; ++i) top[0][i] = top[1][i] = -__builtin_inff();
  for (int block = first; block < last; ++block) {
    float* at = s + block * kLanes;
    replace_unseen(at, seen[block], -__builtin_inff());
    for (int half = 0; half < 2; ++half) {
      Eight x;
      read(at + 8 * half, x);
      top[half] = x > top[half] ? x : top[half];
    }
  }
  top[0] = top[0] > top[1] ? top[0] : top[1];
  float most = top[0][0];
  for (int i = 1; i < 8; ++i) most = top[0][i] > most ? top[0][i] : most;
  for (int i = first * kLanes; i < last * kLanes; ++i) s[i] = exp_f32(s[i] - most);
  for (int block = first; block < last; ++block) {
    float* at = s + block * kLanes;
    replace_unseen(at, seen[block], 0.0f);
    for (int half = 0; half < 2; ++half) {
      Eight x;
      read(at + 8 * half, x);
      sum[half] += x;
    }
  }
  const Eight t = sum[0] + sum[1];
  *m = most;
  *l = ((t[0] + t[1]) + (t[2] + t[3])) + ((t[4] + t[5]) + (t[6] + t[7]));
}

/// m, l and o of the queries over one chunk.
template <typename T>
void chunk_of_head(
    const VerifyAttention& p, const float* q, int b, int head, int chunk, float* o, float* stats) {
  const int length = p.lengths[b], group = p.heads / p.key_heads, n = p.queries;
  const int D = p.key_dim, Dv = p.value_dim, start = chunk * kChunk;
  const int end = length + p.inputs - start < kChunk ? length + p.inputs - start : kChunk;
  const size_t row = (size_t(b) * p.key_heads + head) * p.capacity + start;
  const T* keys = static_cast<const T*>(p.k) + row * D;
  const T* values = static_cast<const T*>(p.v) + row * Dv;
  alignas(64) float tile[kLanes * kMaxDim], s[kQueries * kChunk];
  uint32_t seen[kQueries][kBlocks], by_any[kBlocks] = {};
  for (int r = 0; r < n; ++r) {
    const int t = (p.first + r) / group;
    const bool like_last = r > 0 && t == (p.first + r - 1) / group;
    for (int block = 0; block < kBlocks; ++block) {
      seen[r][block] =
          like_last ? seen[r - 1][block] : seen_by(p, length, t, start + block * kLanes);
      by_any[block] |= seen[r][block];
    }
  }
  for (int block = 0; block < kBlocks; ++block) {
    if (!by_any[block]) continue;
    const int at = block * kLanes, count = end - at < kLanes ? end - at : kLanes;
    const Ahead ahead(keys + size_t(at) * D, D);
    load_keys(keys + size_t(at) * D, count, D, tile);
    for (int r = 0, rows; r < n; r += rows) {
      rows = (n - r) / ((n - r + kRows - 1) / kRows);
      with_rows(rows, [&]<int N>() {
        score_rows<N>(q + r * D, tile, D, p.scale, ahead, s + r * kChunk + at);
      });
    }
  }
  for (int r = 0; r < n; ++r) {
    exponentials(s + r * kChunk, seen[r], stats + 2 * r, stats + 2 * r + 1);
  }
  std::memset(o, 0, sizeof(float) * n * Dv);
  for (int block = 0; block < kBlocks; ++block) {
    if (!by_any[block]) continue;
    const int at = block * kLanes, count = end - at < kLanes ? end - at : kLanes;
    const Ahead ahead(values + size_t(at) * Dv, Dv);
    widen(values + size_t(at) * Dv, count * Dv, tile);
    for (int r = 0, rows; r < n; r += rows) {
      const uint32_t bits = seen[r][block];
      for (rows = 1; rows < kRows && r + rows < n && seen[r + rows][block] == bits;) ++rows;
      for (int first = 0, last; first < kLanes; first = last + 1) {  // runs of seen keys
        if (last = first; !(bits >> first & 1)) continue;
        while (last < kLanes && bits >> last & 1) ++last;
        with_rows(rows, [&]<int N>() {
          value_rows<N>(s + r * kChunk + at, tile, Dv, first, last, ahead, o + r * Dv);
        });
      }
    }
  }
}

template <typename T>
void chunks(const VerifyAttention& p, int part, int parts) {
  const int group = p.heads / p.key_heads, D = p.key_dim;
  const int tasks = p.batch * p.key_heads * p.chunks;
  const int begin = int(size_t(tasks) * part / parts);
  const int end = int(size_t(tasks) * (part + 1) / parts);
  alignas(64) float q[kQueries * kMaxDim];
  int loaded = -1;
  for (int task = begin; task < end; ++task) {
    const int pair = task / p.chunks, b = pair / p.key_heads, head = pair % p.key_heads;
    const int chunk = p.first_chunk[b] + task % p.chunks;
    if (chunk >= p.end_chunk[b]) continue;
    if (pair != loaded) {
      for (int r = 0; r < p.queries; ++r) {
        const int t = (p.first + r) / group, h = head * group + (p.first + r) % group;
        const size_t row = (size_t(b) * p.heads + h) * p.inputs + t;
        widen(static_cast<const T*>(p.q) + row * D, D, q + r * D);
      }
      loaded = pair;
    }
    const size_t at = size_t(task) * p.queries;
    chunk_of_head<T>(p, q, b, head, chunk, p.sums + at * p.value_dim, p.stats + at * 2);
  }
}

template <typename T>
void combine(const VerifyAttention& p, int part, int parts) {
  const int group = p.heads / p.key_heads, Dv = p.value_dim;
  const int rows = p.batch * p.key_heads * p.queries;
  const int begin = int(size_t(rows) * part / parts), end = int(size_t(rows) * (part + 1) / parts);
  for (int row = begin; row < end; ++row) {
    const int pair = row / p.queries, r = row % p.queries;
    const int b = pair / p.key_heads, t = (p.first + r) / group;
    const int h = pair % p.key_heads * group + (p.first + r) % group;
    const int seen = p.end_chunk[b] - p.first_chunk[b];
    auto at = [&](int chunk) { return (size_t(pair) * p.chunks + chunk) * p.queries + r; };
    float most = p.sinks ? p.sinks[h] : -__builtin_inff();
    bool any = false;
    for (int chunk = 0; chunk < seen; ++chunk) {
      const float* stats = p.stats + at(chunk) * 2;
      any |= stats[1] != 0.0f;
      most = stats[0] > most ? stats[0] : most;
    }
    alignas(64) float o[kMaxDim] = {};
    float l = p.sinks ? exp_f32(p.sinks[h] - most) : 0.0f;
    for (int chunk = 0; chunk < seen; ++chunk) {
      const float* stats = p.stats + at(chunk) * 2;
      if (stats[1] == 0.0f) continue;
      const float weight = exp_f32(stats[0] - most);
      const float* sums = p.sums + at(chunk) * Dv;
      l = __builtin_fmaf(weight, stats[1], l);
      for (int d = 0; d < Dv; ++d) o[d] = __builtin_fmaf(weight, sums[d], o[d]);
    }
    T* out = static_cast<T*>(p.out) + ((size_t(b) * p.heads + h) * p.inputs + t) * Dv;
    for (int d = 0; d < Dv; ++d) out[d] = from_float<T>(any ? o[d] / l : 0.0f);
  }
}

}  // namespace

namespace DFLASH_ISA {

void verify_attention(const VerifyAttention& p, int part, int parts) {
  switch (p.type) {
    case Type::f32:
      return chunks<float>(p, part, parts);
    case Type::f16:
      return chunks<Half>(p, part, parts);
    case Type::bf16:
      return chunks<BFloat>(p, part, parts);
  }
}

void combine_attention(const VerifyAttention& p, int part, int parts) {
  switch (p.type) {
    case Type::f32:
      return combine<float>(p, part, parts);
    case Type::f16:
      return combine<Half>(p, part, parts);
    case Type::bf16:
      return combine<BFloat>(p, part, parts);
  }
}

}  // namespace DFLASH_ISA
}  // namespace dflash::cpu
