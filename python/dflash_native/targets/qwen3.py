"""Qwen3, dense: attention with a norm on every query and key head."""

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
    heads, dim = model.args.num_key_value_heads, model.args.head_dim
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
    return common.run(
        model.model, tokens, cache, _mix, layers=layers, commit=commit, tap_layers=tap_layers
    )


def _mix(layer: Module, x: mx.array, cache: AttentionCache, span: common.Span) -> mx.array:
    attention, linear, norm = layer.self_attn, span.layers.linear, span.layers.norm
    queries = common.split_heads(linear(attention.q_proj, x), attention.n_heads)
    keys = common.split_heads(linear(attention.k_proj, x), attention.n_kv_heads)
    values = common.split_heads(linear(attention.v_proj, x), attention.n_kv_heads)
    queries, keys = norm(attention.q_norm, queries), norm(attention.k_norm, keys)
    output = common.attend(attention, queries, keys, values, cache, span)
    return linear(attention.o_proj, output)
