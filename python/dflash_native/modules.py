"""Modules of mlx.nn and mlx-lm, which are read and never called, by this package's operations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import is_
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.rope_utils import SuScaledRoPE

from . import ops
from ._arguments import Rows

_PARTS = ("weight", "scales", "biases", "bias")


class _Packed(NamedTuple):
    """Layers' weights, one under another, as the CPU's products read them."""

    sources: list[mx.array | None]
    weight: ops.PackedWeight
    bias: mx.array | None
    ends: list[int]
    """The first row of each layer but the first."""


class Products:
    """Multiplies by the weights of modules.

    On the CPU each weight is packed once, when it is first used, and kept here beside the model:
    share one object among the sessions of a model. On a GPU the weights are used as they are.
    """

    def __init__(self) -> None:
        self._packed: dict[tuple[int, ...], _Packed] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(packed.weight.nbytes for packed in self._packed.values())

    def matmul(self, layer: Module, x: mx.array) -> mx.array:
        """`x [..., K]` times a linear layer's, or an embedding table's, rows: `[..., N]`."""
        packed = self._pack(layer)
        if packed is None:
            return ops.verify_matmul(x, layer.weight, bias=layer.get("bias"), **_format(layer))
        return ops.verify_matmul(x, packed.weight, bias=packed.bias)

    def matmuls(self, layers: Sequence[Module], x: mx.array) -> Sequence[mx.array]:
        """`matmul` for each layer: the same bits, in one product where that is faster."""
        packed = self._pack(*layers)
        if packed is not None:
            together = ops.verify_matmul(x, packed.weight, bias=packed.bias)
            return [*mx.split(together, packed.ends, axis=-1)]
        if mx.default_device() == mx.cpu:  # not alike: each is packed by itself
            return [self.matmul(layer, x) for layer in layers]
        weights = [{"weight": each.weight, "bias": each.get("bias")} for each in layers]
        given = (weight | _format(each) for weight, each in zip(weights, layers, strict=True))
        return ops.verify_matmuls(x, [*given])

    def gather_matmul(self, layer: Module, x: mx.array, indices: mx.array) -> mx.array:
        """`x [..., 1 or k, K]` times the experts `indices [..., k]` of a layer: `[..., k, N]`."""
        packed = self._pack(layer)
        if packed is None:
            bias, format_ = layer.get("bias"), _format(layer)
            return ops.verify_gather_matmul(x, layer.weight, indices, bias=bias, **format_)
        return ops.verify_gather_matmul(x, packed.weight, indices, bias=packed.bias)

    def _pack(self, *layers: Module) -> _Packed | None:
        """The layers as they are now, packed; None on a GPU, and for layers that are not alike."""
        if mx.default_device() != mx.cpu:
            return None
        sources = [part for layer in layers for part in map(layer.get, _PARTS)]
        key = tuple(map(id, layers))
        held = self._packed.get(key)
        if held is not None and all(map(is_, held.sources, sources)):
            return held
        if len({_kind(layer) for layer in layers}) > 1:
            return None
        whole = {name: _stacked([layer.get(name) for layer in layers]) for name in _PARTS}
        bias = whole.pop("bias")
        weight = ops.pack_matmul(**(_format(layers[0]) | whole))
        ends = [*accumulate(layer.weight.shape[0] for layer in layers[:-1])]
        self._packed[key] = held = _Packed(sources, weight, bias, ends)
        return held


def _stacked(parts: list[Any]) -> Any:
    """Rows of one layer after those of another; None where the layers have no such part."""
    return parts[0] if len(parts) == 1 or parts[0] is None else mx.concatenate(parts)


def _format(layer: Module) -> dict[str, Any]:
    """How a weight is quantised, as the products' arguments say it."""
    if "scales" not in layer:
        return {}
    names = ("scales", "biases", "group_size", "bits")
    return {name: getattr(layer, name) for name in names}


def _kind(layer: Module) -> tuple[Any, ...]:
    """What layers must share to be packed as one."""
    dtypes = (None if part is None else part.dtype for part in map(layer.get, _PARTS))
    return (*dtypes, getattr(layer, "group_size", None), getattr(layer, "bits", None))


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
