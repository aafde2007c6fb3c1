// What each instruction set's copy of the kernel files defines; CMake sets DFLASH_ISA.
#pragma once

#include "kernels.h"

namespace dflash::cpu::DFLASH_ISA {

void gated_delta(const GatedDelta& p, int part, int parts);
void gates(const Gates& p, int part, int parts);
void causal_conv1d(const CausalConv1d& p, int part, int parts);
void verify_attention(const VerifyAttention& p, int part, int parts);
void combine_attention(const VerifyAttention& p, int part, int parts);
void rowwise(const Rowwise& p, int part, int parts);
void rope(const Rope& p, int part, int parts);
void pack_weight(const PackWeight& p, int part, int parts);
void matmul_widen(const Matmul& p, int part, int parts);
void matmul(const Matmul& p, int part, int parts);

}  // namespace dflash::cpu::DFLASH_ISA
