"""Qwen3.5, dense and with experts: GatedDeltaNet and gated attention inside `language_model`."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..cache import AttentionCache, Cache, RecurrentCache
from . import common
from .layers import Layers
from .qwen3_next import gated_attention, layer_cache


def text_model(model: Module) -> Module:
    """The module that holds args, the stack of layers and the head."""
    text: Module = model.language_model
    return text


def make_layer_caches(
    model: Module, batch_size: int, dtype: mx.Dtype
) -> list[AttentionCache | RecurrentCache]:
    """Empty caches, one a layer."""
    return [layer_cache(layer, batch_size, dtype) for layer in model.layers]


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
    stack = model.language_model.model
    return common.run(
        stack, tokens, cache, _mix, layers=layers, commit=commit, tap_layers=tap_layers
    )


def _mix(
    layer: Module, x: mx.array, cache: AttentionCache | RecurrentCache, span: common.Span
) -> mx.array:
    if isinstance(cache, RecurrentCache):
        return _gated_delta_net(layer.linear_attn, x, cache, span)
    return gated_attention(layer.self_attn, x, cache, span)


def _gated_delta_net(
    net: Module, x: mx.array, cache: RecurrentCache, span: common.Span
) -> mx.array:
    projections = net.in_proj_qkv, net.in_proj_z, net.in_proj_a, net.in_proj_b
    qkv, z, a, b = span.layers.linears(projections, x)
    y = common.gated_delta(net, qkv, a, b, cache, span)
    y = span.layers.gated_norm(net.norm, y, common.split_heads(z, net.num_v_heads))
    return span.layers.linear(net.out_proj, y.flatten(-2))
