// Depthwise causal convolution and silu. Taps add up in order, in fp32; one rounding at the end.
#pragma once

/// Row `row` of window (K - 1 rows) followed by the inputs.
template <typename T>
METAL_FUNC T padded_row(
    const device T* window,  // [B, K - 1, C]
    const device T* x,       // [B, T, C]
    int inputs,              // T
    int channels,            // C
    int taps,                // K
    int b,
    int row,
    int channel) {
  const int before = taps - 1;
  return row < before ? window[(size_t(b) * before + row) * channels + channel]
                      : x[(size_t(b) * inputs + row - before) * channels + channel];
}

template <typename T>
METAL_FUNC void causal_conv1d(
    const device T* x,       // [B, T, C]
    const device T* weight,  // [C, K]
    const device T* window,  // [B, K - 1, C]
    device T* out,           // [B, T, C]
    int inputs,              // T
    int channels,            // C
    int taps,                // K
    int channel,
    int t,
    int b) {
  float total = 0.0f;
  for (int tap = 0; tap < taps; ++tap) {
    const float value = float(padded_row(window, x, inputs, channels, taps, b, t + tap, channel));
    total = fma_rn(value, float(weight[size_t(channel) * taps + tap]), total);
  }
  const float silu = total / add_rn(1.0f, exp_rn(-total));
  out[(size_t(b) * inputs + t) * channels + channel] = T(silu);
}

template <typename T>
METAL_FUNC void conv_window(
    const device T* window,  // [B, K - 1, C]
    const device T* x,       // [B, T, C]
    const device int* keep,  // [B]
    device T* out,           // [B, K - 1, C]
    int inputs,              // T
    int channels,            // C
    int taps,                // K
    int channel,
    int row,
    int b) {
  const int kept = keep[b];
  const bool in_range = kept >= 0 && kept <= inputs;
  out[(size_t(b) * (taps - 1) + row) * channels + channel] =
      in_range ? padded_row(window, x, inputs, channels, taps, b, row + kept, channel)
               : T(poison());
}
