// Products whose bits do not depend on the number of rows. The lanes of a Vec are sixteen outputs,
// k runs in order: part = fma(x[k], w[k], part) over a panel (128 k, or a group of quantised
// weights), then acc += part, or acc = fma(scale, part, acc) and acc = fma(bias, sum of the group's
// x, acc). x[k] and w[k] of quantised weights may carry 2^-n and 2^n, which changes no bit above
// 2^-98. Tiles, blocks and packing change which products stand together in registers, nothing else.
#include <type_traits>
#include <utility>

#include "kernels.h"
#include "kernels_isa.h"
#include "weights.h"

namespace dflash::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 12;  // whose accumulators fill the registers
#else
constexpr int kTileRows = 6;
#endif
constexpr int kBlocks = 4;  // of sixteen outputs: a thread's unit of work

/// The rows of a job in tiles of nearly equal height; a tile's x lies as [k][rows].
template <typename F>
void for_tiles(int rows, F&& f) {
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  for (int tile = 0; tile < tiles; ++tile) {
    const int first = rows * tile / tiles;
    f(first, rows * (tile + 1) / tiles - first);
  }
}

int padded_inputs(const Matmul& p) {
  const int values = in_word(p.weights);
  return (p.inputs + values - 1) / values * values;
}

int total_rows(const Matmul& p) {
  const MatmulJob& last = p.jobs[p.job_count - 1];
  return last.first + last.rows;
}

/// What x[k] is multiplied by, so that its word's weight need not be shifted (see words.h).
struct Factors {
  float of[8];
  explicit Factors(Weights weights) {
    const int values = in_word(weights), bits = 32 / values;
    const bool integers = weights == Weights::bits8 || weights == Weights::bits4;
    for (int k = 0; k < 8; ++k) {
      const int at = k % values;
      of[k] = integers && at + 1 < values ? 1.0f / float(1 << at * bits) : 1.0f;
    }
  }
};

template <typename T>
void widen_row(const Matmul& p, int source, float* to, int stride, float* sums) {
  const T* from = static_cast<const T*>(p.x) + size_t(source) * p.inputs;
  const Factors factors(p.weights);
  for (int k = 0; k < p.inputs; ++k) to[k * stride] = to_float(from[k]) * factors.of[k % 8];
  for (int k = p.inputs; k < padded_inputs(p); ++k) to[k * stride] = 0.0f;
  if (!p.group) return;
  constexpr int kChains = 8;  // groups at once
  const int groups = p.inputs / p.group;
  for (int g = 0; g < groups; g += kChains) {
    const int count = groups - g < kChains ? groups - g : kChains;
    float sum[kChains] = {};
    for (int k = 0; k < p.group; ++k) {
      for (int i = 0; i < count; ++i) sum[i] += to_float(from[(g + i) * p.group + k]);
    }
    for (int i = 0; i < count; ++i) sums[g + i] = sum[i];
  }
}

template <typename T>
void widen(const Matmul& p, int part, int parts) {
  const int all = total_rows(p), begin = int(size_t(all) * part / parts),
            end = int(size_t(all) * (part + 1) / parts);
  const size_t padded = padded_inputs(p), groups = p.group ? p.inputs / p.group : 0;
  float* sums = p.wide + all * padded;
  for (int i = 0; i < p.job_count; ++i) {
    for_tiles(p.jobs[i].rows, [&](int first, int rows) {
      first += p.jobs[i].first;
      for (int r = 0; r < rows; ++r) {
        const int row = first + r;
        if (row < begin || row >= end) continue;
        float* to = p.wide + first * padded + r;
        widen_row<T>(p, p.source[row], to, rows, sums + row * groups);
      }
    });
  }
}

template <typename T>
void store_as(const Matmul& p, size_t at, int count, const float* sums) {
  T* out = static_cast<T*>(p.out) + at;
  for (int i = 0; i < count; ++i) {
    const float x = sums[i];
    out[i] = from_float<T>(x == x ? x : __builtin_nanf(""));  // one NaN, whichever came first
  }
}

/// Sixteen outputs of a row: bias, rounding.
void finish(const Matmul& p, int expert, int block, int row, float* sums) {
  const int first = block * kLanes;
  const int count = p.outputs - first < kLanes ? p.outputs - first : kLanes;
  if (p.bias) {
    const size_t at = size_t(expert) * p.outputs + first;
    for (int i = 0; i < count; ++i) {
      sums[i] += p.bias_type == Type::f32   ? static_cast<const float*>(p.bias)[at + i]
                 : p.bias_type == Type::f16 ? to_float(static_cast<const Half*>(p.bias)[at + i])
                                            : to_float(static_cast<const BFloat*>(p.bias)[at + i]);
    }
  }
  const size_t at = size_t(p.target[row]) * p.outputs + first;
  p.out_type == Type::f32   ? store_as<float>(p, at, count, sums)
  : p.out_type == Type::f16 ? store_as<Half>(p, at, count, sums)
                            : store_as<BFloat>(p, at, count, sums);
}

/// What the sums of a group are multiplied by: sixteen values of block 0, `stride` to the next.
struct Scales {
  const void *scales, *biases;  ///< null where the weights are dense
  size_t stride;
  Type type;
};

template <int B>
struct Panel {
  const uint32_t* words;  ///< of block 0
  size_t stride;          ///< words to the next block
  int count;              ///< words of a lane
  Scales of_group;
  size_t ahead = 0;  ///< words from here to those that memory is asked for
};

template <typename F, int... J>
inline void each(F&& f, std::integer_sequence<int, J...>) {
  (f(std::integral_constant<int, J>()), ...);
}

/// f of each of 0 .. N - 1 as a type.
template <int N, typename F>
inline void unrolled(F&& f) {
  each(f, std::make_integer_sequence<int, N>());
}

/// R rows by B blocks: one panel into acc [B][R][16]. x: [k][R]; sums: of this group, by row.
/// One block leaves its widened weights in `wide`, for the tiles after it.
template <typename W, int R, int B>
inline void multiply(
    const Panel<B>& panel,
    const float* x,
    const float* sums,
    size_t groups,
    float* acc,
    float* wide = nullptr) {
  constexpr bool kKeeps = B == 1 && !std::is_same_v<W, F32>;
  Vec part[B][R];
  for (int b = 0; b < B; ++b) {
    for (int r = 0; r < R; ++r) part[b][r] = splat(0.0f);
  }
  const uint32_t* words = panel.words;
  for (int i = 0; i < panel.count; ++i) {
    unrolled<W::kValues>([&]<int J>(std::integral_constant<int, J>) {
      for (int b = 0; b < B; ++b) {
        const uint32_t* word = words + b * panel.stride;
        if constexpr (J == 0 && B == 1) __builtin_prefetch(word + panel.ahead);
        const Vec w = W::template at<J>(word);
        if constexpr (kKeeps) store(wide + J * kLanes, w);
        for (int r = 0; r < R; ++r) part[b][r] = fma(splat(x[J * R + r]), w, part[b][r]);
      }
    });
    words += kLanes;
    x += W::kValues * R;
    if constexpr (kKeeps) wide += W::kValues * kLanes;
  }
  const Scales& group = panel.of_group;
  for (int b = 0; b < B; ++b) {
    float* to = acc + b * R * kLanes;
    if (!group.scales) {
      for (int r = 0; r < R; ++r) {
        store(to + r * kLanes, add(load(to + r * kLanes), part[b][r]));
      }
      continue;
    }
    const Vec scale = load_as(group.type, group.scales, b * group.stride);
    const Vec bias = load_as(group.type, group.biases, b * group.stride);
    for (int r = 0; r < R; ++r) {
      const Vec sum = fma(scale, part[b][r], load(to + r * kLanes));
      store(to + r * kLanes, fma(bias, splat(sums[r * groups]), sum));
    }
  }
}

/// Where a job's x and weights lie.
template <typename W>
struct Walk {
  const Matmul& p;
  const MatmulJob& job;
  int words, panel, groups;  ///< words of a lane, and of a panel of it; groups of a row
  const float *x, *sums;

  Walk(const Matmul& p, const MatmulJob& job)
      : p(p),
        job(job),
        words((p.inputs + W::kValues - 1) / W::kValues),
        panel((p.group ? p.group : kPanel) / W::kValues),
        groups(p.group ? p.inputs / p.group : 0) {
    const size_t padded = size_t(words) * W::kValues;
    x = p.wide + job.first * padded;
    sums = p.wide + total_rows(p) * padded + size_t(job.first) * groups;
  }

  size_t block_of(int block) const {
    return size_t(job.expert) * ((p.outputs + kLanes - 1) / kLanes) + block;
  }

  const uint32_t* packed(int block, int word) const {
    return static_cast<const uint32_t*>(p.weight) + (block_of(block) * words + word) * kLanes;
  }

  /// `count` words of sixteen rows as they are packed.
  const uint32_t* words_of(int block, int word, int count, uint32_t* buffer) const {
    if (p.packed) return packed(block, word);
    const int first = block * kLanes;
    constexpr bool halves = W::kValues == 2;
    const size_t row_bytes = halves ? size_t(p.inputs) * 2 : size_t(words) * 4;
    const size_t at = (size_t(job.expert) * p.outputs + first) * row_bytes + size_t(word) * 4;
    const char* from = static_cast<const char*>(p.weight) + at;
    const size_t left = row_bytes - size_t(word) * 4, most = size_t(count) * 4;
    const int bytes = int(left < most ? left : most), rows = p.outputs - first;
    if constexpr (std::is_same_v<W, F16>) {
      transpose(from, row_bytes, rows, bytes, 2 * count, reinterpret_cast<uint16_t*>(buffer));
    } else {
      transpose(from, row_bytes, rows, bytes, count, buffer);
    }
    return buffer;
  }

  /// Scales and biases of a group; those of sixteen rows that are not packed go into `buffer`.
  Scales scales_of(int block, int group, uint32_t* buffer) const {
    if (!groups) return {nullptr, nullptr, 0, p.scale_type};
    const int bytes = p.scale_type == Type::f32 ? 4 : 2;
    const size_t row = p.packed
                           ? block_of(block) * kLanes * groups + size_t(group) * kLanes
                           : (size_t(job.expert) * p.outputs + block * kLanes) * groups + group;
    const char* scales = static_cast<const char*>(p.scales) + row * bytes;
    const char* biases = static_cast<const char*>(p.biases) + row * bytes;
    if (p.packed) return {scales, biases, size_t(groups) * kLanes, p.scale_type};
    const size_t stride = size_t(groups) * bytes;
    const int rows = p.outputs - block * kLanes;
    if (bytes == 4) {
      transpose(scales, stride, rows, bytes, 1, buffer);
      transpose(biases, stride, rows, bytes, 1, buffer + kLanes);
    } else {
      transpose(scales, stride, rows, bytes, 1, reinterpret_cast<uint16_t*>(buffer));
      transpose(biases, stride, rows, bytes, 1, reinterpret_cast<uint16_t*>(buffer + kLanes));
    }
    return {buffer, buffer + kLanes, 0, p.scale_type};
  }
};

/// Few rows, packed weights: B blocks at once, widened in registers.
template <typename W, int R, int B>
void fused(const Walk<W>& walk, int block) {
  alignas(64) float acc[B * R * kLanes] = {};
  const uint32_t* words = walk.packed(block, 0);
  Scales of_group = walk.scales_of(block, 0, nullptr);
  const int group_bytes = kLanes * (of_group.type == Type::f32 ? 4 : 2);
  for (int word = 0, group = 0; word < walk.words; word += walk.panel, ++group) {
    const int left = walk.words - word;
    const Panel<B> panel = {
        words + size_t(word) * kLanes,
        size_t(walk.words) * kLanes,
        left < walk.panel ? left : walk.panel,
        of_group};
    const float* x = walk.x + size_t(word) * W::kValues * R;
    multiply<W, R>(panel, x, walk.sums + group, walk.groups, acc);
    if (walk.groups) {
      of_group.scales = static_cast<const char*>(of_group.scales) + group_bytes;
      of_group.biases = static_cast<const char*>(of_group.biases) + group_bytes;
    }
  }
  for (int b = 0; b < B; ++b) {
    for (int r = 0; r < R; ++r) {
      finish(walk.p, walk.job.expert, block + b, walk.job.first + r, acc + (b * R + r) * kLanes);
    }
  }
}

/// Any rows, one block: its weights are widened by the first tile, for all.
template <typename W>
void one_block(const Walk<W>& walk, int block) {
  alignas(64) float acc[kJobRows * kLanes] = {};
  alignas(64) uint32_t gathered[kPanel * kLanes];
  alignas(64) uint32_t gathered_scales[2 * kLanes];
  alignas(64) float wide[kPanel * kLanes];
  constexpr int V = W::kValues;
  const int rows = walk.job.rows, padded = walk.words * V;
  for (int word = 0, group = 0; word < walk.words; word += walk.panel, ++group) {
    const int left = walk.words - word, count = left < walk.panel ? left : walk.panel;
    const Scales scales = walk.scales_of(block, group, gathered_scales);
    const uint32_t* words = walk.words_of(block, word, count, gathered);
    const bool in_place = std::is_same_v<W, F32>;
    const uint32_t* later = in_place ? words : reinterpret_cast<const uint32_t*>(wide);
    for_tiles(rows, [&](int first, int height) {
      const float* x = walk.x + size_t(first) * padded + word * V * height;
      const float* sums = walk.sums + size_t(first) * walk.groups + group;
      float* to = acc + first * kLanes;
      unrolled<kTileRows>([&]<int J>(std::integral_constant<int, J>) {
        constexpr int R = J + 1;
        if (height != R) return;
        if (first == 0) {
          const size_t next = walk.p.packed ? count * kLanes : 0;
          const Panel<1> panel = {words, 0, count, scales, next};
          multiply<W, R>(panel, x, sums, walk.groups, to, wide);
        } else {
          const Panel<1> panel = {later, 0, count * V, scales};
          multiply<F32, R>(panel, x, sums, walk.groups, to);
        }
      });
    });
  }
  for (int r = 0; r < rows; ++r) {
    finish(walk.p, walk.job.expert, block, walk.job.first + r, acc + r * kLanes);
  }
}

template <typename W>
void run(const Matmul& p, int part, int parts) {
  const int blocks = (p.outputs + kLanes - 1) / kLanes, units = (blocks + kBlocks - 1) / kBlocks;
  const int begin = int(size_t(units) * part / parts) * kBlocks;
  const int end = int(size_t(units) * (part + 1) / parts) * kBlocks;
  for (int unit = begin; unit < end; unit += kBlocks) {
    const int last = unit + kBlocks < blocks ? unit + kBlocks : blocks;
    for (int i = 0; i < p.job_count; ++i) {
      const Walk<W> walk(p, p.jobs[i]);
      const int rows = p.jobs[i].rows;
      int block = unit;
      if (p.packed && rows == 1) {
        for (; block + 4 <= last; block += 4) fused<W, 1, 4>(walk, block);
      } else if (p.packed && rows == 2) {
        for (; block + 2 <= last; block += 2) fused<W, 2, 2>(walk, block);
      }
      for (; block < last; ++block) one_block<W>(walk, block);
    }
  }
}

}  // namespace

namespace DFLASH_ISA {

void matmul_widen(const Matmul& p, int part, int parts) {
  switch (p.x_type) {
    case Type::f32:
      return widen<float>(p, part, parts);
    case Type::f16:
      return widen<Half>(p, part, parts);
    case Type::bf16:
      return widen<BFloat>(p, part, parts);
  }
}

void matmul(const Matmul& p, int part, int parts) {
  switch (p.weights) {
    case Weights::f32:
      return run<F32>(p, part, parts);
    case Weights::f16:
      return run<F16>(p, part, parts);
    case Weights::bf16:
      return run<BF16>(p, part, parts);
    case Weights::bits8:
      return run<Integers<8>>(p, part, parts);
    case Weights::bits4:
      return run<Integers<4>>(p, part, parts);
  }
}

}  // namespace DFLASH_ISA
}  // namespace dflash::cpu
