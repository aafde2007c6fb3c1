"""Qwen3-Next: GatedDeltaNet with packed projections, gated attention, experts or a dense MLP."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..cache import AttentionCache, Cache, RecurrentCache
from . import common
from .layers import Layers


def text_model(model: Module) -> Module:
    """The module that holds args, the stack of layers and the head."""
    return model


def make_layer_caches(
    model: Module, batch_size: int, dtype: mx.Dtype
) -> list[AttentionCache | RecurrentCache]:
    """Empty caches, one a layer."""
    return [layer_cache(layer, batch_size, dtype) for layer in model.layers]


def layer_cache(layer: Module, batch_size: int, dtype: mx.Dtype) -> AttentionCache | RecurrentCache:
    """An empty cache for one layer of either kind."""
    if layer.is_linear:
        return common.recurrent_cache(layer.linear_attn, batch_size, dtype)
    heads, dim = layer.self_attn.num_key_value_heads, layer.self_attn.head_dim
    return AttentionCache(batch_size, heads, dim, dim, dtype)


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


def _mix(
    layer: Module, x: mx.array, cache: AttentionCache | RecurrentCache, span: common.Span
) -> mx.array:
    if isinstance(cache, RecurrentCache):
        return _gated_delta_net(layer.linear_attn, x, cache, span)
    return gated_attention(layer.self_attn, x, cache, span)


def gated_attention(
    attention: Module, x: mx.array, cache: AttentionCache, span: common.Span
) -> mx.array:
    """Attention whose query projection also gives a sigmoid gate for the output, head by head."""
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    key_heads = attention.num_key_value_heads
    heads = attention.num_attention_heads, key_heads, key_heads
    queries_and_gate, keys, values = common.project_heads(span, x, projections, heads)
    queries, gate = mx.split(queries_and_gate, 2, axis=-1)
    queries = span.layers.norm(attention.q_norm, queries)
    keys = span.layers.norm(attention.k_norm, keys)
    output = common.attend(attention, queries, keys, values, cache, span)
    output = span.layers.sigmoid_gate(output, gate.flatten(-2))
    return span.layers.linear(attention.o_proj, output)


def _gated_delta_net(
    net: Module, x: mx.array, cache: RecurrentCache, span: common.Span
) -> mx.array:
    key_heads, key_dim = net.num_k_heads, net.head_k_dim
    group = net.num_v_heads // key_heads
    value_dim = group * net.head_v_dim
    # Both projections are ordered by key head: (q, k, v, z) and (b, a) of its group of value heads.
    projections = net.in_proj_qkvz, net.in_proj_ba
    qkvz, ba = common.project_heads(span, x, projections, (key_heads, key_heads))
    q, k, v, z = mx.split(qkvz, [key_dim, 2 * key_dim, 2 * key_dim + value_dim], axis=-1)
    b, a = mx.split(ba, 2, axis=-1)
    qkv = mx.concatenate([q.flatten(-2), k.flatten(-2), v.flatten(-2)], axis=-1)
    y = common.gated_delta(net, qkv, a.flatten(-2), b.flatten(-2), cache, span)
    y = span.layers.gated_norm(net.norm, y, z.reshape(y.shape))
    return span.layers.linear(net.out_proj, y.flatten(-2))
