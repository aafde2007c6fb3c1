// The arithmetic that row-dependent code may use. A product that must round stands alone, a
// multiply-add is an explicit fma, so that no compiler has anything to contract.
#pragma once

METAL_FUNC float mul_rn(float a, float b) {
  return a * b;
}

METAL_FUNC float add_rn(float a, float b) {
  return a + b;
}

METAL_FUNC float fma_rn(float a, float b, float c) {
  return metal::fma(a, b, c);
}

METAL_FUNC float max_rn(float a, float b) {
  return metal::max(a, b);
}

METAL_FUNC float exp_rn(float x) {
  return metal::precise::exp(x);
}

METAL_FUNC float exp2_rn(float x) {
  return metal::precise::exp2(x);
}

METAL_FUNC float log_rn(float x) {
  return metal::precise::log(x);
}

/// What a row with a device value out of range is filled with.
METAL_FUNC float poison() {
  return as_type<float>(0x7fc00000u);
}
