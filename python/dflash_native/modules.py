"""Modules of mlx.nn and mlx-lm, which are read and never called, by this package's operations."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.rope_utils import SuScaledRoPE

from . import ops
from ._arguments import Rows


class Products:
    """Multiplies by the weights of modules.

    On the CPU each weight is packed once, when it is first used, and kept here beside the model:
    share one object among the sessions of a model. On a GPU the weights are used as they are.
    """

    def __init__(self) -> None:
        self._packed: dict[int, tuple[tuple[mx.array, ...], ops.PackedWeight]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(packed.nbytes for _, packed in self._packed.values())

    def matmul(self, layer: Module, x: mx.array) -> mx.array:
        """`x [..., K]` times a linear layer's, or an embedding table's, rows: `[..., N]`."""
        weight, format_ = self._operands(layer)
        return ops.verify_matmul(x, weight, bias=layer.get("bias"), **format_)

    def gather_matmul(self, layer: Module, x: mx.array, indices: mx.array) -> mx.array:
        """`x [..., 1 or k, K]` times the experts `indices [..., k]` of a layer: `[..., k, N]`."""
        weight, format_ = self._operands(layer)
        return ops.verify_gather_matmul(x, weight, indices, bias=layer.get("bias"), **format_)

    def _operands(self, layer: Module) -> tuple[mx.array | ops.PackedWeight, dict[str, Any]]:
        """A layer's weight, and how it is quantised unless the packed weight knows that."""
        format_: dict[str, Any] = {}
        if "scales" in layer:
            format_ = {name: layer[name] for name in ("scales", "biases")}
            format_ |= {"group_size": layer.group_size, "bits": layer.bits}
        if mx.default_device() != mx.cpu:
            return layer.weight, format_
        sources = (layer.weight, *(layer[name] for name in ("scales", "biases") if name in layer))
        held = self._packed.get(id(layer))
        if held is None or any(a is not b for a, b in zip(held[0], sources, strict=True)):
            held = sources, ops.pack_matmul(layer.weight, **format_)  # new, or changed since
            self._packed[id(layer)] = held
        return held[1], {}


def norm(layer: Module, x: mx.array) -> mx.array:
    """An RMSNorm."""
    return ops.rms_norm(x, layer.weight, layer.eps)


def rotate(rope: Module, x: mx.array, lengths: Rows) -> mx.array:
    """A rotary embedding: `x [B, H, T, D]`, row t of batch row b at position `lengths[b] + t`.

    `rope` is RoPE, or of mlx-lm's classes with frequencies of their own Llama3RoPE, YarnRoPE or
    SuScaledRoPE.
    """
    if isinstance(rope, RoPE):
        return ops.rope(
            x,
            lengths,
            rope.dims,
            base=rope.base,
            scale=rope.scale,
            traditional=rope.traditional,
        )
    dims, factor, traditional = (
        (rope.dim, rope._scale, False)
        if isinstance(rope, SuScaledRoPE)
        else (rope.dims, getattr(rope, "mscale", 1.0), rope.traditional)
    )
    if factor != 1.0:
        x = mx.where(mx.arange(x.shape[-1]) < dims, x * factor, x)
    return ops.rope(x, lengths, dims, freqs=rope._freqs, traditional=traditional)
