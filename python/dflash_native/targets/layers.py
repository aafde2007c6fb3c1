"""How a forward runs each kind of mlx-lm's layers: by MLX, or exactly.

Exactly means through operations whose bits, for one input, depend neither on how many inputs a call
has nor on what the others hold. Modules are read and called; nothing of a model is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock

from .. import ops
from ..cache import AttentionCache
from ..modules import Products, norm, rotate

if TYPE_CHECKING:
    from .common import Span


class Layers(Protocol):
    """What the families ask of either way. T inputs of B rows, `x [B, T, ...]`."""

    def linear(self, layer: Module, x: mx.array) -> mx.array:
        """A linear layer."""

    def linears(self, layers: Sequence[Module], x: mx.array) -> Sequence[mx.array]:
        """Each linear layer of the same inputs."""

    def head(self, layer: Module, x: mx.array) -> mx.array:
        """A linear layer, or an embedding table used as one: `[B, T, H]` to `[B, T, V]`."""

    def norm(self, layer: Module, x: mx.array) -> mx.array:
        """An RMSNorm."""

    def add_norm(self, layer: Module, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
        """`x + y`, and an RMSNorm of it."""

    def unit_norm(self, x: mx.array, epsilon: float) -> mx.array:
        """RMS normalisation without a weight."""

    def gated_norm(self, layer: Module, x: mx.array, gate: mx.array) -> mx.array:
        """Qwen3NextRMSNormGated: an RMSNorm of x, times silu of the gate."""

    def sigmoid_gate(self, x: mx.array, gate: mx.array) -> mx.array:
        """`x * sigmoid(gate)`."""

    def rope(self, layer: Module, x: mx.array, span: Span) -> mx.array:
        """A rotary embedding: `x [B, H, T, D]` at the positions of the span."""

    def mlp(self, layer: Module, x: mx.array) -> mx.array:
        """A dense MLP or a block of experts."""

    def attention(
        self,
        queries: mx.array,
        cache: AttentionCache,
        scale: float,
        span: Span,
        window: int | None,
    ) -> mx.array:
        """`queries [B, Hq, T, D]`, whose keys and values the cache holds, to `[B, Hq, T, Dv]`.

        With `window`, a query sees a key when `query_position - key_position < window`.
        """


class StockLayers:
    """MLX's own operations, and mlx-lm's modules as they are."""

    def linear(self, layer: Module, x: mx.array) -> mx.array:
        result: mx.array = layer(x)
        return result

    def linears(self, layers: Sequence[Module], x: mx.array) -> Sequence[mx.array]:
        return [layer(x) for layer in layers]

    def head(self, layer: Module, x: mx.array) -> mx.array:
        result: mx.array = layer.as_linear(x) if hasattr(layer, "as_linear") else layer(x)
        return result

    def norm(self, layer: Module, x: mx.array) -> mx.array:
        result: mx.array = layer(x)
        return result

    def add_norm(self, layer: Module, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
        total = x + y
        return total, layer(total)

    def unit_norm(self, x: mx.array, epsilon: float) -> mx.array:
        return mx.fast.rms_norm(x, None, epsilon)

    def gated_norm(self, layer: Module, x: mx.array, gate: mx.array) -> mx.array:
        result: mx.array = layer(x, gate)
        return result

    def sigmoid_gate(self, x: mx.array, gate: mx.array) -> mx.array:
        return x * mx.sigmoid(gate)

    def rope(self, layer: Module, x: mx.array, span: Span) -> mx.array:
        result: mx.array = layer(x, offset=span.lengths)
        return result

    def mlp(self, layer: Module, x: mx.array) -> mx.array:
        result: mx.array = layer(x)
        return result

    def attention(
        self,
        queries: mx.array,
        cache: AttentionCache,
        scale: float,
        span: Span,
        window: int | None,
    ) -> mx.array:
        start, mask = span.visible(window)
        return mx.fast.scaled_dot_product_attention(
            queries,
            cache.keys[:, :, start : span.end],
            cache.values[:, :, start : span.end],
            scale=scale,
            mask=mask,
        )


class ExactLayers:
    """This package's operations, with the formulas of mlx-lm's modules."""

    def __init__(self, products: Products) -> None:
        self.products = products

    def linear(self, layer: Module, x: mx.array) -> mx.array:
        return self.products.matmul(layer, x)

    def linears(self, layers: Sequence[Module], x: mx.array) -> Sequence[mx.array]:
        return self.products.matmuls(layers, x)

    def head(self, layer: Module, x: mx.array) -> mx.array:
        return self.products.matmul(layer, x)

    def norm(self, layer: Module, x: mx.array) -> mx.array:
        return norm(layer, x)

    def add_norm(self, layer: Module, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
        return ops.add_rms_norm(x, y, layer.weight, layer.eps)

    def unit_norm(self, x: mx.array, epsilon: float) -> mx.array:
        return ops.rms_norm(x, None, epsilon)

    def gated_norm(self, layer: Module, x: mx.array, gate: mx.array) -> mx.array:
        return ops.rms_norm_gated(x, gate, layer.weight, layer.eps)

    def sigmoid_gate(self, x: mx.array, gate: mx.array) -> mx.array:
        return ops.sigmoid_gate(x, gate)

    def rope(self, layer: Module, x: mx.array, span: Span) -> mx.array:
        return rotate(layer, x, span.lengths)

    def mlp(self, layer: Module, x: mx.array) -> mx.array:
        if isinstance(layer, Qwen3NextSparseMoeBlock):
            return self._experts(layer, x)
        gate, up = self.linears((layer.gate_proj, layer.up_proj), x)
        return self.linear(layer.down_proj, ops.swiglu(gate, up))

    def attention(
        self,
        queries: mx.array,
        cache: AttentionCache,
        scale: float,
        span: Span,
        window: int | None,
    ) -> mx.array:
        return ops.verify_attention(
            queries, cache.keys, cache.values, span.lengths, scale, window=window
        )

    def _experts(self, block: Module, x: mx.array) -> mx.array:
        """The best `top_k` experts by the router, weighted in fp32, and the shared one."""
        scores = mx.softmax(self.linear(block.gate, x), axis=-1, precise=True)
        chosen = mx.argpartition(scores, kth=-block.top_k, axis=-1)[..., -block.top_k :]
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        if block.norm_topk_prob:
            weights = weights / _sum([*mx.split(weights, block.top_k, axis=-1)])
        experts, gather = block.switch_mlp, self.products.gather_matmul
        inputs = mx.expand_dims(x, -2)
        gate, up = (gather(e, inputs, chosen) for e in (experts.gate_proj, experts.up_proj))
        found = gather(experts.down_proj, ops.swiglu(gate, up), chosen)
        weighted = found.astype(mx.float32) * weights[..., None]
        mixed = _sum([weighted[..., at, :] for at in range(block.top_k)])
        shared = self.mlp(block.shared_expert, x)
        gate = mx.broadcast_to(self.linear(block.shared_expert_gate, x), shared.shape)
        return mixed.astype(x.dtype) + ops.sigmoid_gate(shared, gate)


def _sum(parts: Sequence[mx.array]) -> mx.array:
    """In the order of the parts: how MLX orders a reduction depends on its shape."""
    return reduce(mx.add, parts)
