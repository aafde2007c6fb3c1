"""The small operations of a layer: norms, gates, rotary positions, the convolution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from dflash_native import ops, reference

from . import Case, Inputs, Point, Results, Variant, compiled, operation, total

EPS = 1e-6


def _case(
    name: str,
    shape: str,
    make: Callable[[], Inputs],
    ours: Callable[..., Results],
    expected: Callable[..., Results],
    plain: Callable[..., Results],
    *others: Variant,
) -> Case:
    """An operation that memory bounds, against plain MLX, that compiled, and `others`."""
    some = make()
    written = total(*expected(*some))
    return Case(
        name,
        shape,
        make,
        [Variant("ours", ours), Variant("mlx", plain), compiled(plain), *others],
        expected,
        bytes=total(*(x for x in some if isinstance(x, mx.array))) + written,
        flops=0,
    )


def _one(function: Callable[..., mx.array], *last: Any, **named: Any) -> Callable[..., Results]:
    """A function of arrays that gives a list of one."""
    return lambda *inputs: [function(*inputs, *last, **named)]


def _norm(x: mx.array, weight: mx.array) -> mx.array:
    y = x.astype(mx.float32)
    y = y * mx.rsqrt((y * y).mean(-1, keepdims=True) + EPS)
    return (y * weight).astype(x.dtype)


@operation("rms_norm")
def rms_norm(at: Point) -> Iterator[Case]:
    """Of the residual stream."""
    H = at.config.hidden_size
    yield _case(
        "rms_norm",
        f"{H}",
        lambda: (at.normal(at.batch, at.rows, H), at.normal(H)),
        _one(ops.rms_norm, EPS),
        _one(reference.rms_norm, EPS),
        _one(_norm),
        Variant("mx.fast", _one(mx.fast.rms_norm, EPS)),
    )


@operation("add_rms_norm")
def add_rms_norm(at: Point) -> Iterator[Case]:
    """The residual's sum and its norm."""
    H = at.config.hidden_size

    def by(norm: Callable[..., mx.array], *last: Any) -> Callable[..., Results]:
        def both(x: mx.array, residual: mx.array, weight: mx.array) -> Results:
            whole = x + residual
            return whole, norm(whole, weight, *last)

        return both

    yield _case(
        "add_rms_norm",
        f"{H}",
        lambda: (*(at.normal(at.batch, at.rows, H) for _ in range(2)), at.normal(H)),
        lambda x, residual, weight: ops.add_rms_norm(x, residual, weight, EPS),
        lambda x, residual, weight: reference.add_rms_norm(x, residual, weight, EPS),
        by(_norm),
        Variant("mx.fast", by(mx.fast.rms_norm, EPS)),
    )


@operation("rms_norm_gated")
def rms_norm_gated(at: Point) -> Iterator[Case]:
    """The norm after the gated delta rule, of each value head."""
    if not hasattr(at.config, "linear_num_value_heads"):
        return
    heads, dim = at.config.linear_num_value_heads, at.config.linear_value_head_dim

    def by(norm: Callable[..., mx.array], *last: Any) -> Callable[..., Results]:
        def gated(x: mx.array, gate: mx.array, weight: mx.array) -> Results:
            gate = gate.astype(mx.float32)
            return [(norm(x, weight, *last) * (gate * mx.sigmoid(gate))).astype(x.dtype)]

        return gated

    def make() -> Inputs:
        x, gate = (at.normal(at.batch, at.rows, heads, dim) for _ in range(2))
        return x, gate, at.normal(dim)

    yield _case(
        "rms_norm_gated",
        f"{heads} heads, {dim}",
        make,
        _one(ops.rms_norm_gated, EPS),
        _one(reference.rms_norm_gated, EPS),
        by(_norm),
        Variant("mx.fast", by(mx.fast.rms_norm, EPS)),
    )


@operation("swiglu")
def gated_mlp(at: Point) -> Iterator[Case]:
    """Between the MLP's projections."""
    inner = getattr(at.config, "intermediate_size", None) or at.config.moe_intermediate_size
    yield _case(
        "swiglu",
        f"{inner}",
        lambda: tuple(at.normal(at.batch, at.rows, inner) for _ in range(2)),
        _one(ops.swiglu),
        _one(reference.swiglu),
        _one(lambda gate, up: nn.silu(gate) * up),
        Variant("mlx-lm", _one(swiglu)),
    )


@operation("sigmoid_gate")
def sigmoid_gate(at: Point) -> Iterator[Case]:
    """The gate of attention's output."""
    width = at.config.num_attention_heads * at.config.head_dim
    yield _case(
        "sigmoid_gate",
        f"{width}",
        lambda: tuple(at.normal(at.batch, at.rows, width) for _ in range(2)),
        _one(ops.sigmoid_gate),
        _one(reference.sigmoid_gate),
        _one(lambda x, gate: x * mx.sigmoid(gate)),
    )


@operation("rope", "context")
def rope(at: Point) -> Iterator[Case]:
    """Of the query heads."""
    config, B = at.config, at.batch
    rotary = getattr(config, "rope_parameters", {"rope_theta": getattr(config, "rope_theta", 1e4)})
    base = float(rotary["rope_theta"])
    dims = int(config.head_dim * rotary.get("partial_rotary_factor", 1.0))

    def plain(x: mx.array, lengths: mx.array) -> Results:
        turns = base ** (-mx.arange(0, dims, 2, dtype=mx.float32) / dims)
        angle = (lengths[:, None] + mx.arange(x.shape[2]))[:, None, :, None] * turns
        a, b = mx.split(x[..., :dims], 2, axis=-1)
        cos, sin = mx.cos(angle), mx.sin(angle)
        turned = [a * cos - b * sin, b * cos + a * sin]
        return [mx.concatenate([*(t.astype(x.dtype) for t in turned), x[..., dims:]], axis=-1)]

    def fast(x: mx.array, lengths: mx.array) -> Results:
        return [mx.fast.rope(x, dims, traditional=False, base=base, scale=1.0, offset=lengths)]

    def make() -> Inputs:
        x = at.normal(B, config.num_attention_heads, at.rows, config.head_dim)
        return x, mx.full((B,), at.context, dtype=mx.int32)

    yield _case(
        "rope",
        f"{config.num_attention_heads} heads, {dims} of {config.head_dim}",
        make,
        _one(ops.rope, dims, base=base),
        _one(reference.rope, dims, base=base),
        plain,
        Variant("mx.fast", fast),
    )


def _channels(at: Point) -> int:
    config = at.config
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return 2 * keys + config.linear_num_value_heads * config.linear_value_head_dim


@operation("causal_conv1d_verify")
def conv(at: Point) -> Iterator[Case]:
    """The depthwise convolution before the recurrence; mlx-lm joins window and rows first."""
    if not hasattr(at.config, "linear_conv_kernel_dim"):
        return
    channels, taps = _channels(at), at.config.linear_conv_kernel_dim

    def make() -> Inputs:
        weight, window = at.normal(channels, taps, 1), at.normal(at.batch, taps - 1, channels)
        return at.normal(at.batch, at.rows, channels), weight, window

    def plain(x: mx.array, weight: mx.array, window: mx.array) -> Results:
        joined = mx.concatenate([window, x], axis=1)
        return [nn.silu(mx.conv1d(joined, weight, groups=channels))]

    yield _case(
        "causal_conv1d_verify",
        f"{channels} channels, {taps} taps",
        make,
        _one(ops.causal_conv1d_verify),
        _one(reference.causal_conv1d_verify),
        plain,
    )


@operation("conv_window")
def conv_window(at: Point) -> Iterator[Case]:
    """The convolution's window after a round whose inputs were all kept."""
    if not hasattr(at.config, "linear_conv_kernel_dim"):
        return
    channels, rows = _channels(at), at.config.linear_conv_kernel_dim - 1

    def make() -> Inputs:
        window, x = at.normal(at.batch, rows, channels), at.normal(at.batch, at.rows, channels)
        return window, x, mx.full((at.batch,), at.rows, dtype=mx.int32)

    def plain(window: mx.array, x: mx.array, keep: mx.array) -> Results:
        return [mx.contiguous(mx.concatenate([window, x], axis=1)[:, -rows:])]

    yield _case(
        "conv_window",
        f"{channels} channels",
        make,
        _one(ops.conv_window),
        _one(reference.conv_window),
        plain,
    )
