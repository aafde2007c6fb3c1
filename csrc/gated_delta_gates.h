// Decay and write strength of the gated delta rule.
#pragma once

#include <utility>

#include "common.h"

namespace dflash {

/// g = exp(-exp(A_log) softplus(a + dt_bias)), beta = sigmoid(b); both [B, T, Hv], fp32.
std::pair<mx::array, mx::array> gated_delta_gates(
    const mx::array& a,
    const mx::array& b,
    const mx::array& A_log,
    const mx::array& dt_bias,
    mx::StreamOrDevice stream = {});

class GatedDeltaGates : public KernelPrimitive {
 public:
  using KernelPrimitive::KernelPrimitive;
  const char* name() const override {
    return "GatedDeltaGates";
  }
  bool is_equivalent(const mx::Primitive&) const override {
    return true;
  }

 protected:
  void run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void run_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
};

}  // namespace dflash
