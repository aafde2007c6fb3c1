// g = exp(-exp(A_log) softplus(a + dt_bias)), beta = sigmoid(b): one place for all three functions.
#pragma once

/// log(1 + e) for e >= 0, with the bits that the rounding of 1 + e loses (W. Kahan).
METAL_FUNC float log1p_rn(float e) {
  const float u = add_rn(1.0f, e);
  const float rounded = add_rn(u, -1.0f);
  return rounded == 0.0f ? e : mul_rn(log_rn(u), e / rounded);
}

METAL_FUNC float softplus_rn(float x) {
  const float positive = x > 0.0f ? x : 0.0f;
  return add_rn(positive, log1p_rn(exp_rn(x > 0.0f ? -x : x)));
}

METAL_FUNC float sigmoid_rn(float x) {
  return 1.0f / add_rn(1.0f, exp_rn(-x));
}

template <typename T, typename D>
METAL_FUNC void gated_delta_gates(
    const device T* a,          // [B, T, Hv]
    const device T* b,          // [B, T, Hv]
    const device float* A_log,  // [Hv]
    const device D* dt_bias,    // [Hv]
    device float* g,            // [B, T, Hv]
    device float* beta,         // [B, T, Hv]
    int value_heads,
    int at) {
  const int head = at % value_heads;
  const float rate = softplus_rn(add_rn(float(a[at]), float(dt_bias[head])));
  g[at] = exp_rn(-mul_rn(exp_rn(A_log[head]), rate));
  beta[at] = sigmoid_rn(float(b[at]));
}
