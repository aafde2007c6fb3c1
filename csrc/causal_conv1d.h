// Depthwise causal convolution over a window of earlier inputs, and the window after a prefix.
#pragma once

#include "common.h"

namespace dflash {

/// silu(conv) of x [B, T, C] with weight [C, K] or [C, K, 1] behind window [B, K - 1, C].
mx::array causal_conv1d_verify(
    const mx::array& x,
    const mx::array& weight,
    const mx::array& window,
    mx::StreamOrDevice stream = {});

/// The window after the first keep[b] rows of x.
mx::array conv_window(
    const mx::array& window,
    const mx::array& x,
    const mx::array& keep,
    mx::StreamOrDevice stream = {});

class CausalConv1d : public KernelPrimitive {
 public:
  using KernelPrimitive::KernelPrimitive;
  const char* name() const override {
    return "CausalConv1d";
  }
  bool is_equivalent(const mx::Primitive&) const override {
    return true;
  }

 protected:
  void run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void run_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
};

class ConvWindow : public KernelPrimitive {
 public:
  using KernelPrimitive::KernelPrimitive;
  const char* name() const override {
    return "ConvWindow";
  }
  bool is_equivalent(const mx::Primitive&) const override {
    return true;
  }

 protected:
  void run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void run_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
};

}  // namespace dflash
