// Sound kernels whose AST holds what the compiler declares: the check has nothing to say.
#include <metal_stdlib>
using namespace metal;

template <typename T>
struct Pair {
  vec<T, 2> m[2];
};

struct Sums {
  float x[4];
};

METAL_FUNC Sums doubled(Sums a) {
  Sums b = a;
  for (int i = 0; i < 4; ++i) {
    b.x[i] = a.x[i] + a.x[i];
  }
  return b;
}

kernel void copies(device float* a [[buffer(0)]], const device half* h [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  Sums sums[2];
  Pair<half> pairs[2];
  for (int j = 0; j < 4; ++j) {
    sums[0].x[j] = a[4 * i + j];
  }
  pairs[0].m[0] = pairs[0].m[1] = half2(h[i], h[i + 1]);
  sums[1] = sums[0] = doubled(sums[0]);
  pairs[1] = pairs[0];
  simdgroup_matrix<float, 8, 8> total;
  simdgroup_matrix<half, 8, 8> b;
  reinterpret_cast<thread float2&>(total.thread_elements()) = float2(sums[1].x[0], sums[1].x[1]);
  reinterpret_cast<thread half2&>(b.thread_elements()) = pairs[1].m[1];
  simdgroup_multiply_accumulate(total, b, b, total);
  a[i] = total.thread_elements()[0] + sums[1].x[3];
}
