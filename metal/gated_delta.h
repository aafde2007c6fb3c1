// The gated delta rule over a tape. Per value head, in time order:
//   replay:  S = fma(delta, k, g S)                       for the kept inputs of the last call
//   verify:  delta = beta (v - (g S) k),  S = fma(delta, k, g S),  y = S q
//
// Eight lanes share a row of S [Dv, Dk], a SIMD group holds four rows. Lane j of a row holds the
// columns 4 (8 c + j) + e, c = 0 .. Dk / 32 - 1, e = 0 .. 3. A row's sum is: fma over c for each e,
// (e0 + e1) + (e2 + e3), then lanes that differ in bit 0, 1, 2. It depends on Dk alone.
#pragma once

#define DFLASH_LANES_PER_ROW 8
#define DFLASH_ROWS_PER_SIMDGROUP 4

METAL_FUNC float row_sum(float4 part) {
  float total = add_rn(add_rn(part.x, part.y), add_rn(part.z, part.w));
  total = add_rn(total, simd_shuffle_xor(total, ushort(1)));
  total = add_rn(total, simd_shuffle_xor(total, ushort(2)));
  total = add_rn(total, simd_shuffle_xor(total, ushort(4)));
  return total;
}

METAL_FUNC float4 scale_rn(float4 s, float4 g) {
  return float4(mul_rn(s.x, g.x), mul_rn(s.y, g.y), mul_rn(s.z, g.z), mul_rn(s.w, g.w));
}

METAL_FUNC float4 fma_rn(float4 a, float4 b, float4 c) {
  return float4(
      fma_rn(a.x, b.x, c.x), fma_rn(a.y, b.y, c.y), fma_rn(a.z, b.z, c.z), fma_rn(a.w, b.w, c.w));
}

METAL_FUNC float4 splat(float x) {
  return float4(x, x, x, x);
}

template <typename T>
METAL_FUNC float4 load4(const device T* p) {
  return float4(float(p[0]), float(p[1]), float(p[2]), float(p[3]));
}

METAL_FUNC void store4(device float* p, float4 x) {
  p[0] = x.x;
  p[1] = x.y;
  p[2] = x.z;
  p[3] = x.w;
}

/// One SIMD group's rows: `row_block` counts groups of four rows, `head` is b * Hv + hv.
template <typename T, int Dk, bool vector_decay>
METAL_FUNC void gated_delta(
    const device T* q,               // [B, T, Hk, Dk]
    const device T* k,               // [B, T, Hk, Dk]
    const device T* v,               // [B, T, Hv, Dv]
    const device float* g,           // [B, T, Hv] or [B, T, Hv, Dk]
    const device float* beta,        // [B, T, Hv]
    const device float* state,       // [B, Hv, Dv, Dk]
    const device bool* mask,         // [B, T]
    const device float* tape_g,      // like g, of the last call
    const device T* tape_k,          // like k
    const device float* tape_delta,  // [B, tape_inputs, Hv, Dv]
    const device bool* tape_valid,   // [B, tape_inputs]
    const device int* keep,          // [B]
    device T* y,                     // [B, T, Hv, Dv]
    device float* delta,             // [B, T, Hv, Dv]
    device float* state_out,         // [B, Hv, Dv, Dk]
    int inputs,                      // T
    int tape_inputs,
    int key_heads,
    int value_heads,
    int value_dim,
    bool has_mask,
    bool has_tape,
    bool has_valid,
    bool writes_delta,  // verify
    bool commits,       // step: state_out is the state after the inputs, else after the replay
    int head,
    int row_block,
    int lane) {
  constexpr int chunks = Dk / 32;
  const int b = head / value_heads;
  const int hv = head % value_heads;
  const int hk = hv / (value_heads / key_heads);
  const int own_row = row_block * DFLASH_ROWS_PER_SIMDGROUP + lane / DFLASH_LANES_PER_ROW;
  const bool live = own_row < value_dim;  // the others work along and write nothing
  const int row = live ? own_row : value_dim - 1;
  const int column = (lane % DFLASH_LANES_PER_ROW) * 4;
  const bool writes = live && column == 0;

  const size_t state_at = (size_t(head) * value_dim + row) * Dk + column;
  float4 s[chunks];
  for (int c = 0; c < chunks; ++c) {
    s[c] = load4(state + state_at + c * 32);
  }

  if (has_tape) {
    const int kept = keep[b];
    const bool in_range = kept >= 0 && kept <= tape_inputs;
    for (int t = 0; t < (in_range ? kept : 0); ++t) {
      const size_t at = size_t(b) * tape_inputs + t;
      if (has_valid && !tape_valid[at]) {
        continue;
      }
      const device T* kt = tape_k + (at * key_heads + hk) * Dk + column;
      const size_t gate_at = at * value_heads + hv;
      const float4 dt = splat(tape_delta[gate_at * value_dim + row]);
      for (int c = 0; c < chunks; ++c) {
        const float4 decay =
            vector_decay ? load4(tape_g + gate_at * Dk + column + c * 32) : splat(tape_g[gate_at]);
        s[c] = fma_rn(dt, load4(kt + c * 32), scale_rn(s[c], decay));
      }
    }
    if (!in_range) {
      for (int c = 0; c < chunks; ++c) {
        s[c] = splat(poison());
      }
    }
    if (!commits && live) {
      for (int c = 0; c < chunks; ++c) {
        store4(state_out + state_at + c * 32, s[c]);
      }
    }
  }

  for (int t = 0; t < inputs; ++t) {
    const size_t at = size_t(b) * inputs + t;
    const size_t gate_at = at * value_heads + hv;
    const size_t value_at = gate_at * value_dim + row;
    if (has_mask && !mask[at]) {  // the same for the whole threadgroup
      if (writes) {
        y[value_at] = T(0.0f);
        if (writes_delta) {
          delta[value_at] = 0.0f;
        }
      }
      continue;
    }
    const device T* kt = k + (at * key_heads + hk) * Dk + column;
    const device T* qt = q + (at * key_heads + hk) * Dk + column;
    float4 part = splat(0.0f);
    for (int c = 0; c < chunks; ++c) {
      const float4 decay =
          vector_decay ? load4(g + gate_at * Dk + column + c * 32) : splat(g[gate_at]);
      s[c] = scale_rn(s[c], decay);
      part = fma_rn(s[c], load4(kt + c * 32), part);
    }
    const float error = add_rn(float(v[value_at]), -row_sum(part));
    const float innovation = mul_rn(beta[gate_at], error);
    part = splat(0.0f);
    for (int c = 0; c < chunks; ++c) {
      s[c] = fma_rn(splat(innovation), load4(kt + c * 32), s[c]);
      part = fma_rn(s[c], load4(qt + c * 32), part);
    }
    const float out = row_sum(part);
    if (writes) {
      y[value_at] = T(out);
      if (writes_delta) {
        delta[value_at] = innovation;
      }
    }
  }

  if (commits && live) {
    for (int c = 0; c < chunks; ++c) {
      store4(state_out + state_at + c * 32, s[c]);
    }
  }
}
