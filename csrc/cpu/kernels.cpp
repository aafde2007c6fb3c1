#include "kernels.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace dflash::cpu {

#define DFLASH_DECLARE(isa)                                              \
  namespace isa {                                                        \
  void gated_delta(const GatedDelta& p, int part, int parts);            \
  void gates(const Gates& p, int part, int parts);                       \
  void causal_conv1d(const CausalConv1d& p, int part, int parts);        \
  void verify_attention(const VerifyAttention& p, int part, int parts);  \
  void combine_attention(const VerifyAttention& p, int part, int parts); \
  void rowwise(const Rowwise& p, int part, int parts);                   \
  void rope(const Rope& p, int part, int parts);                         \
  void pack_weight(const PackWeight& p, int part, int parts);            \
  void matmul_widen(const Matmul& p, int part, int parts);               \
  void matmul(const Matmul& p, int part, int parts);                     \
  }
#define DFLASH_TABLE(isa)                                                                     \
  Kernels {                                                                                   \
    #isa, isa::gated_delta, isa::gates, isa::causal_conv1d, isa::verify_attention,            \
        isa::combine_attention, isa::rowwise, isa::rope, isa::pack_weight, isa::matmul_widen, \
        isa::matmul                                                                           \
  }

#if defined(__x86_64__)
DFLASH_DECLARE(avx512)
DFLASH_DECLARE(avx2)
DFLASH_DECLARE(baseline)
#elif defined(__aarch64__)
DFLASH_DECLARE(neon)
#else
DFLASH_DECLARE(baseline)
#endif

namespace {

Kernels choose() {
  const char* name = std::getenv("DFLASH_NATIVE_ISA");
  const std::string wanted = name ? name : "";
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f");
  if (avx512 && (wanted.empty() || wanted == "avx512")) return DFLASH_TABLE(avx512);
  if (avx2 && (wanted.empty() || wanted == "avx2")) return DFLASH_TABLE(avx2);
  if (wanted.empty() || wanted == "baseline") return DFLASH_TABLE(baseline);
#elif defined(__aarch64__)
  if (wanted.empty() || wanted == "neon") return DFLASH_TABLE(neon);
#else
  if (wanted.empty() || wanted == "baseline") return DFLASH_TABLE(baseline);
#endif
  throw std::invalid_argument(
      "[DFLASH_NATIVE_ISA] expected an instruction set that this machine runs but got \"" + wanted +
      "\".");
}

}  // namespace

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace dflash::cpu
