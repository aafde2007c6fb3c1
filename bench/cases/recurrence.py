"""The gated delta rule: verify, verify with the last round's replay, step, replay, gates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
from mlx_lm.models.gated_delta import compute_g, gated_delta_kernel, gated_delta_ops

from dflash_native import Tape, ops, reference

from . import Case, Inputs, Point, Results, Variant, compiled, operation, total

stock = gated_delta_kernel if mx.metal.is_available() else gated_delta_ops
"""mlx-lm's path on this backend."""


def _has_recurrence(at: Point) -> bool:
    return hasattr(at.config, "linear_num_value_heads")


def _sizes(at: Point) -> tuple[int, int, int, int]:
    """Hk, Hv, Dk, Dv."""
    config = at.config
    return (
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )


def _inputs(at: Point) -> Inputs:
    """q, k, v, g, beta and a state."""
    (Hk, Hv, Dk, Dv), B, T = _sizes(at), at.batch, at.rows
    q, k = mx.random.normal((B, T, Hk, Dk)), mx.random.normal((B, T, Hk, Dk))
    q = q / mx.linalg.norm(q, axis=-1, keepdims=True) * Dk**-0.5
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    v = mx.random.normal((B, T, Hv, Dv))
    g, beta = mx.random.uniform(0.7, 1, (B, T, Hv)), mx.random.uniform(0, 1, (B, T, Hv))
    state = mx.random.normal((B, Hv, Dv, Dk)) * 0.1
    return (*(x.astype(at.mlx_dtype) for x in (q, k, v)), g, beta, state)


def _with_tape(at: Point) -> Inputs:
    """The same, the last round's g, k and innovations, and keep: all of its inputs."""
    given = _inputs(at)
    _, last, _ = ops.gated_delta_verify(*_inputs(at)[:5], given[5])
    return (*given, last.g, last.k, last.delta, mx.full((at.batch,), at.rows, dtype=mx.int32))


def _verify(*given: mx.array) -> Results:
    y, tape, _ = ops.gated_delta_verify(*given)
    return y, tape.delta


def _verify_after(q, k, v, g, beta, state, g0, k0, delta0, keep, by=ops) -> Results:
    last = Tape(g0, k0, delta0, None)
    y, tape, checkpoint = by.gated_delta_verify(q, k, v, g, beta, state, last, keep)
    return y, tape.delta, checkpoint


def _shape(at: Point) -> str:
    Hk, Hv, Dk, Dv = _sizes(at)
    return f"Hk {Hk}, Hv {Hv}, {Dk}/{Dv}"


def _flops(at: Point, per_element: int) -> int:
    _, Hv, Dk, Dv = _sizes(at)
    return per_element * at.batch * at.rows * Hv * Dk * Dv


def _others(compared: int) -> list[Variant]:
    """Baselines that take q, k, v, g, beta and a state and give y and the new state."""
    found = [Variant("mlx-lm", stock, compared=compared)]
    if stock is not gated_delta_ops:
        found.append(Variant("mlx", gated_delta_ops, compared=compared))
    return [*found, Variant("mx.compile", mx.compile(gated_delta_ops), compared=compared)]


def _bytes(at: Point) -> tuple[int, int, int, int]:
    """Of the inputs without state, the state, y, and a tape."""
    (_, Hv, Dk, Dv), B, T = _sizes(at), at.batch, at.rows
    Hk, size = at.config.linear_num_key_heads, at.mlx_dtype.size
    gates, keys = 8 * B * T * Hv, B * T * Hk * Dk * size
    y, delta = B * T * Hv * Dv * size, 4 * B * T * Hv * Dv
    return 2 * keys + y + gates, 4 * B * Hv * Dv * Dk, y, 4 * B * T * Hv + keys + delta


@operation("gated_delta_verify")
def verify(at: Point) -> Iterator[Case]:
    """Without a tape, and with the last round's folded in: what a round runs."""
    if not _has_recurrence(at):
        return
    given, state, y, tape = _bytes(at)
    delta = 4 * at.batch * at.rows * at.config.linear_num_value_heads * _sizes(at)[3]

    def expected(*inputs: mx.array) -> Results:
        y, tape, _ = reference.gated_delta_verify(*inputs)
        return y, tape.delta

    yield Case(
        "gated_delta_verify",
        _shape(at),
        partial(_inputs, at),
        [Variant("ours", _verify), *_others(1)],
        expected,
        bytes=given + state + y + delta,
        flops=_flops(at, 7),
    )
    yield Case(
        "gated_delta_verify + replay",
        _shape(at),
        partial(_with_tape, at),
        [Variant("ours", _verify_after)],
        partial(_verify_after, by=reference),
        bytes=given + state + y + delta + tape + state,
        flops=_flops(at, 10),
    )


@operation("gated_delta_step")
def step(at: Point) -> Iterator[Case]:
    """Plain decoding: commits."""
    if not _has_recurrence(at):
        return
    given, state, y, _ = _bytes(at)
    yield Case(
        "gated_delta_step",
        _shape(at),
        partial(_inputs, at),
        [Variant("ours", ops.gated_delta_step), *_others(2)],
        reference.gated_delta_step,
        bytes=given + 2 * state + y,
        flops=_flops(at, 7),
    )


@operation("gated_delta_replay")
def replay(at: Point) -> Iterator[Case]:
    """A state from a tape; the baseline runs the recurrence again, as rollback without one does."""
    if not _has_recurrence(at):
        return
    _, state, _, tape = _bytes(at)

    def ours(*inputs: mx.array) -> Results:
        return [ops.gated_delta_replay(inputs[5], Tape(*inputs[6:9], None), inputs[9])]

    def expected(*inputs: mx.array) -> Results:
        return [reference.gated_delta_replay(inputs[5], Tape(*inputs[6:9], None), inputs[9])]

    def make() -> Inputs:
        inputs = _inputs(at)
        _, own, _ = ops.gated_delta_verify(*inputs)
        keep = mx.full((at.batch,), at.rows, dtype=mx.int32)
        return (*inputs, own.g, own.k, own.delta, keep)

    yield Case(
        "gated_delta_replay",
        _shape(at),
        make,
        [Variant("ours", ours), Variant("mlx-lm", lambda *inputs: [stock(*inputs[:6])[1]])],
        expected,
        bytes=tape + 2 * state,
        flops=_flops(at, 3),
    )


@operation("gated_delta_gates")
def gates(at: Point) -> Iterator[Case]:
    """Decay and write strength."""
    if not _has_recurrence(at):
        return
    heads = at.config.linear_num_value_heads

    def make() -> Inputs:
        a, b = (at.normal(at.batch, at.rows, heads) for _ in range(2))
        return a, b, mx.random.uniform(-4, 0, (heads,)), mx.random.normal((heads,))

    def plain(a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array) -> Results:
        rate = mx.exp(A_log.astype(mx.float32))
        return mx.exp(-rate * mx.logaddexp(a + dt_bias, 0)), mx.sigmoid(b)

    def lm(a: mx.array, b: mx.array, A_log: mx.array, dt_bias: mx.array) -> Results:
        return compute_g(A_log, a, dt_bias), mx.sigmoid(b)

    some = make()
    yield Case(
        "gated_delta_gates",
        f"Hv {heads}",
        make,
        [
            Variant("ours", ops.gated_delta_gates),
            Variant("mlx-lm", lm),
            Variant("mlx", plain),
            compiled(plain),
        ],
        reference.gated_delta_gates,
        bytes=total(*some) + 8 * at.batch * at.rows * heads,
        flops=0,
    )
