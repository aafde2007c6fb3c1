"""Stand-ins for operations that are being written: one row at a time through MLX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class PackedWeight:
    weight: mx.array
    scales: mx.array | None
    biases: mx.array | None
    group_size: int
    bits: int

    @property
    def nbytes(self) -> int:
        held = (self.weight, self.scales, self.biases)
        return sum(array.nbytes for array in held if array is not None)


def pack_matmul(
    weight: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    *,
    group_size: int = 64,
    bits: int = 4,
) -> PackedWeight:
    return PackedWeight(weight, scales, biases, group_size, bits)


def _product(row: mx.array, packed: PackedWeight, at: Any, bias: mx.array | None) -> mx.array:
    weight = packed.weight[at]
    if packed.scales is not None:
        assert packed.biases is not None
        scales, biases = packed.scales[at], packed.biases[at]
        weight = mx.dequantize(
            weight,
            scales.astype(mx.float32),
            biases.astype(mx.float32),
            packed.group_size,
            packed.bits,
        )
        dtype = mx.result_type(row, scales)
    else:
        dtype = mx.result_type(row, weight)
    product = row.astype(mx.float32) @ weight.astype(mx.float32).T
    if bias is not None:
        product = product + bias[at].astype(mx.float32)
    return product.astype(dtype)


def verify_matmul(
    x: mx.array,
    weight: mx.array | PackedWeight,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    bias: mx.array | None = None,
    *,
    group_size: int = 64,
    bits: int = 4,
    stream: Any = None,
) -> mx.array:
    if isinstance(weight, mx.array):
        weight = pack_matmul(weight, scales, biases, group_size=group_size, bits=bits)
    rows = x.reshape(-1, x.shape[-1])
    found = [_product(rows[i : i + 1], weight, ..., bias) for i in range(rows.shape[0])]
    return mx.concatenate(found).reshape(*x.shape[:-1], -1)


def verify_gather_matmul(
    x: mx.array,
    weight: mx.array | PackedWeight,
    indices: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    bias: mx.array | None = None,
    *,
    group_size: int = 64,
    bits: int = 4,
    stream: Any = None,
) -> mx.array:
    if isinstance(weight, mx.array):
        weight = pack_matmul(weight, scales, biases, group_size=group_size, bits=bits)
    flat = indices.reshape(-1)
    rows = mx.broadcast_to(x, (*indices.shape, x.shape[-1])).reshape(-1, x.shape[-1])
    found = [_product(rows[i : i + 1], weight, flat[i], bias) for i in range(flat.size)]
    return mx.concatenate(found).reshape(*indices.shape, -1)


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
