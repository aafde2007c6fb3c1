// Weights in blocks of sixteen rows, for verify_matmul.cpp.
#include "kernels_isa.h"
#include "weights.h"

namespace dflash::cpu {
namespace {

template <typename T>
void pack(const PackWeight& p, int part, int parts) {
  constexpr int kAtOnce = 128;  // units
  const int blocks = (p.outputs + kLanes - 1) / kLanes;
  const size_t all = size_t(p.experts) * blocks;
  for (size_t i = all * part / parts; i < all * (part + 1) / parts; ++i) {
    const int first = int(i % blocks) * kLanes;
    const char* from =
        static_cast<const char*>(p.from) + (i / blocks * p.outputs + first) * p.row_bytes;
    T* to = static_cast<T*>(p.to) + i * p.units * kLanes;
    for (int unit = 0; unit < p.units; unit += kAtOnce) {
      const int at = unit * int(sizeof(T));
      const int units = p.units - unit < kAtOnce ? p.units - unit : kAtOnce;
      const int left = p.row_bytes - at, most = units * int(sizeof(T));
      const int bytes = left < most ? left : most;
      transpose(from + at, p.row_bytes, p.outputs - first, bytes, units, to + unit * kLanes);
    }
  }
}

}  // namespace

namespace DFLASH_ISA {

void pack_weight(const PackWeight& p, int part, int parts) {
  p.unit_bytes == 4 ? pack<uint32_t>(p, part, parts) : pack<uint16_t>(p, part, parts);
}

}  // namespace DFLASH_ISA
}  // namespace dflash::cpu
