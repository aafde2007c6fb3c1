"""The plain-MLX reference against an outside implementation: transformers' torch code.

The fixtures were made once, by tests/fixtures/make_gated_delta.py, with torch 2.13.0 (CPU) and
transformers 5.24.0: Qwen3-Next's recurrent and chunked gated delta rule, its causal convolution,
the gates of its layer's forward, the whole layer over three calls, and Kimi Linear's rule for a
gate per channel. Neither package is needed here.

The bound is an error ratio, ||out - theirs|| / ||theirs||, below 1e-6 in fp32. Measured on CPU,
at most: recurrence y 2.0e-7, state after any prefix 9.2e-8; convolution 1.1e-7, its windows equal
bit for bit; decay 1.5e-8 (its log 1.4e-7), beta 4.2e-8; whole layer y 2.7e-7, state 2.2e-7. With
bf16 inputs: recurrence y 3.0e-6, convolution 3.2e-3, beta 1.1e-3. Against an fp64 recurrence ours
and theirs are equally far off (y 0.8e-7 to 1.6e-7), and theirs apart from each other by 3e-7.

Differences of convention, theirs -> ours (the script's docstring says more on each):

- `g` is the log of the decay -> the decay itself.
- State [B, Hv, Dk, Dv], or None for zeros -> [B, Hv, Dv, Dk], always given.
- The kernel multiplies q by Dk^-0.5 and, on request, normalises q and k in fp32, with 1e-6 added
  to the sum of squares -> the caller does both.
- Value head hv reads key head hv // (Hv // Hk): the same in both, repeated and not tiled.
- The read-out uses the updated state: the same in both.
- y has q's dtype -> v's.
- beta = sigmoid(b) in b's dtype -> in fp32; softplus linear above 20 -> never.
- Convolution over [B, C, T], weight [C, K] -> [B, T, C], weight [C, K] or [C, K, 1]; the last tap
  meets the newest input in both; a bf16 result rounded before and after silu -> after only.
- Convolution state of K inputs, the oldest never read, changed in place -> window of K - 1 inputs,
  a value.
- A padded position has its hidden state zeroed and still decays the state -> a masked input leaves
  the state's bits alone.
- Gate per channel (Kimi Linear): log decay [B, T, H, Dk] -> linear, the same shape.

Where numbers can show a difference there is a negative control: the other convention misses by
more than 1e-2 or, for the norm's epsilon and a bf16 beta, by more than the bound that ours keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import mlx.core as mx
import numpy as np
import pytest

from dflash_native import reference
from dflash_native.tape import Tape

FILE = Path(__file__).parent / "fixtures" / "gated_delta_transformers.safetensors"
FIXTURES = cast(dict[str, mx.array], mx.load(str(FILE)))
MATCH = 1e-6
MATCH_BF16 = 4e-3  # half an ulp of bf16 is 2^-9 = 2e-3 of a value, and theirs rounds once more
DIFFER = 1e-2

Case = dict[str, mx.array]


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    """The bound was measured on CPU; a GPU's exp and rsqrt are not the reference's business."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


def case(name: str) -> Case:
    prefix = name + "/"
    return {key.removeprefix(prefix): x for key, x in FIXTURES.items() if key.startswith(prefix)}


def names(kind: str) -> list[str]:
    return sorted({key.split("/")[1] for key in FIXTURES if key.startswith(kind + "/")})


def error_ratio(out: mx.array, expected: mx.array) -> float:
    assert out.shape == expected.shape, (out.shape, expected.shape)
    a, b = (np.array(x.astype(mx.float32), dtype=np.float64) for x in (out, expected))
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))


class Inputs(NamedTuple):
    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array


def inputs(c: Case, start: int = 0, stop: int | None = None) -> Inputs:
    return Inputs(*(c[name][:, start:stop] for name in Inputs._fields))


def step(c: Case, state: mx.array | None = None, **other: mx.array) -> tuple[mx.array, mx.array]:
    """`gated_delta_step` over the whole case, with the state or some inputs replaced."""
    initial = c["states"][:, 0] if state is None else state
    return reference.gated_delta_step(*inputs(c)._replace(**other), initial)


def verify(c: Case) -> tuple[mx.array, Tape]:
    y, tape, checkpoint = reference.gated_delta_verify(*inputs(c), c["states"][:, 0])
    assert mx.array_equal(checkpoint, c["states"][:, 0])
    return y, tape


def kept(c: Case, count: int) -> mx.array:
    return mx.full((c["v"].shape[0],), count, dtype=mx.int32)


@pytest.mark.parametrize("name", names("recurrence"))
def test_gated_delta_step_matches_transformers(name: str) -> None:
    c = case(f"recurrence/{name}")
    y, state = step(c)
    assert y.dtype == c["v"].dtype and state.dtype == mx.float32
    assert error_ratio(y, c["y"]) < (MATCH_BF16 if name == "bf16" else MATCH)
    assert error_ratio(state, c["states"][:, -1]) < MATCH


@pytest.mark.parametrize("name", names("recurrence"))
def test_replay_of_every_prefix_matches_transformers(name: str) -> None:
    """The state after n inputs is theirs after n; with n - 1 or n + 1 it is not."""
    c = case(f"recurrence/{name}")
    y, tape = verify(c)
    assert error_ratio(y, c["y"]) < (MATCH_BF16 if name == "bf16" else MATCH)
    for n in range(c["v"].shape[1] + 1):
        state = reference.gated_delta_replay(c["states"][:, 0], tape, kept(c, n))
        for m in range(c["v"].shape[1] + 1):
            ratio = error_ratio(state, c["states"][:, m])
            assert ratio < MATCH if m == n else ratio > DIFFER


def test_replay_keeps_another_prefix_for_each_row() -> None:
    c = case("recurrence/batch")
    _, tape = verify(c)
    for keep in ([0, 4], [3, 1], [2, 2]):
        state = reference.gated_delta_replay(c["states"][:, 0], tape, mx.array(keep))
        for row, n in enumerate(keep):
            assert error_ratio(state[row], c["states"][row, n]) < MATCH
            assert error_ratio(state[row], c["states"][1 - row, n]) > DIFFER


@pytest.mark.parametrize("n", range(10))
def test_verify_after_a_rollback_matches_transformers(n: int) -> None:
    """A verify of all nine inputs keeps n; the next one folds that replay in and goes on from n."""
    c = case("recurrence/long")
    _, tape = verify(c)
    following = inputs(c, n) if n < 9 else inputs(c, 0, 1)
    y, _, checkpoint = reference.gated_delta_verify(
        *following, c["states"][:, 0], tape=tape, keep=kept(c, n)
    )
    assert error_ratio(checkpoint, c["states"][:, n]) < MATCH
    if n < 9:
        assert error_ratio(y, c["y"][:, n:]) < MATCH
    unrolled, _, _ = reference.gated_delta_verify(
        *following, c["states"][:, 0], tape=tape, keep=kept(c, (n + 1) % 10)
    )
    assert error_ratio(unrolled, y) > DIFFER


@pytest.mark.parametrize("name", names("recurrence"))
def test_masked_inputs_leave_transformers_result(name: str) -> None:
    """Each input is followed by a masked one that holds garbage: theirs never saw those."""
    c = case(f"recurrence/{name}")
    on = mx.arange(2 * c["v"].shape[1]) % 2 == 0
    garbage = mx.array(0.7)

    def spread(x: mx.array) -> mx.array:
        visible = on.reshape(1, -1, *[1] * (x.ndim - 2))
        return mx.where(visible, mx.repeat(x, 2, axis=1), garbage.astype(x.dtype))

    padded = Inputs(*map(spread, inputs(c)))
    mask = mx.broadcast_to(on, padded.v.shape[:2])
    initial, final = c["states"][:, 0], c["states"][:, -1]
    y, tape, _ = reference.gated_delta_verify(*padded, initial, mask=mask)
    assert not mx.any(y[:, 1::2]) and not mx.any(tape.delta[:, 1::2])
    assert error_ratio(y[:, ::2], c["y"]) < (MATCH_BF16 if name == "bf16" else MATCH)
    replayed = reference.gated_delta_replay(initial, tape, kept(c, on.size))
    assert error_ratio(replayed, final) < MATCH
    assert error_ratio(reference.gated_delta_step(*padded, initial, mask=mask)[1], final) < MATCH
    assert error_ratio(reference.gated_delta_step(*padded, initial)[1], final) > DIFFER


def test_scalar_gate_is_a_gate_per_channel() -> None:
    c = case("recurrence/ratio2")
    gate = mx.broadcast_to(c["g"][..., None], (*c["g"].shape, c["k"].shape[-1]))
    y, state = step(c, g=gate)
    assert error_ratio(y, c["y"]) < MATCH
    assert error_ratio(state, c["states"][:, -1]) < MATCH


@pytest.mark.parametrize("name", sorted({*names("recurrence")} - {"single"}))
def test_control_log_decay_fails(name: str) -> None:
    """Not shown by `single`: from an empty state the first input knows no decay."""
    c = case(f"recurrence/{name}")
    y, state = step(c, g=mx.log(c["g"]))
    assert error_ratio(y, c["y"]) > DIFFER
    assert error_ratio(state, c["states"][:, -1]) > DIFFER


def test_control_transposed_state_fails() -> None:
    """Dk = Dv, so that no shape gives the mistake away: transposed on the way in, and read so."""
    c = case("recurrence/square")
    y, state = step(c, state=c["states"][:, 0].swapaxes(-1, -2))
    assert error_ratio(y, c["y"]) > DIFFER
    assert error_ratio(state, c["states"][:, -1]) > DIFFER
    assert error_ratio(step(c)[1].swapaxes(-1, -2), c["states"][:, -1]) > DIFFER


@pytest.mark.parametrize("name", ["ratio2", "ratio3"])
def test_control_tiled_heads_fail(name: str) -> None:
    c = case(f"recurrence/{name}")
    ratio = c["v"].shape[2] // c["k"].shape[2]
    repeated = step(c, **{n: mx.repeat(c[n], ratio, axis=2) for n in ("q", "k")})
    tiled = step(c, **{n: mx.tile(c[n], (1, 1, ratio, 1)) for n in ("q", "k")})
    for out, bad, expected in zip(repeated, tiled, (c["y"], c["states"][:, -1]), strict=True):
        assert error_ratio(out, expected) < MATCH
        assert error_ratio(bad, expected) > DIFFER


def test_control_scale_and_norm_belong_to_the_caller() -> None:
    c = case("recurrence/ratio2")
    scale = c["k"].shape[-1] ** -0.5
    unscaled, _ = step(c, q=c["q"] / scale)
    assert error_ratio(unscaled, c["y"]) > DIFFER
    assert error_ratio(unscaled * scale, c["y"]) < MATCH
    assert error_ratio(step(c, k=c["k"] / scale)[1], c["states"][:, -1]) > DIFFER


def test_gates_match_transformers() -> None:
    """Ours is exp of their log decay. `a` reaches -100 and 100, past softplus's threshold of 20."""
    c = case("gates/fp32")
    g, beta = reference.gated_delta_gates(c["a"], c["b"], c["A_log"], c["dt_bias"])
    assert g.dtype == beta.dtype == mx.float32
    assert error_ratio(g, mx.exp(c["log_decay"])) < MATCH
    assert error_ratio(beta, c["beta"]) < MATCH
    slow = c["log_decay"] > -1  # where the log survives the rounding of a linear decay
    assert int(mx.sum(slow)) > 10
    expected = mx.where(slow, c["log_decay"], 0)
    assert error_ratio(mx.where(slow, mx.log(g), 0), expected) < MATCH
    assert error_ratio(g, c["log_decay"]) > DIFFER
    assert error_ratio(c["b"], c["beta"]) > DIFFER


def test_bf16_gates_keep_beta_in_fp32() -> None:
    """Their beta is rounded to bf16, ours is not: 1e-6 would fail, rounding ours restores it."""
    c = case("gates/bf16")
    g, beta = reference.gated_delta_gates(c["a"], c["b"], c["A_log"], c["dt_bias"])
    assert g.dtype == beta.dtype == mx.float32
    assert error_ratio(g, mx.exp(c["log_decay"])) < MATCH
    assert MATCH < error_ratio(beta, c["beta"]) < MATCH_BF16
    assert mx.array_equal(beta.astype(mx.bfloat16), c["beta"])


@pytest.mark.parametrize("name", names("convolution"))
def test_causal_conv1d_matches_transformers(name: str) -> None:
    c = case(f"convolution/{name}")
    bound = MATCH_BF16 if name.endswith("bf16") else MATCH
    x, weight, window = c["x"], c["weight"], c["window"]
    y = reference.causal_conv1d_verify(x, weight, window)
    assert y.dtype == x.dtype
    assert error_ratio(y, c["y"]) < bound
    assert mx.array_equal(y, reference.causal_conv1d_verify(x, weight.squeeze(-1), window))
    flipped = reference.causal_conv1d_verify(x, weight[:, ::-1], window)
    late = reference.causal_conv1d_verify(x, weight, c["windows"][:, 1])
    assert error_ratio(flipped, c["y"]) > DIFFER
    assert error_ratio(late, c["y"]) > DIFFER


@pytest.mark.parametrize("name", names("convolution"))
def test_conv_window_of_every_prefix_matches_transformers(name: str) -> None:
    c = case(f"convolution/{name}")
    batch, inputs = c["x"].shape[:2]
    for n in range(inputs + 1):
        keep = [n, inputs - n][:batch]
        window = reference.conv_window(c["window"], c["x"], mx.array(keep))
        for row, count in enumerate(keep):
            assert mx.array_equal(window[row], c["windows"][row, count])
            other = (count + 1) % (inputs + 1)
            assert not mx.array_equal(window[row], c["windows"][row, other])


def run_layer(c: Case, epsilon: float) -> list[tuple[mx.array, mx.array, mx.array]]:
    """y, state and window after each of transformers' three calls, of 5, 4 and 1 inputs."""
    batch, _, value_heads, value_dim = c["y"].shape
    key_dim = c["states"].shape[-1]
    key_width = (c["x"].shape[-1] - value_heads * value_dim) // 2

    def normalise(x: mx.array) -> mx.array:
        x = x.reshape(batch, x.shape[1], -1, key_dim)
        return x * mx.rsqrt((x * x).sum(-1, keepdims=True) + epsilon)

    window = mx.zeros((batch, c["weight"].shape[1] - 1, c["x"].shape[-1]))
    state = mx.zeros_like(c["states"][:, 0])
    g, beta = reference.gated_delta_gates(c["a"], c["b"], c["A_log"], c["dt_bias"])
    calls = []
    for start, stop in ((0, 5), (5, 9), (9, 10)):
        x = c["x"][:, start:stop]
        mixed = reference.causal_conv1d_verify(x, c["weight"], window)
        q, k, v = mx.split(mixed, [key_width, 2 * key_width], axis=-1)
        y, state = reference.gated_delta_step(
            normalise(q) * key_dim**-0.5,
            normalise(k),
            v.reshape(batch, stop - start, value_heads, value_dim),
            g[:, start:stop],
            beta[:, start:stop],
            state,
        )
        window = reference.conv_window(window, x, mx.full((batch,), stop - start, dtype=mx.int32))
        calls.append((y, state, window))
    return calls


def test_layer_matches_transformers() -> None:
    """Convolution, gates, normalisation and rule together, over three calls."""
    c = case("layer/whole")
    calls = run_layer(c, 1e-6)
    assert error_ratio(mx.concatenate([y for y, _, _ in calls], axis=1), c["y"]) < MATCH
    for call, (_, state, window) in enumerate(calls):
        assert error_ratio(state, c["states"][:, call]) < MATCH
        assert mx.array_equal(window, c["windows"][:, call])


@pytest.mark.parametrize("epsilon", [0.0, 32e-6], ids=["none", "on_the_mean"])
def test_control_layer_with_another_epsilon_fails(epsilon: float) -> None:
    """Short q and k (norms below 0.1) tell 1e-6 on the sum from none, and from 1e-6 on the mean."""
    c = case("layer/whole")
    calls = run_layer(c, epsilon)
    assert error_ratio(mx.concatenate([y for y, _, _ in calls], axis=1), c["y"]) > 10 * MATCH
    for call, (_, state, _) in enumerate(calls):
        assert error_ratio(state, c["states"][:, call]) > 10 * MATCH
