"""The shipped shaders: they pass the check, and on the emulator they keep the contracts.

Bits have to be equal across thread schedules, widths (C1) and replays (C2); every such test has a
control that must differ. The oracle for values is `dflash_native.reference`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_native import reference
from dflash_native.tape import Tape as ReferenceTape

from . import SCHEDULES, BenchError, launch, lint
from .compare import ULP, close, nudged, same
from .launch import (
    KINDS,
    Inputs,
    Outputs,
    Tape,
    causal_conv1d,
    conv_window,
    decode,
    encode,
    from_mx,
    gated_delta,
    gates,
    kv_write,
    to_mx,
)
from .runner import FENCED
from .tools import SHADERS

LENGTHS = (1, 3, 16)
BATCH, KEY_HEADS, VALUE_HEADS = 2, 1, 2
# no sum in an order of the hardware's: its bits are nobody's promise
ORDER_OF_NOBODY = ("air.simd_sum", "air.simd_product", "air.simd_prefix", "air.quad_sum", "air.dot")


def every_variant(lengths: tuple[int, ...]) -> Callable[[Callable[..., None]], Any]:
    """Parametrises a test by dtype, T, decay and mask."""

    def decorate(test: Callable[..., None]) -> Any:
        test = pytest.mark.parametrize("kind", KINDS)(test)
        test = pytest.mark.parametrize("inputs", lengths)(test)
        test = pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])(test)
        return pytest.mark.parametrize("mask", [False, True], ids=["plain", "masked"])(test)

    return decorate


@pytest.mark.parametrize("name", sorted(p.name for p in SHADERS.glob("*.metal")))
def test_check(name: str) -> None:
    findings, facts = lint.examine(SHADERS / name)
    assert findings == []
    assert facts.kernels > 0
    assert not [b for b in facts.builtins if b.startswith(ORDER_OF_NOBODY)]


def equal(a: Outputs, b: Outputs) -> bool:
    """Same bits everywhere."""
    return all(same(x, y) for x, y in zip(a, b, strict=True))


def on_every_schedule(run: Callable[[int], Outputs]) -> Outputs:
    """The result, which the schedules have to agree on."""
    first, *others = (run(schedule) for schedule in SCHEDULES)
    assert all(equal(first, other) for other in others), "schedules disagree"
    return first


def recurrence(
    kind: str,
    inputs: int,
    *,
    vector: bool = False,
    mask: bool = False,
    dims: tuple[int, int] = (64, 6),
    seed: int = 0,
) -> tuple[Inputs, np.ndarray]:
    """Inputs in the physical range and a state; about a third of the inputs masked."""
    rng = np.random.default_rng(seed)
    key_dim, value_dim = dims
    q, k = rng.standard_normal((2, BATCH, inputs, KEY_HEADS, key_dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((BATCH, inputs, VALUE_HEADS, value_dim))
    gate = (BATCH, inputs, VALUE_HEADS)
    g = rng.uniform(0.8, 1.0, (*gate, key_dim) if vector else gate).astype(np.float32)
    beta = rng.uniform(0.1, 0.9, gate).astype(np.float32)
    state = rng.standard_normal((BATCH, VALUE_HEADS, value_dim, key_dim)).astype(np.float32)
    on = rng.uniform(size=(BATCH, inputs)) < 0.7
    on[:, 0] = [False, True]
    activations = (encode(x, kind) for x in (q, k, v))
    return Inputs(*activations, g, beta, on if mask else None), state


def chained(
    state: np.ndarray, inputs: Inputs, schedule: int = 0
) -> tuple[Outputs, list[np.ndarray]]:
    """The inputs one at a time: all y and delta, the last state; and every state on the way."""
    states, ys, deltas = [state], [], []
    for t in range(inputs.k.shape[1]):
        one = inputs.part(t, t + 1)
        seen = gated_delta(states[-1], one, schedule=schedule)
        step = gated_delta(states[-1], one, commits=True, schedule=schedule)
        assert same(step.y, seen.y)
        ys.append(seen.y)
        deltas.append(seen.delta)
        states.append(step.state)
    return Outputs(np.concatenate(ys, 1), np.concatenate(deltas, 1), states[-1]), states


def wide(state: np.ndarray, inputs: Inputs, schedule: int = 0) -> Outputs:
    """The inputs in one call: verify's y and delta, step's state."""
    seen = gated_delta(state, inputs, schedule=schedule)
    step = gated_delta(state, inputs, commits=True, schedule=schedule)
    assert same(step.y, seen.y) and step.delta is None and seen.state is None
    return seen._replace(state=step.state)


@every_variant(LENGTHS)
def test_gated_delta_is_the_reference(kind: str, inputs: int, vector: bool, mask: bool) -> None:
    given, state = recurrence(kind, inputs, vector=vector, mask=mask)
    got = on_every_schedule(lambda schedule: wide(state, given, schedule))
    operands = [to_mx(x) for x in given[:5]]
    valid = mx.array(given.mask) if mask else None
    y, tape, _ = reference.gated_delta_verify(*operands, mx.array(state), mask=valid)
    _, after = reference.gated_delta_step(*operands, mx.array(state), valid)
    assert close(decode(got.y), decode(from_mx(y)), 1e-5 + ULP[kind])
    assert close(got.delta, np.array(tape.delta), 1e-5)
    assert close(got.state, np.array(after), 1e-5)
    if given.mask is not None:
        assert not got.y[~given.mask].any() and not got.delta[~given.mask].any()


@pytest.mark.parametrize("dims", [(32, 4), (96, 20), (256, 3)], ids=lambda d: f"{d[0]}x{d[1]}")
def test_gated_delta_at_other_dims(dims: tuple[int, int]) -> None:
    given, state = recurrence("bfloat", 3, dims=dims)
    got = on_every_schedule(lambda schedule: wide(state, given, schedule))
    _, tape, _ = reference.gated_delta_verify(*(to_mx(x) for x in given[:5]), mx.array(state))
    assert close(got.delta, np.array(tape.delta), 1e-5)
    assert equal(got, chained(state, given)[0])


@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key_dim", range(32, 257, 32))
def test_every_gated_delta_kernel_that_ships(key_dim: int, kind: str, vector: bool) -> None:
    given, state = recurrence(kind, 2, vector=vector, dims=(key_dim, 3))
    got = on_every_schedule(lambda schedule: wide(state, given, schedule))
    operands = [to_mx(x) for x in given[:5]]
    y, tape, _ = reference.gated_delta_verify(*operands, mx.array(state))
    assert close(decode(got.y), decode(from_mx(y)), 1e-5 + ULP[kind])
    assert close(got.delta, np.array(tape.delta), 1e-5)
    other, _ = recurrence(kind, 2, vector=vector, dims=(key_dim, 3), seed=1)
    assert not close(wide(state, other).delta, np.array(tape.delta), 1e-5)  # the control


@every_variant(LENGTHS[1:])
def test_gated_delta_width(kind: str, inputs: int, vector: bool, mask: bool) -> None:
    """C1: bits do not depend on T or B."""
    given, state = recurrence(kind, inputs, vector=vector, mask=mask)
    at_once = on_every_schedule(lambda schedule: wide(state, given, schedule))
    by_one = on_every_schedule(lambda schedule: chained(state, given, schedule)[0])
    assert equal(at_once, by_one)
    alone = wide(state[1:], given.row(1))
    assert equal(alone, Outputs(*(x[1:] for x in at_once)))
    control = wide(state, given._replace(beta=nudged(given.beta)))
    assert not equal(control, at_once)


@every_variant(LENGTHS)
def test_gated_delta_replay(kind: str, inputs: int, vector: bool, mask: bool) -> None:
    """C2: replay(S, tape, n) is the state after n single steps, for every n."""
    given, state = recurrence(kind, inputs, vector=vector, mask=mask)
    following, _ = recurrence(kind, 2, vector=vector, seed=2)
    _, states = chained(state, given)
    tape = Tape(given.g, given.k, gated_delta(state, given).delta, given.mask)
    for n in range(inputs + 1):
        schedule = SCHEDULES[n % len(SCHEDULES)]
        keep = [n, inputs - n]
        expected = np.stack([states[keep[b]][b] for b in range(BATCH)])
        replayed = gated_delta(state, tape=tape, keep=keep, schedule=schedule)
        assert same(replayed.state, expected)
        # folded into the next verify, the replayed state is the checkpoint
        folded = gated_delta(state, following, tape, keep, schedule=schedule)
        fresh = gated_delta(expected, following, schedule=schedule)
        assert equal(folded, fresh._replace(state=expected))
    oracle = reference.gated_delta_replay(
        mx.array(state),
        ReferenceTape(*(x if x is None else to_mx(x) for x in tape)),
        mx.array(keep),
    )
    assert close(replayed.state, np.array(oracle), 1e-5)
    everything = gated_delta(state, tape=tape, keep=[inputs] * BATCH)
    control = gated_delta(state, tape=tape._replace(g=nudged(tape.g)), keep=[inputs] * BATCH)
    assert same(everything.state, states[inputs]) and not equal(control, everything)


@pytest.mark.parametrize("wrong", [-1, 4])
def test_gated_delta_poisons_a_row_that_keeps_too_much(wrong: int) -> None:
    given, state = recurrence("half", 3)
    following, _ = recurrence("half", 2, seed=2)
    tape = Tape(given.g, given.k, gated_delta(state, given).delta)
    replayed = gated_delta(state, tape=tape, keep=[wrong, 2], schedule=FENCED).state
    folded = gated_delta(state, following, tape, [wrong, 2], schedule=FENCED)
    sound = gated_delta(state, following, tape, [1, 2])
    assert np.isnan(replayed[0]).all() and same(replayed[1], sound.state[1])
    for got, expected in zip(folded, sound, strict=True):
        assert np.isnan(got[0]).all() and same(got[1], expected[1])


def test_nothing_to_contract() -> None:
    """The bits are the same whether or not a compiler may fuse multiply-adds across expressions."""
    given, state = recurrence("half", 5)
    rng = np.random.default_rng(3)
    x, weight, window = convolution("half", 5)
    a, b, A_log, dt_bias = gate_inputs("half", rng)
    results = [
        [
            *gated_delta(state, given, contract=contract),
            gated_delta(state, given, commits=True, contract=contract).state,
            causal_conv1d(x, weight, window, contract=contract),
            *gates(a, b, A_log, dt_bias, contract=contract),
        ]
        for contract in ("off", "on", "fast")
    ]
    for result in zip(*results, strict=True):
        off, on, fast = result
        assert same(off, on) and same(off, fast)


def gate_inputs(kind: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    a, b = rng.standard_normal((2, BATCH, 5, 4)) * 4
    a[0, :, 0] = [-200.0, -20.0, 0.0, 20.0, 200.0]
    b[0, :, 0] = [-200.0, -20.0, 0.0, 20.0, 200.0]
    A_log = np.log(rng.uniform(1, 16, 4)).astype(np.float32)
    dt_bias = rng.standard_normal(4).astype(np.float32)
    return encode(a, kind), encode(b, kind), A_log, dt_bias


@pytest.mark.parametrize("kind", KINDS)
def test_gated_delta_gates(kind: str) -> None:
    a, b, A_log, dt_bias = gate_inputs(kind, np.random.default_rng(4))
    got = on_every_schedule(lambda s: Outputs(*gates(a, b, A_log, dt_bias, s), None))
    expected = reference.gated_delta_gates(to_mx(a), to_mx(b), mx.array(A_log), mx.array(dt_bias))
    for x, oracle in zip(got, expected, strict=False):
        np.testing.assert_allclose(x, np.array(oracle), rtol=1e-5, atol=1e-30)
    one = gates(a[1:, 2:3].copy(), b[1:, 2:3].copy(), A_log, dt_bias)
    assert all(same(x, y[1:, 2:3]) for x, y in zip(one, got, strict=False))


def convolution(kind: str, inputs: int, taps: int = 4) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(5)
    channels = 37
    x = rng.standard_normal((BATCH, inputs, channels))
    weight = rng.standard_normal((channels, taps))
    window = rng.standard_normal((BATCH, taps - 1, channels))
    return encode(x, kind), encode(weight, kind), encode(window, kind)


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("inputs", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_causal_conv1d(kind: str, inputs: int, taps: int) -> None:
    x, weight, window = convolution(kind, inputs, taps)
    got = on_every_schedule(lambda s: Outputs(causal_conv1d(x, weight, window, s), None, None)).y
    oracle = reference.causal_conv1d_verify(to_mx(x), to_mx(weight), to_mx(window))
    assert close(decode(got), decode(from_mx(oracle)), 1e-6 + ULP[kind])
    at, by_one = window, []
    for t in range(inputs):
        one = np.ascontiguousarray(x[:, t : t + 1])
        by_one.append(causal_conv1d(one, weight, at))
        at = conv_window(at, one, [1] * BATCH)
    assert same(np.concatenate(by_one, 1), got)
    assert not same(causal_conv1d(x, weight, nudged(window)), got)


@pytest.mark.parametrize("inputs", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_conv_window(kind: str, inputs: int) -> None:
    x, _, window = convolution(kind, inputs)
    for n in range(inputs + 1):
        keep = [n, inputs - n]
        oracle = reference.conv_window(to_mx(window), to_mx(x), mx.array(keep))
        for schedule in SCHEDULES:
            assert same(conv_window(window, x, keep, schedule), from_mx(oracle))
    for wrong in (-1, inputs + 1):
        poisoned = decode(conv_window(window, x, [wrong, inputs], FENCED))
        assert np.isnan(poisoned[0]).all()
        assert same(poisoned[1], decode(conv_window(window, x, [0, inputs]))[1])


@pytest.mark.parametrize("inputs", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_kv_write(kind: str, inputs: int) -> None:
    rng = np.random.default_rng(6)
    heads, capacity, dim = 3, 20, 12
    cache = encode(rng.standard_normal((BATCH, heads, capacity, dim)), kind)
    rows = encode(rng.standard_normal((BATCH, heads, inputs, dim)), kind)
    for lengths in ([0, capacity - inputs], [1, 2]):
        oracle = from_mx(reference.kv_write(to_mx(cache), to_mx(rows), mx.array(lengths)))
        assert not same(oracle, cache)
        for schedule in SCHEDULES:
            assert same(kv_write(cache, rows, lengths, schedule), oracle)
    for wrong in (-1, capacity - inputs + 1):
        got = decode(kv_write(cache, rows, [wrong, 2], FENCED))
        assert np.isnan(got[0]).any() and not np.isnan(got[1]).any()


MUTANTS: dict[str, tuple[str, str, Callable[[], None]]] = {
    "another order for more than one input": (
        "part = fma_rn(s[c], load4(qt + c * 32), part);",
        "part = inputs > 1 ? part + scale_rn(s[c], load4(qt + c * 32))"
        " : fma_rn(s[c], load4(qt + c * 32), part);",
        lambda: test_gated_delta_width("float", 3, False, False),
    ),
    "replay rounds twice": (
        "s[c] = fma_rn(dt, load4(kt + c * 32), scale_rn(s[c], decay));",
        "s[c] = dt * load4(kt + c * 32); s[c] = s[c] + scale_rn(s[c], decay);",
        lambda: test_gated_delta_replay("float", 3, False, True),
    ),
    "replay takes masked inputs": (
        "has_valid && !tape_valid[at]",
        "false",
        lambda: test_gated_delta_replay("float", 3, False, True),
    ),
    "rows past the last are written": (
        "const bool live = own_row < value_dim;",
        "const bool live = true;",
        lambda: test_gated_delta_width("float", 3, False, False),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, test = MUTANTS[name]
    shutil.copytree(SHADERS, tmp_path, dirs_exist_ok=True)
    header = tmp_path / "gated_delta.h"
    text = header.read_text()
    assert old in text, "the shader changed: change the mutant too"
    header.write_text(text.replace(old, new))
    monkeypatch.setattr(launch, "SHADERS", tmp_path)
    launch.shader.cache_clear()
    try:
        with pytest.raises((AssertionError, BenchError)):
            test()
    finally:
        launch.shader.cache_clear()
