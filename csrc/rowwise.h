// Norms, gates and rotary positions, for CPU streams. Contract: python/dflash_native/rowwise.py.
#pragma once

#include <optional>
#include <utility>

#include "common.h"

namespace dflash {

mx::array rms_norm(
    const mx::array& x,
    const std::optional<mx::array>& weight,
    float eps,
    mx::StreamOrDevice stream = {});

/// rms_norm(x) silu(gate), in x's dtype.
mx::array rms_norm_gated(
    const mx::array& x,
    const mx::array& gate,
    const std::optional<mx::array>& weight,
    float eps,
    mx::StreamOrDevice stream = {});

/// The sum, rounded, and its rms_norm.
std::pair<mx::array, mx::array> add_rms_norm(
    const mx::array& x,
    const mx::array& residual,
    const std::optional<mx::array>& weight,
    float eps,
    mx::StreamOrDevice stream = {});

/// silu(gate) up.
mx::array swiglu(const mx::array& gate, const mx::array& up, mx::StreamOrDevice stream = {});

/// x sigmoid(gate).
mx::array sigmoid_gate(const mx::array& x, const mx::array& gate, mx::StreamOrDevice stream = {});

/// x [B, H, T, D] turned by positions lengths[b] .. lengths[b] + T - 1.
mx::array rope(
    const mx::array& x,
    const mx::array& lengths,
    int dims,
    std::optional<float> base,
    const std::optional<mx::array>& freqs,
    float scale,
    bool traditional,
    mx::StreamOrDevice stream = {});

class Rowwise : public KernelPrimitive {
 public:
  Rowwise(mx::Stream stream, cpu::RowwiseKind kind, float eps, bool has_weight)
      : KernelPrimitive(stream), kind_(kind), eps_(eps), has_weight_(has_weight) {
  }
  const char* name() const override {
    return "Rowwise";
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const Rowwise&>(other);
    return kind_ == o.kind_ && eps_ == o.eps_ && has_weight_ == o.has_weight_;
  }

 protected:
  void run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void run_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

 private:
  cpu::RowwiseKind kind_;
  float eps_;
  bool has_weight_;
};

class Rope : public KernelPrimitive {
 public:
  Rope(mx::Stream stream, int dims, std::optional<float> base, float scale, bool traditional)
      : KernelPrimitive(stream),
        dims_(dims),
        base_(base),
        scale_(scale),
        traditional_(traditional) {
  }
  const char* name() const override {
    return "Rope";
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const Rope&>(other);
    return dims_ == o.dims_ && base_ == o.base_ && scale_ == o.scale_ &&
           traditional_ == o.traditional_;
  }

 protected:
  void run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void run_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

 private:
  int dims_;
  std::optional<float> base_;
  float scale_;
  bool traditional_;
};

}  // namespace dflash
