// New key or value rows into a preallocated cache.
#pragma once

#include <optional>
#include <vector>

#include "common.h"

namespace dflash {

/// cache [B, H, capacity, D] with new [B, H, T, D] at rows lengths[b] .. lengths[b] + T - 1. The
/// cache is donated: written in place when nothing else holds it, and with `after`, a result of
/// what reads the rows that are written over, once that is computed. `starts` are the lengths on
/// the host, where it knows them.
mx::array kv_write(
    const mx::array& cache,
    const mx::array& rows,
    const mx::array& lengths,
    const std::optional<std::vector<int>>& starts,
    const std::optional<mx::array>& after,
    mx::StreamOrDevice stream = {});

/// Inputs: cache, rows, lengths, and `after` if it is there.
class KvWrite : public KernelPrimitive {
 public:
  using KernelPrimitive::KernelPrimitive;
  const char* name() const override {
    return "KvWrite";
  }
  bool is_equivalent(const mx::Primitive&) const override {
    return true;
  }

 protected:
  void run_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void run_metal(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
};

}  // namespace dflash
