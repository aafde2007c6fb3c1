"""Stand-ins for operations that are being written."""

from __future__ import annotations

import mlx.core as mx


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    return mx.fast.rms_norm(x, weight, eps)


def add_rms_norm(
    x: mx.array, residual: mx.array, weight: mx.array, eps: float
) -> tuple[mx.array, mx.array]:
    total = x + residual
    return total, mx.fast.rms_norm(total, weight, eps)


def rms_norm_gated(x: mx.array, weight: mx.array, gate: mx.array, eps: float) -> mx.array:
    gate = gate.astype(mx.float32)
    normed = mx.fast.rms_norm(x, weight, eps).astype(mx.float32)
    return (gate * mx.sigmoid(gate) * normed).astype(x.dtype)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def sigmoid_gate(x: mx.array, gate: mx.array) -> mx.array:
    return x * mx.sigmoid(gate)
