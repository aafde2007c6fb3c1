"""Llama: full and sliding attention layers."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..cache import AttentionCache, Cache
from . import common
from .layers import Layers


def text_model(model: Module) -> Module:
    """The module that holds args, the stack of layers and the head."""
    return model


def make_layer_caches(model: Module, batch_size: int, dtype: mx.Dtype) -> list[AttentionCache]:
    """Empty caches, one a layer."""
    attention = model.layers[0].self_attn
    heads, dim = attention.n_kv_heads, attention.head_dim
    return [AttentionCache(batch_size, heads, dim, dim, dtype) for _ in model.layers]


def forward(
    model: Module,
    tokens: mx.array,
    cache: Cache,
    *,
    layers: Layers,
    commit: bool,
    tap_layers: Sequence[int] = (),
) -> tuple[mx.array, mx.array | None]:
    """Hidden states after the final norm and taps; see `Target.forward`."""
    sliding_window = model.model.sliding_window

    def mix(layer: Module, x: mx.array, cache: AttentionCache, span: common.Span) -> mx.array:
        attention = layer.self_attn
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        heads = attention.n_heads, attention.n_kv_heads, attention.n_kv_heads
        queries, keys, values = common.project_heads(span, x, projections, heads)
        window = sliding_window if layer.use_sliding else None
        output = common.attend(attention, queries, keys, values, cache, span, window)
        return span.layers.linear(attention.o_proj, output)

    return common.run(
        model.model, tokens, cache, mix, layers=layers, commit=commit, tap_layers=tap_layers
    )
