"""Plain-MLX oracles, one for each operation: fp32, a loop over time, no kernel.

Every kernel is compared to these. They follow the definitions word for word and are slow on
purpose. The recurrence is that of "Gated Delta Networks" (Yang, Kautz, Hatamizadeh,
arXiv:2412.06464), eq. 10.
"""

from __future__ import annotations

import math
from typing import cast

import mlx.core as mx

from .tape import Tape


def _f32(x: mx.array) -> mx.array:
    return x.astype(mx.float32)


def _decay(g: mx.array) -> mx.array:
    """`g [B, Hv]` or `[B, Hv, Dk]` as a factor of `S [B, Hv, Dv, Dk]`."""
    return g[..., None, None] if g.ndim == 2 else g[:, :, None, :]


def gated_delta_gates(
    a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array
) -> tuple[mx.array, mx.array]:
    """`ops.gated_delta_gates`, elementwise."""
    x = _f32(a) + _f32(dt_bias)
    g = mx.exp(-mx.exp(_f32(A_log)) * mx.logaddexp(x, mx.zeros_like(x)))
    return g, mx.sigmoid(_f32(b))


def _recurrence(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None,
) -> tuple[mx.array, mx.array, mx.array]:
    repeats = v.shape[2] // k.shape[2]
    dtype = v.dtype
    q, k, v = (_f32(x) for x in (q, k, v))
    q, k = (mx.repeat(x, repeats, axis=2) for x in (q, k))
    ys, deltas = [], []
    for t in range(v.shape[1]):
        decayed = _decay(g[:, t]) * state
        delta = beta[:, t, :, None] * (v[:, t] - (decayed * k[:, t, :, None, :]).sum(-1))
        new = decayed + delta[..., None] * k[:, t, :, None, :]
        y = (new * q[:, t, :, None, :]).sum(-1)
        if mask is not None:
            on = mask[:, t, None, None]
            y, delta = mx.where(on, y, 0), mx.where(on, delta, 0)
            new = mx.where(on[..., None], new, state)
        state = new
        ys.append(y)
        deltas.append(delta)
    return mx.stack(ys, 1).astype(dtype), mx.stack(deltas, 1), state


def gated_delta_step(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """`ops.gated_delta_step`, one input after the other."""
    y, _, state = _recurrence(q, k, v, g, beta, state, mask)
    return y, state


def gated_delta_replay(state: mx.array, tape: Tape, keep: mx.array) -> mx.array:
    """`ops.gated_delta_replay`: the kept inputs of a tape, applied again."""
    g, k, delta, valid = tape
    k = mx.repeat(_f32(k), delta.shape[2] // k.shape[2], axis=2)
    for t in range(delta.shape[1]):
        new = _decay(g[:, t]) * state + delta[:, t, :, :, None] * k[:, t, :, None, :]
        on = t < keep
        if valid is not None:
            on = on & valid[:, t]
        state = mx.where(on[:, None, None, None], new, state)
    return state


def gated_delta_verify(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    tape: Tape | None = None,
    keep: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, Tape, mx.array]:
    """`ops.gated_delta_verify`: replay, then the inputs on trial."""
    if (tape is None) != (keep is None):
        raise ValueError("[reference.gated_delta_verify] expected tape and keep together.")
    if tape is not None and keep is not None:
        state = gated_delta_replay(state, tape, keep)
    y, delta, _ = _recurrence(q, k, v, g, beta, state, mask)
    return y, Tape(g, k, delta, mask), state


def causal_conv1d_verify(x: mx.array, weight: mx.array, window: mx.array) -> mx.array:
    """`ops.causal_conv1d_verify`, tap by tap."""
    taps, inputs = window.shape[1] + 1, x.shape[1]
    weight = _f32(weight).reshape(-1, taps)
    padded = _f32(mx.concatenate([window, x], axis=1))
    total = mx.zeros(x.shape, dtype=mx.float32)
    for tap in range(taps):
        total = total + padded[:, tap : tap + inputs] * weight[:, tap]
    return (total * mx.sigmoid(total)).astype(x.dtype)


def conv_window(window: mx.array, x: mx.array, keep: mx.array) -> mx.array:
    """`ops.conv_window`: the newest rows of window and kept inputs."""
    padded = mx.concatenate([window, x], axis=1)
    rows = keep[:, None] + mx.arange(window.shape[1])
    return mx.take_along_axis(padded, rows[..., None], axis=1)


def kv_write(cache: mx.array, new: mx.array, lengths: mx.array) -> mx.array:
    """`ops.kv_write`, as a scatter into a copy."""
    rows = lengths[:, None] + mx.arange(new.shape[2])
    rows = mx.broadcast_to(rows[:, None, :, None], new.shape)
    return mx.put_along_axis(cache, rows, new.astype(cache.dtype), axis=2)


def _seen(length: int, t: int, inputs: int, window: int | None, causal: bool) -> list[int]:
    """The positions that row t of a block sees, whatever its mask."""
    last = length + t if causal else length + inputs - 1
    first = 0 if window is None else max(0, length + t - window + 1)
    return list(range(first, last + 1))


def verify_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    lengths: mx.array,
    scale: float,
    window: int | None = None,
    causal: bool = True,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """`ops.verify_attention`: for each row, softmax over the keys that it sees, gathered."""
    repeats, inputs = q.shape[1] // k.shape[1], q.shape[2]
    visible = None if mask is None else cast(list[list[bool]], mask.tolist())
    batch = []
    for b, length in enumerate(cast(list[int], lengths.tolist())):
        rows = []
        for t in range(inputs):
            seen = _seen(length, t, inputs, window, causal and visible is None)
            if visible is not None:
                seen = [at for at in seen if at < length or visible[t][at - length]]
            if not seen:
                rows.append(mx.zeros((q.shape[1], v.shape[3])))
                continue
            at = mx.array(seen)
            keys, values = (mx.repeat(_f32(x[b][:, at]), repeats, axis=0) for x in (k, v))
            scores = (keys * _f32(q[b, :, t, None])).sum(-1) * scale
            if sinks is not None:
                scores = mx.concatenate([sinks[:, None], scores], axis=1)
            weights = mx.softmax(scores, axis=-1)[:, -len(seen) :]
            rows.append((weights[..., None] * values).sum(1))
        batch.append(mx.stack(rows, 1))
    return mx.stack(batch).astype(q.dtype)


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """`ops.rms_norm`."""
    dtype = x.dtype if weight is None else mx.result_type(x, weight)
    y = _f32(x) * mx.rsqrt((_f32(x) * _f32(x)).mean(-1, keepdims=True) + eps)
    return (y if weight is None else y * _f32(weight)).astype(dtype)


def rms_norm_gated(x: mx.array, gate: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """`ops.rms_norm_gated`, rounded once."""
    return swiglu(_f32(gate), rms_norm(_f32(x), weight, eps)).astype(x.dtype)


def add_rms_norm(
    x: mx.array, residual: mx.array, weight: mx.array | None, eps: float
) -> tuple[mx.array, mx.array]:
    """`ops.add_rms_norm`."""
    dtype = mx.result_type(x, residual)
    dtype = dtype if weight is None else mx.result_type(dtype, weight)
    total = (_f32(x) + _f32(residual)).astype(dtype)
    return total, rms_norm(total, weight, eps)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """`ops.swiglu`."""
    y = _f32(gate) * mx.sigmoid(_f32(gate)) * _f32(up)
    return y.astype(mx.result_type(gate, up))


def sigmoid_gate(x: mx.array, gate: mx.array) -> mx.array:
    """`ops.sigmoid_gate`."""
    return (_f32(x) * mx.sigmoid(_f32(gate))).astype(mx.result_type(x, gate))


def rope(
    x: mx.array,
    lengths: mx.array,
    dims: int,
    *,
    base: float | None = None,
    freqs: mx.array | None = None,
    scale: float = 1.0,
    traditional: bool = False,
) -> mx.array:
    """`ops.rope`, pair by pair."""
    pairs = dims // 2
    turns = mx.exp(mx.arange(pairs, dtype=mx.float32) * -(math.log(base or 1) / pairs))
    turns = turns if freqs is None else 1 / freqs
    at = (lengths[:, None] + mx.arange(x.shape[2])).astype(mx.float32) * scale
    angle = at[:, None, :, None] * turns  # [B, 1, T, pairs]
    shape = (*x.shape[:3], pairs, 2) if traditional else (*x.shape[:3], 2, pairs)
    axis = -1 if traditional else -2
    a, b = (y.squeeze(axis) for y in mx.split(_f32(x[..., :dims]).reshape(shape), 2, axis))
    turned = a * mx.cos(angle) - b * mx.sin(angle), b * mx.cos(angle) + a * mx.sin(angle)
    y = mx.stack(list(turned), axis).reshape(*x.shape[:3], dims)
    return mx.concatenate([y.astype(x.dtype), x[..., dims:]], axis=-1)


def _dense(
    weight: mx.array, scales: mx.array | None, biases: mx.array | None, group_size: int, bits: int
) -> mx.array:
    """The weight in fp32: `scale * q + bias` where it is quantised."""
    if scales is None or biases is None:
        return _f32(weight)
    q = (weight[..., None] >> mx.arange(0, 32, bits, dtype=mx.uint32)) & (2**bits - 1)
    q = _f32(q).reshape(*scales.shape, group_size)
    w = _f32(scales)[..., None] * q + _f32(biases)[..., None]
    return w.reshape(*w.shape[:-2], -1)


def verify_matmul(
    x: mx.array,
    weight: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    bias: mx.array | None = None,
    *,
    group_size: int = 64,
    bits: int = 4,
) -> mx.array:
    """`ops.verify_matmul`, row by row."""
    w = _dense(weight, scales, biases, group_size, bits)
    rows = [w @ row for row in _f32(x).reshape(-1, x.shape[-1])]
    out = mx.stack(rows).reshape(*x.shape[:-1], w.shape[0])
    if bias is not None:
        out = out + _f32(bias)
    return out.astype(mx.result_type(x, weight if scales is None else scales))


def verify_gather_matmul(
    x: mx.array,
    weight: mx.array,
    indices: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    bias: mx.array | None = None,
    *,
    group_size: int = 64,
    bits: int = 4,
) -> mx.array:
    """`ops.verify_gather_matmul`, result by result."""
    w = _dense(weight, scales, biases, group_size, bits)
    each = mx.broadcast_to(_f32(x), (*indices.shape, x.shape[-1])).reshape(-1, x.shape[-1])
    experts = indices.reshape(-1)
    rows = [w[expert] @ row for expert, row in zip(experts, each, strict=True)]
    out = mx.stack(rows).reshape(*indices.shape, w.shape[1])
    if bias is not None:
        out = out + _f32(bias)[indices]
    return out.astype(mx.result_type(x, weight if scales is None else scales))
