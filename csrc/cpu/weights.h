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

/// Rows of `from`, `bytes` of each and then zeros, in units of T: to[unit][lane], `units` of them.
/// There are `rows` rows; lanes past them are zero.
template <typename T>
void transpose(const char* from, size_t stride, int rows, int bytes, int units, T* to) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const char* row = from + lane * stride;
    const int there = lane < rows ? bytes : 0, whole = there / int(sizeof(T));
    for (int i = 0; i < whole; ++i)
      std::memcpy(to + i * kLanes + lane, row + i * sizeof(T), sizeof(T));
    for (int i = whole; i < units; ++i) to[i * kLanes + lane] = 0;
    const int rest = there - whole * int(sizeof(T));  // of an odd number of halves
    if (rest) std::memcpy(to + whole * kLanes + lane, row + whole * sizeof(T), rest);
  }
}

}  // namespace
}  // namespace dflash::cpu
