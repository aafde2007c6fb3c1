// verify_attention on GPUs: two kernels, chunks and their combination.
#pragma once

#include "../verify_attention.h"

namespace dflash::cuda {

/// `operands`: q, k, v, lengths, then those that are there of mask and sinks.
mx::array verify_attention(
    const AttentionParts& parts, const std::vector<mx::array>& operands, mx::Stream stream);

}  // namespace dflash::cuda
