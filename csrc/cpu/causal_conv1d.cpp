// Depthwise causal convolution and silu: taps in order, fp32, one rounding at the end.
#include "kernels_isa.h"
#include "vec.h"

namespace dflash::cpu {
namespace {

constexpr int kChannels = 256;  // of one pass over the taps
constexpr int kTaps = 8;        // whose weights are transposed once for all inputs

template <typename T>
void run(const CausalConv1d& p, int part, int parts) {
  const T *x = static_cast<const T*>(p.x), *weight = static_cast<const T*>(p.weight);
  const T* window = static_cast<const T*>(p.window);
  T* out = static_cast<T*>(p.out);
  const int before = p.taps - 1;
  const int blocks = (p.channels + kChannels - 1) / kChannels;
  const int begin = int(size_t(blocks) * part / parts),
            end = int(size_t(blocks) * (part + 1) / parts);
  float total[kChannels], transposed[kTaps * kChannels], late[kChannels];
  for (int block = begin; block < end; ++block) {
    const int first = block * kChannels;
    const int n = p.channels - first < kChannels ? p.channels - first : kChannels;
    auto weights_of = [&](int tap, float* w) {
      for (int c = 0; c < n; ++c) w[c] = to_float(weight[size_t(first + c) * p.taps + tap]);
    };
    for (int tap = 0; tap < p.taps && tap < kTaps; ++tap) {
      weights_of(tap, transposed + tap * kChannels);
    }
    for (int b = 0; b < p.batch; ++b) {
      for (int t = 0; t < p.inputs; ++t) {
        for (int c = 0; c < n; ++c) total[c] = 0.0f;
        for (int tap = 0; tap < p.taps; ++tap) {
          const int row = t + tap;
          const T* from = row < before
                              ? window + (size_t(b) * before + row) * p.channels + first
                              : x + (size_t(b) * p.inputs + row - before) * p.channels + first;
          if (tap >= kTaps) weights_of(tap, late);
          const float* w = tap < kTaps ? transposed + tap * kChannels : late;
          for (int c = 0; c < n; ++c) total[c] = __builtin_fmaf(to_float(from[c]), w[c], total[c]);
        }
        T* to = out + (size_t(b) * p.inputs + t) * p.channels + first;
        for (int c = 0; c < n; ++c) {
          to[c] = from_float<T>(total[c] / (1.0f + exp_f32(-total[c])));
        }
      }
    }
  }
}

}  // namespace

namespace DFLASH_ISA {

void causal_conv1d(const CausalConv1d& p, int part, int parts) {
  switch (p.type) {
    case Type::f32:
      return run<float>(p, part, parts);
    case Type::f16:
      return run<Half>(p, part, parts);
    case Type::bf16:
      return run<BFloat>(p, part, parts);
  }
}

}  // namespace DFLASH_ISA
}  // namespace dflash::cpu
