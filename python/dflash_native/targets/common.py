"""What the families share: the call's span, attention, GatedDeltaNet and the loop over the layers.

Modules of the model are read, and called where `Layers` says so; nothing of the model is set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.nn.layers.base import Module

from .. import ops
from ..cache import AttentionCache, Cache, RecurrentCache
from .layers import Layers

MASK_LIMIT = 2**31
"""MLX indexes a mask's elements with 32 bits."""


class Span:
    """The T inputs of one call: where they stand, how to run them, what becomes of the caches."""

    def __init__(self, tokens: mx.array, cache: Cache, commit: bool, layers: Layers) -> None:
        if tokens.ndim != 2 or tokens.shape[1] == 0 or not mx.issubdtype(tokens.dtype, mx.integer):
            raise ValueError(
                "[forward] expected integer tokens [B, T] with T >= 1 "
                f"but got {tokens.dtype} {tokens.shape}"
            )
        if tokens.shape[0] != cache.batch_size:
            raise ValueError(
                f"[forward] expected tokens for the cache's {cache.batch_size} rows "
                f"but got shape {tokens.shape}"
            )
        cache.check_committed()
        if commit:
            cache.flush()
        self.batch_size, self.inputs = tokens.shape
        self.commit = commit
        self.layers = layers
        self.end = max(cache.lengths) + self.inputs
        """KV rows that some batch row may see."""
        self.uniform = min(cache.lengths) + self.inputs == self.end
        """Whether every batch row stands at the same position."""
        self.starts = list(cache.lengths)
        """Position of each row's first input. `[B]`."""
        self.lengths = mx.array(cache.lengths, dtype=mx.int32)
        """The same on the device, int32."""
        self.all_inputs = mx.array([self.inputs] * self.batch_size, dtype=mx.int32)
        self._cache = cache
        self._updates: list[Callable[[], None]] = []
        self._visible: dict[int | None, tuple[int, mx.array | str | None]] = {}

    def visible(self, window: int | None) -> tuple[int, mx.array | str | None]:
        """First KV row to read, and the mask over the rows from there to `end`.

        With `window`, a query sees a key when `query_position - key_position < window`.
        """
        if window not in self._visible:
            self._visible[window] = self._find_visible(window)
        return self._visible[window]

    def _find_visible(self, window: int | None) -> tuple[int, mx.array | str | None]:
        reach = self.end if window is None else min(window, self.end)
        if self.uniform and reach == self.end:
            return 0, "causal" if self.inputs > 1 else None
        if self.uniform and self.inputs == 1:
            return self.end - reach, None
        start = max(0, self.end - self.inputs - reach + 1) if self.uniform else 0
        lengths = self.lengths[:1] if self.uniform else self.lengths
        elements = lengths.size * self.inputs * (self.end - start)
        if elements >= MASK_LIMIT:
            raise ValueError(
                f"[forward] expected a mask of less than 2^31 elements but {self.inputs} inputs "
                f"over {self.end - start} keys need {elements}: use smaller chunks"
            )
        queries = lengths[:, None] + mx.arange(self.inputs, dtype=mx.int32)
        distance = queries[..., None] - mx.arange(start, self.end, dtype=mx.int32)
        mask = distance >= 0
        if reach < self.end:
            mask = mask & (distance < reach)
        return start, mask[:, None]

    def on_success(self, update: Callable[[], None]) -> None:
        """Run `update` when every layer has been built: an error leaves the cache as it was."""
        self._updates.append(update)

    def finish(self) -> None:
        """Take the call into the cache: all of it, or nothing where Ctrl-C falls into it."""
        take_back = self._cache.snapshot()
        try:
            for update in self._updates:
                update()
            if self.commit:
                self._cache.lengths = [length + self.inputs for length in self._cache.lengths]
            else:
                self._cache.uncommitted = self.inputs
        except BaseException:
            take_back()
            raise


Mixer: TypeAlias = Callable[[Module, mx.array, Any, Span], mx.array]
"""A layer's attention or GatedDeltaNet: (layer, normed [B, T, H], its cache, span) -> [B, T, H]."""


def run(
    model: Module,
    tokens: mx.array,
    cache: Cache,
    mixer: Mixer,
    *,
    layers: Layers,
    commit: bool,
    tap_layers: Sequence[int],
) -> tuple[mx.array, mx.array | None]:
    """Run a stack of pre-norm decoder layers.

    `model` holds embed_tokens, layers and norm. Returns the final norm's output `[B, T, H]` and the
    residual stream after each of `tap_layers`, `[B, T, len(tap_layers) * H]` in their order, or
    None without any.
    """
    span = Span(tokens, cache, commit, layers)
    next_norms = [*(layer.input_layernorm for layer in model.layers), model.norm]
    hidden = model.embed_tokens(tokens)
    normed = layers.norm(next_norms[0], hidden)
    taps: dict[int, mx.array] = {}
    for index, (layer, layer_cache) in enumerate(zip(model.layers, cache.layers, strict=True)):
        mixed = mixer(layer, normed, layer_cache, span)
        hidden, normed = layers.add_norm(layer.post_attention_layernorm, hidden, mixed)
        mixed = layers.mlp(layer.mlp, normed)
        hidden, normed = layers.add_norm(next_norms[index + 1], hidden, mixed)
        if index in tap_layers:
            taps[index] = hidden
    tapped = mx.concatenate([taps[index] for index in tap_layers], -1) if tap_layers else None
    span.finish()
    return normed, tapped


def split_heads(x: mx.array, heads: int) -> mx.array:
    """`[B, T, heads * D]` as `[B, T, heads, D]`."""
    return mx.unflatten(x, -1, (heads, -1))


def project_heads(
    span: Span, x: mx.array, projections: Sequence[Module], heads: Sequence[int]
) -> list[mx.array]:
    """Linear layers of `x [B, T, H]`, each split into its heads."""
    found = span.layers.linears(projections, x)
    return [split_heads(y, count) for y, count in zip(found, heads, strict=True)]


def attend(
    attention: Module,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: AttentionCache,
    span: Span,
    window: int | None = None,
) -> mx.array:
    """Rotate, write the KV rows, attend to what each input may see.

    `queries [B, T, Hq, D]`, `keys, values [B, T, Hkv, D]`, not yet rotated; returns
    `[B, T, Hq * D]`. `attention` gives `rope` and `scale`.
    """
    queries, keys, values = (x.transpose(0, 2, 1, 3) for x in (queries, keys, values))
    queries, keys = (span.layers.rope(attention.rope, x, span) for x in (queries, keys))
    cache.write(keys, values, span.starts)
    output = span.layers.attention(queries, cache, attention.scale, span, window)
    span.on_success(partial(setattr, cache, "reader", output))
    return output.transpose(0, 2, 1, 3).flatten(-2)


def gated_delta(
    net: Module,
    qkv: mx.array,
    a: mx.array,
    b: mx.array,
    cache: RecurrentCache,
    span: Span,
) -> mx.array:
    """Conv, gates and recurrence of a GatedDeltaNet module of mlx-lm.

    `qkv [B, T, C]` are the conv inputs, q, k and v concatenated; `a, b [B, T, Hv]` the gates'
    projections. Returns `[B, T, Hv, Dv]`. q and k are normalised to length 1 (1e-6 beside the sum
    of squares) and q is scaled by Dk^-0.5, as in "Gated Delta Networks" (arXiv:2412.06464).
    """
    window = cache.logical_window()
    convolved = ops.causal_conv1d_verify(qkv, net.conv1d.weight, window)
    qk, v = mx.split(convolved, [2 * net.key_dim], axis=-1)
    scale = net.head_k_dim**-0.5
    epsilon = 1e-6 * scale**2  # rms_norm adds it to the mean of squares
    qk = span.layers.unit_norm(split_heads(qk, 2 * net.num_k_heads), epsilon)
    q, k = mx.split(qk, 2, axis=2)
    q, k = q * scale**2, k * scale  # new arrays: the tape holds k
    v = split_heads(v, net.num_v_heads)
    g, beta = ops.gated_delta_gates(a, b, net.A_log, net.dt_bias)
    if span.commit:
        y, state = ops.gated_delta_step(q, k, v, g, beta, cache.state)
        window = ops.conv_window(window, qkv, span.all_inputs)
        span.on_success(partial(cache.advance, window, state))
    else:
        y, tape, state = ops.gated_delta_verify(
            q, k, v, g, beta, cache.state, cache.tape, cache.keep
        )
        span.on_success(partial(cache.record, window, state, tape, qkv))
    return y


def recurrent_cache(net: Module, batch_size: int, dtype: mx.Dtype) -> RecurrentCache:
    """An empty cache for a GatedDeltaNet module of mlx-lm."""
    channels, taps = net.conv1d.weight.shape[:2]
    state_shape = (net.num_v_heads, net.head_v_dim, net.head_k_dim)
    return RecurrentCache(batch_size, (taps - 1, channels), state_shape, dtype)
