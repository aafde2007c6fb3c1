// Weights of products: how each kind widens, and rows of a matrix as lanes.
#pragma once

#include "kernels.h"
#include "words.h"

namespace dflash::cpu {
namespace {

constexpr int kPanel = 128;  // k between two roundings of the accumulator

struct F32 {
  static constexpr int kValues = 1;
  template <int J>
  static Vec at(const uint32_t* word) {
    return load(reinterpret_cast<const float*>(word));
  }
};

struct F16 {  // sixteen halves of an even k, then those of the odd one
  static constexpr int kValues = 2;
  template <int J>
  static Vec at(const uint32_t* word) {
    return halves(reinterpret_cast<const uint16_t*>(word) + J * kLanes);
  }
};

struct BF16 {
  static constexpr int kValues = 2;
  template <int J>
  static Vec at(const uint32_t* word) {
    return J == 0 ? low_bfloats(word) : high_bfloats(word);
  }
};

template <int Bits>
struct Integers {
  static constexpr int kValues = 32 / Bits;
  template <int J>
  static Vec at(const uint32_t* word) {
    return integers<J * Bits, Bits>(word);
  }
};

Vec load_as(Type type, const void* from, size_t at) {
  return type == Type::f32   ? load(static_cast<const float*>(from) + at)
         : type == Type::f16 ? halves(static_cast<const uint16_t*>(from) + at)
                             : bfloats(static_cast<const uint16_t*>(from) + at);
}

/// Rows of `from` to lanes; `count` rows and `filled` values of `padded` are there.
template <bool Pairs, typename T>
void transpose(const T* from, size_t stride, int count, int filled, int padded, T* to) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const int there = lane < count ? filled : 0;
    auto at = [&](int k) -> T& {
      return to[Pairs ? k / 2 * 2 * kLanes + 2 * lane + k % 2 : k * kLanes + lane];
    };
    for (int k = 0; k < there; ++k) at(k) = from[lane * stride + k];
    for (int k = there; k < padded; ++k) at(k) = 0;
  }
}

}  // namespace
}  // namespace dflash::cpu
