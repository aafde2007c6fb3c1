"""Inputs in the physical range, and bitwise comparison."""

from __future__ import annotations

import mlx.core as mx

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def name(value):
    """Test ids: dtypes by their name."""
    return str(value).rpartition(".")[2] if isinstance(value, mx.Dtype) else None


def gated_delta(B, T, Hk, Hv, Dk, Dv, dtype=mx.float32, vector=False):
    """q, k, v, g, beta, state: normalised keys, q with the scale folded in, decays in (0.7, 1)."""
    k, q = mx.random.normal((B, T, Hk, Dk)), mx.random.normal((B, T, Hk, Dk))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    q = q / mx.linalg.norm(q, axis=-1, keepdims=True) * Dk**-0.5
    v = mx.random.normal((B, T, Hv, Dv))
    g = mx.random.uniform(0.7, 1.0, (B, T, Hv, Dk) if vector else (B, T, Hv))
    beta = mx.random.uniform(0.0, 1.0, (B, T, Hv))
    state = mx.random.normal((B, Hv, Dv, Dk)) * 0.1
    inputs = [q.astype(dtype), k.astype(dtype), v.astype(dtype), g, beta]
    mx.eval(inputs, state)
    return inputs, state


def at(inputs, start, stop):
    """The inputs of times start .. stop - 1."""
    return [x[:, start:stop] for x in inputs]


def same(a, b):
    """Equal in every bit (two NaNs of one pattern are equal, +0 and -0 are not)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    as_bits = {4: mx.uint32, 2: mx.uint16, 1: mx.uint8}[a.dtype.size]
    if a.dtype == mx.bool_:
        return bool(mx.array_equal(a, b))
    return bool(mx.array_equal(a.view(as_bits), b.view(as_bits)))


def error(a, b):
    """||a - b|| / ||b|| in fp32."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return (mx.linalg.norm((a - b).reshape(-1)) / mx.linalg.norm(b.reshape(-1))).item()
