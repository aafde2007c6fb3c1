// verify_matmul on GPUs.
#pragma once

#include "../verify_matmul.h"

namespace dflash::cuda {

/// The rows `x [M, K]`, or of pairs with `indices`, times the weight: [M, N], or [pairs, N].
/// `shape` and `dtype` are those of the result.
mx::array verify_matmul(
    const MatmulFormat& format,
    const std::vector<mx::array>& operands,
    const mx::Shape& shape,
    mx::Dtype dtype,
    mx::Stream stream);

}  // namespace dflash::cuda
