// The CPU kernels: plain pointers, no MLX, compiled once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash::cpu {

enum class Type { f32, f16, bf16 };

struct GatedDelta {
  const void *q, *k;        ///< [B, T, Hk, Dk]
  const void* v;            ///< [B, T, Hv, Dv]
  const float* g;           ///< [B, T, Hv] or [B, T, Hv, Dk]
  const float* beta;        ///< [B, T, Hv]
  const float* state;       ///< [B, Hv, Dv, Dk]
  const bool* mask;         ///< [B, T] or null
  const float* tape_g;      ///< null without a tape
  const void* tape_k;       ///< [B, tape_inputs, Hk, Dk]
  const float* tape_delta;  ///< [B, tape_inputs, Hv, Dv]
  const bool* tape_valid;   ///< [B, tape_inputs] or null
  const int* keep;          ///< [B]
  void* y;                  ///< [B, T, Hv, Dv]
  float* delta;             ///< [B, T, Hv, Dv], null where nothing is recorded
  float* state_out;         ///< [B, Hv, Dv, Dk], null where the state is not written
  bool commits;             ///< state_out is the state after the inputs, else after the replay
  bool vector_decay;
  int batch, inputs, tape_inputs, key_heads, value_heads, key_dim, value_dim;
  Type type;
};

struct Gates {
  const void *a, *b;             ///< [rows, heads]
  const float *A_log, *dt_bias;  ///< [heads]
  float *g, *beta;               ///< [rows, heads]
  size_t rows;
  int heads;
  Type type;
};

struct CausalConv1d {
  const void* x;       ///< [B, T, C]
  const void* weight;  ///< [C, K]
  const void* window;  ///< [B, K - 1, C]
  void* out;           ///< [B, T, C]
  int batch, inputs, channels, taps;
  Type type;
};

inline constexpr int kAttentionChunk = 256;   ///< key positions, part of the arithmetic
inline constexpr int kAttentionQueries = 64;  ///< most queries of a key head in one pass

/// One pass: queries first .. first + queries - 1 of each key head, of its T x (Hq / Hkv), the
/// heads of one input side by side. Query i stands at position lengths[b] + i / (Hq / Hkv).
struct VerifyAttention {
  const void* q;       ///< [B, Hq, T, D]
  const void* k;       ///< [B, Hkv, capacity, D]
  const void* v;       ///< [B, Hkv, capacity, Dv]
  const int* lengths;  ///< [B]
  const bool* mask;    ///< [T, T] or null
  const float* sinks;  ///< [Hq] or null
  void* out;           ///< [B, Hq, T, Dv]
  float* sums;         ///< [B, Hkv, chunks, queries, Dv]: of exp(score - m) v
  float* stats;        ///< [B, Hkv, chunks, queries, 2]: m, the top score, and l; l = 0: none seen
  const int *first_chunk, *end_chunk;  ///< [B], of those that the pass may see
  int first, queries, chunks;
  int batch, heads, key_heads, inputs, capacity, key_dim, value_dim;
  int window;  ///< INT_MAX for none
  bool causal;
  float scale;
  Type type;
};

/// Rows of any layout: entry i of the row with indices j stands at sum(j * strides) + i * step.
struct Rows {
  static constexpr int kLeading = 7;
  const void* data;
  long shape[kLeading], strides[kLeading];
  long step;
  int leading;
};

enum class RowwiseKind { rms_norm, rms_norm_gated, add_rms_norm, swiglu, sigmoid_gate };

/// Operations on rows of `size` values; out and sum are row contiguous.
struct Rowwise {
  RowwiseKind kind;
  Rows x;
  Rows y;              ///< the gate or the residual, where there is one
  const void* weight;  ///< [size] or null
  void* out;
  void* sum;  ///< of add_rms_norm
  long rows;
  int size;
  float eps;
  Type type;
};

inline constexpr int kMaxRopeDim = 1024;

struct Rope {
  Rows x;                    ///< [B, H, T, D]
  const int* lengths;        ///< [B], the position of the first of T
  const float* frequencies;  ///< [dims / 2], radians a position
  void* out;                 ///< [B, H, T, D]
  int batch, heads, inputs, size, dims;
  bool traditional;
  float scale;
  Type type;
};

/// How the weights of a product are stored; of the last two, `q` of `scale * q + bias`.
enum class Weights { f32, f16, bf16, bits8, bits4 };

/// Rows first .. first + rows - 1 of a call that share a weight.
struct MatmulJob {
  int expert, first, rows;
};

/// Rows of one product whose weights are packed: [E, ceil(N / 16), ceil(K / p), 16] words of p
/// values each (p: 1 fp32, 2 fp16 and bf16, 4 and 8 quantised), or as MLX has them: [E, N, K].
struct Matmul {
  const void* x;                ///< [any, K]
  const void* weight;           ///< see above
  const void *scales, *biases;  ///< [E, ceil(N / 16), K / group, 16] or [E, N, K / group], or null
  const void* bias;             ///< [E, N] or null
  void* out;                    ///< [any, N]
  const int *source, *target;   ///< [rows]: rows of x and of out
  const MatmulJob* jobs;        ///< of at most kJobRows rows, contiguous, from row 0
  float* wide;                  ///< scratch: [rows] of K, padded to words, then of K / group sums
  int job_count;
  int outputs, inputs, group;  ///< N, K, and the group size of quantised weights
  bool packed;
  Weights weights;
  Type x_type, scale_type, bias_type, out_type;
};

constexpr int kJobRows = 32;

/// Values in a packed word. (Static: an inline function would be one of the instruction sets'.)
static constexpr int in_word(Weights weights) {
  return weights == Weights::f32     ? 1
         : weights == Weights::bits8 ? 4
         : weights == Weights::bits4 ? 8
                                     : 2;
}

/// Rows of matrices into blocks of sixteen: [E, ceil(N / 16), units, 16] units of 2 or 4 bytes,
/// with zeros past the rows' ends and past row N.
struct PackWeight {
  const void* from;  ///< [E, N, row_bytes]
  void* to;
  int experts, outputs, row_bytes, units, unit_bytes;
};

/// One instruction set's kernels. `part` of `parts` is the share of one thread.
struct Kernels {
  const char* name;
  void (*gated_delta)(const GatedDelta&, int part, int parts);
  void (*gates)(const Gates&, int part, int parts);
  void (*causal_conv1d)(const CausalConv1d&, int part, int parts);
  void (*verify_attention)(const VerifyAttention&, int part, int parts);
  void (*combine_attention)(const VerifyAttention&, int part, int parts);
  void (*rowwise)(const Rowwise&, int part, int parts);
  void (*rope)(const Rope&, int part, int parts);
  void (*pack_weight)(const PackWeight&, int part, int parts);
  void (*matmul_widen)(const Matmul&, int part, int parts);  ///< x to Matmul::wide
  void (*matmul)(const Matmul&, int part, int parts);        ///< after it
};

/// The best set that this machine runs, or the one DFLASH_NATIVE_ISA names.
const Kernels& kernels();

}  // namespace dflash::cpu
