// New rows into a preallocated cache, in place, at each batch row's own length.
#pragma once

template <typename T>
METAL_FUNC void kv_write(
    const device T* rows,       // [B, H, T, D]
    const device int* lengths,  // [B]
    device T* cache,            // [B, H, capacity, D]
    int heads,                  // Hkv
    int capacity,
    int inputs,  // T
    int dim,     // D
    int column,
    int t,
    int head) {  // b * H + h
  const int length = lengths[head / heads];
  const int last = capacity - inputs;
  const bool in_range = length >= 0 && length <= last;
  const int start = length < 0 ? 0 : (length > last ? last : length);
  cache[(size_t(head) * capacity + start + t) * dim + column] =
      in_range ? rows[(size_t(head) * inputs + t) * dim + column] : T(poison());
}
