"""Matrix products of the layers of mlx.nn and mlx-lm, through width-independent operations."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from . import ops


class Products:
    """Multiplies by the weights of modules, which are read and never changed.

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
