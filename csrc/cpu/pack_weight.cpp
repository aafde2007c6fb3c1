// Weights in blocks of sixteen rows, for verify_matmul.cpp.
#include "kernels_isa.h"
#include "weights.h"

namespace dflash::cpu {
namespace {

template <bool Pairs, typename T>
void pack(const PackWeight& p, int part, int parts) {
  const int blocks = (p.outputs + kLanes - 1) / kLanes;
  const size_t all = size_t(p.experts) * blocks;
  for (size_t i = all * part / parts; i < all * (part + 1) / parts; ++i) {
    const int first = int(i % blocks) * kLanes;
    const T* from = static_cast<const T*>(p.from) + (i / blocks * p.outputs + first) * p.inputs;
    for (int k = 0; k < p.padded; k += kPanel) {
      const int padded = p.padded - k < kPanel ? p.padded - k : kPanel;
      const int filled = p.inputs - k < padded ? p.inputs - k : padded;
      T* to = static_cast<T*>(p.to) + (i * p.padded + k) * kLanes;
      transpose<Pairs>(from + k, p.inputs, p.outputs - first, filled, padded, to);
    }
  }
}

}  // namespace

namespace DFLASH_ISA {

void pack_weight(const PackWeight& p, int part, int parts) {
  p.bytes == 4 ? pack<false, uint32_t>(p, part, parts)
  : p.pairs    ? pack<true, uint16_t>(p, part, parts)
               : pack<false, uint16_t>(p, part, parts);
}

}  // namespace DFLASH_ISA
}  // namespace dflash::cpu
