// verify_matmul on GPUs.
#pragma once

#include "../verify_matmul.h"

namespace dflash::cuda {

/// `operands`: x in the result's dtype, weight, then those that are there of scales and biases,
/// bias in the result's dtype, indices. `shape` is the result's.
mx::array verify_matmul(
    const MatmulFormat& format,
    const std::vector<mx::array>& operands,
    const mx::Shape& shape,
    mx::Stream stream);

}  // namespace dflash::cuda
