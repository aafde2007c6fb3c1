// Products whose bits do not depend on the number of rows, and the layout that the CPU reads best.
#pragma once

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "common.h"

namespace dflash {

/// The weight of a product: dense [N, K], or affine with scales and biases [N, K / group_size] and
/// `weight` in uint32 words of `bits` bits; with experts, [E, ...] of either. `packed`: N and K of
/// what pack_matmul returned.
struct MatmulWeight {
  mx::array weight;
  std::optional<mx::array> scales, biases;
  int group_size, bits;
  std::optional<std::pair<int, int>> packed;
};

/// x [..., K] to [..., N]: x @ w.T + bias.
mx::array verify_matmul(
    const mx::array& x,
    const MatmulWeight& weight,
    const std::optional<mx::array>& bias,
    mx::StreamOrDevice stream = {});

/// verify_matmul for each weight: the same bits, on CUDA in one launch where they are of one
/// format.
std::vector<mx::array> verify_matmuls(
    const mx::array& x,
    const std::vector<MatmulWeight>& weights,
    const std::vector<std::optional<mx::array>>& biases,
    mx::StreamOrDevice stream = {});

/// x [R..., 1, K] or [R..., k, K] with the experts indices [R..., k]: [R..., k, N].
mx::array verify_gather_matmul(
    const mx::array& x,
    const MatmulWeight& weight,
    const mx::array& indices,
    const std::optional<mx::array>& bias,
    mx::StreamOrDevice stream = {});

/// Weight, scales and biases in blocks of sixteen outputs (see cpu/kernels.h).
std::tuple<mx::array, std::optional<mx::array>, std::optional<mx::array>> pack_matmul(
    const MatmulWeight& weight, mx::StreamOrDevice stream = {});

/// What a product's arrays mean. `group_size` is 0 for a dense weight.
struct MatmulFormat {
  int outputs, inputs, group_size, bits;
  bool packed, biased, gathers;
  bool operator==(const MatmulFormat&) const = default;
};

/// Inputs: x, weight, then those that are there of scales and biases, bias, indices.
class VerifyMatmul : public KernelPrimitive {
 public:
  VerifyMatmul(mx::Stream stream, MatmulFormat format) : KernelPrimitive(stream), format_(format) {
  }
  const char* name() const override {
    return format_.gathers ? "VerifyGatherMatmul" : "VerifyMatmul";
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    return format_ == static_cast<const VerifyMatmul&>(other).format_;
  }

 protected:
  void run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void run_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

 private:
  MatmulFormat format_;
};

/// Rows of a matrix to the lanes of blocks: [E, N, K] to [E, ceil(N / 16), K padded, 16].
class PackWeight : public KernelPrimitive {
 public:
  PackWeight(mx::Stream stream, bool pairs) : KernelPrimitive(stream), pairs_(pairs) {
  }
  const char* name() const override {
    return "PackWeight";
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    return pairs_ == static_cast<const PackWeight&>(other).pairs_;
  }

 protected:
  void run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void run_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;

 private:
  bool pairs_;  ///< two values of a row share a word
};

}  // namespace dflash
