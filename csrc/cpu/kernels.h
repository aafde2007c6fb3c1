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
  void (*pack_weight)(const PackWeight&, int part, int parts);
  void (*matmul_widen)(const Matmul&, int part, int parts);  ///< x to Matmul::wide
  void (*matmul)(const Matmul&, int part, int parts);        ///< after it
};

/// The best set that this machine runs, or the one DFLASH_NATIVE_ISA names.
const Kernels& kernels();

}  // namespace dflash::cpu
