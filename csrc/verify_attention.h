// Attention of a block's rows over a cache. Shapes and contract: python/dflash_native/ops.py.
#pragma once

#include <optional>

#include "common.h"

namespace dflash {

/// q [B, Hq, T, D] over k [B, Hkv, capacity, D] and v [B, Hkv, capacity, Dv], whose rows
/// lengths[b] .. lengths[b] + T - 1 are the block's own: [B, Hq, T, Dv].
mx::array verify_attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const mx::array& lengths,
    float scale,
    std::optional<int> window,
    bool causal,
    const std::optional<mx::array>& mask,
    const std::optional<mx::array>& sinks,
    mx::StreamOrDevice stream = {});

struct AttentionParts {
  float scale;
  int window;  ///< INT_MAX for none
  bool causal;
  bool has_mask;
  bool has_sinks;
  bool operator==(const AttentionParts&) const = default;
};

class VerifyAttention : public KernelPrimitive {
 public:
  VerifyAttention(mx::Stream stream, AttentionParts parts)
      : KernelPrimitive(stream), parts_(parts) {
  }
  const char* name() const override {
    return "VerifyAttention";
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    return parts_ == static_cast<const VerifyAttention&>(other).parts_;
  }

 protected:
  void run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void run_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

 private:
  AttentionParts parts_;
};

}  // namespace dflash
