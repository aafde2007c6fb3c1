// g = exp(-exp(A_log) softplus(a + dt_bias)), beta = sigmoid(b), in fp32.
#include <math.h>

#include "kernels_isa.h"
#include "vec.h"

namespace dflash::cpu {
namespace {

template <typename T>
void run(const Gates& p, int part, int parts) {
  const T *a = static_cast<const T*>(p.a), *b = static_cast<const T*>(p.b);
  const size_t begin = p.rows * part / parts, end = p.rows * (part + 1) / parts;
  for (size_t row = begin; row < end; ++row) {
    for (int head = 0; head < p.heads; ++head) {
      const size_t at = row * p.heads + head;
      const float x = to_float(a[at]) + p.dt_bias[head];
      const float rate = (x > 0.0f ? x : 0.0f) + log1pf(expf(x > 0.0f ? -x : x));
      p.g[at] = expf(-(expf(p.A_log[head]) * rate));
      p.beta[at] = 1.0f / (1.0f + expf(-to_float(b[at])));
    }
  }
}

}  // namespace

namespace DFLASH_ISA {

void gates(const Gates& p, int part, int parts) {
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
