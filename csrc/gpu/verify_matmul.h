// verify_matmul on GPUs.
#pragma once

#include "../verify_matmul.h"

namespace dflash::cuda {

/// The products of x with each of `weights` in one launch. x, and the biases, are in the results'
/// dtype; a weight is itself, then those that are there of scales, biases and bias, and all are of
/// one format but for their outputs. `indices` where the format gathers, which is for one weight.
std::vector<mx::array> verify_matmuls(
    const MatmulFormat& format,
    const mx::array& x,
    const std::vector<std::vector<mx::array>>& weights,
    const std::optional<mx::array>& indices,
    const std::vector<mx::Shape>& shapes,
    mx::Stream stream);

}  // namespace dflash::cuda
