"""The gated delta operations: against the reference, and contracts C1 and C2 to the bit."""

from __future__ import annotations

import mlx.core as mx
import pytest

from dflash_native import Tape, ops, reference
from inputs import DTYPES, at, error, gated_delta, name, same

SHAPES = [  # B, T, Hk, Hv, Dk, Dv
    (1, 16, 16, 32, 128, 128),
    (1, 3, 4, 4, 192, 128),
    (2, 5, 2, 4, 32, 16),
    (3, 7, 1, 3, 64, 13),
    (1, 2, 1, 1, 256, 1),
    (1, 17, 1, 5, 96, 30),
    (2, 33, 2, 2, 160, 4),
    (1, 9, 3, 6, 224, 7),
]
LIMIT = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 6e-3}


def single_steps(inputs, state, mask=None):
    """All outputs and all T + 1 states, one input at a time."""
    states, ys = [state], []
    for t in range(inputs[0].shape[1]):
        on = None if mask is None else mask[:, t : t + 1]
        y, state = ops.gated_delta_step(*at(inputs, t, t + 1), state, on)
        ys.append(y)
        states.append(state)
    return mx.concatenate(ys, axis=1), states


@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_verify_gives_what_the_reference_gives(backend, shape, dtype, vector):
    inputs, state = gated_delta(*shape, dtype, vector)
    y, tape, checkpoint = ops.gated_delta_verify(*inputs, state)
    y_ref, tape_ref, _ = reference.gated_delta_verify(*inputs, state)
    assert error(y, y_ref) < LIMIT[dtype]
    assert error(tape.delta, tape_ref.delta) < 2e-6
    assert y.dtype == dtype and tape.delta.dtype == mx.float32
    assert same(checkpoint, state)
    _, after = ops.gated_delta_step(*inputs, state)
    assert error(after, reference.gated_delta_step(*inputs, state)[1]) < 2e-6
    wrong = reference.gated_delta_verify(*inputs[:3], inputs[3] * 0.99, inputs[4], state)
    assert error(tape.delta, wrong[1].delta) > 1e-4  # the control


@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_width_has_the_bits_of_single_steps(backend, shape, dtype, vector):
    """C1: one call of T inputs, the calls of any split of it, and T calls of one give
    one result.
    """
    inputs, state = gated_delta(*shape, dtype, vector)
    T = shape[1]
    y, tape, _ = ops.gated_delta_verify(*inputs, state)
    y_steps, states = single_steps(inputs, state)
    assert same(y, y_steps)
    for cut in {1, T // 2, T - 1} - {0, T}:
        first, middle = ops.gated_delta_step(*at(inputs, 0, cut), state)
        second, tape_two, _ = ops.gated_delta_verify(*at(inputs, cut, T), middle)
        assert same(middle, states[cut])
        assert same(y, mx.concatenate([first, second], axis=1))
        assert same(tape.delta[:, cut:], tape_two.delta)
    nudged = [x * 2 if i == 2 else x for i, x in enumerate(inputs)]
    assert not same(y, ops.gated_delta_verify(*nudged, state)[0])  # the control


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", [(3, 5, 2, 4, 64, 24), (4, 16, 1, 2, 128, 128)], ids=str)
def test_a_row_does_not_see_the_other_rows(backend, shape, dtype):
    """C1: a row alone, in its batch, and in a batch whose other rows are NaN has the same bits."""
    inputs, state = gated_delta(*shape, dtype)
    y, tape, _ = ops.gated_delta_verify(*inputs, state)
    for b in range(shape[0]):
        alone = [x[b : b + 1] for x in inputs]
        y_alone, tape_alone, _ = ops.gated_delta_verify(*alone, state[b : b + 1])
        assert same(y[b : b + 1], y_alone) and same(tape.delta[b : b + 1], tape_alone.delta)
        others = mx.arange(shape[0]) != b
        spoiled = [
            mx.where(others.reshape(-1, *[1] * (x.ndim - 1)), mx.array(float("nan"), x.dtype), x)
            for x in inputs
        ]
        assert same(y[b], ops.gated_delta_verify(*spoiled, state)[0][b])
    assert not same(y[0], y[1])  # the control


@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_replay_has_the_bits_of_single_steps(backend, shape, dtype, vector):
    """C2, for every n in 0 .. T; folded into the next verify and alone."""
    inputs, state = gated_delta(*shape, dtype, vector)
    B, T = shape[:2]
    _, tape, _ = ops.gated_delta_verify(*inputs, state)
    _, states = single_steps(inputs, state)
    following, _ = gated_delta(B, 3, *shape[2:], dtype, vector)
    for n in range(T + 1):
        replayed = ops.gated_delta_replay(state, tape, [n] * B)
        assert same(replayed, states[n])
        y, next_tape, checkpoint = ops.gated_delta_verify(*following, state, tape, [n] * B)
        assert same(checkpoint, states[n])
        y_plain, tape_plain, _ = ops.gated_delta_verify(*following, states[n])
        assert same(y, y_plain) and same(next_tape.delta, tape_plain.delta)
        if n:
            assert not same(replayed, states[n - 1])  # the control


def test_rows_keep_different_numbers(backend):
    inputs, state = gated_delta(4, 6, 2, 4, 64, 32, mx.bfloat16)
    _, tape, _ = ops.gated_delta_verify(*inputs, state)
    _, states = single_steps(inputs, state)
    keep = [0, 6, 3, 1]
    replayed = ops.gated_delta_replay(state, tape, mx.array(keep))
    for b, n in enumerate(keep):
        assert same(replayed[b], states[n][b])
    assert not same(replayed[2], states[2][2])  # the control


@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
def test_masked_inputs_leave_no_trace(backend, vector):
    """y = 0 and delta = 0; the state has the bits of the run without them; replay skips them."""
    inputs, state = gated_delta(2, 7, 1, 2, 32, 8, mx.float16, vector)
    mask = mx.array([[1, 0, 1, 1, 0, 0, 1], [0, 1, 1, 0, 1, 1, 1]]).astype(mx.bool_)
    inputs[2] = mx.where(mask[:, :, None, None], inputs[2], mx.array(float("nan"), mx.float16))
    y, tape, _ = ops.gated_delta_verify(*inputs, state, mask=mask)
    _, after = ops.gated_delta_step(*inputs, state, mask)
    off = ~mask[:, :, None, None]
    assert mx.all(mx.where(off, y == 0, True)) and mx.all(mx.where(off, tape.delta == 0, True))
    for b in range(2):
        kept = [t for t in range(7) if mask[b, t].item()]
        alone = [x[b : b + 1, mx.array(kept)] for x in inputs]
        y_alone, after_alone = ops.gated_delta_step(*alone, state[b : b + 1])
        assert same(y[b, mx.array(kept)], y_alone[0]) and same(after[b], after_alone[0])
        assert same(ops.gated_delta_replay(state, tape, [7, 7])[b], after_alone[0])
        part = ops.gated_delta_replay(state, tape, [4, 4])[b]
        before = [x[:, : sum(t < 4 for t in kept)] for x in alone]
        assert same(part, ops.gated_delta_step(*before, state[b : b + 1])[1][0])
    _, unmasked = ops.gated_delta_step(*inputs, state)
    assert not same(after, unmasked)  # the control


def test_inputs_need_not_be_contiguous(backend):
    inputs, state = gated_delta(2, 4, 2, 4, 64, 16, mx.bfloat16)
    views = [mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2) for x in inputs]
    state_view = mx.contiguous(state.swapaxes(2, 3)).swapaxes(2, 3)
    wide = mx.concatenate([inputs[2], inputs[2] + 1], axis=-1)
    views[2] = wide[..., : inputs[2].shape[-1]]
    mx.eval(views, state_view)
    y, tape, _ = ops.gated_delta_verify(*inputs, state)
    y_view, tape_view, _ = ops.gated_delta_verify(*views, state_view)
    assert same(y, y_view) and same(tape.delta, tape_view.delta)
    assert same(
        ops.gated_delta_replay(state, tape, [2, 3]),
        ops.gated_delta_replay(state_view, tape_view, [2, 3]),
    )


def test_a_long_run_stays_finite_and_bounded(backend):
    """A state kept in 16 bits becomes garbage or NaN past about 140k tokens (reported elsewhere).

    160k synthetic steps of a state in fp32. The GPU runs the 48 heads of the report, the CPU one;
    the mock device, which takes a millisecond a step, does not get that far.
    """
    heads = 48 if backend == "gpu" else 1
    chunk, steps = 2048, 4096 if backend == "mock" else 160_000
    inputs, state = gated_delta(1, chunk, heads, heads, 128, 128, mx.bfloat16)
    done = 0
    while done < steps:
        y, state = ops.gated_delta_step(*inputs, state)
        mx.eval(y, state)
        done += chunk
    assert mx.all(mx.isfinite(state)) and mx.abs(state).max() < 100
    assert mx.all(mx.isfinite(y))


def test_keep_on_the_device_is_checked(backend):
    """Out of range it raises on the CPU and poisons its own row on a GPU: never a silent clamp."""
    inputs, state = gated_delta(2, 3, 1, 1, 32, 4)
    _, tape, _ = ops.gated_delta_verify(*inputs, state)
    mx.eval(tape)
    for bad in (4, -1):
        keep = mx.array([2, bad])
        if backend == "cpu":
            with pytest.raises(RuntimeError, match=r"keep\[1\] in 0 .. 3 but got"):
                mx.eval(ops.gated_delta_replay(state, tape, keep))
            assert same(state + 0, state)  # the stream works on
        else:
            replayed = ops.gated_delta_replay(state, tape, keep)
            assert mx.all(mx.isnan(replayed[1]))
            assert same(replayed[0], ops.gated_delta_replay(state, tape, [2, 2])[0])
            y, _, checkpoint = ops.gated_delta_verify(*inputs, state, tape, keep)
            assert mx.all(mx.isnan(y[1])) and mx.all(mx.isnan(checkpoint[1]))
            assert mx.all(mx.isfinite(y[0]))


def _arguments():
    inputs, state = gated_delta(2, 3, 2, 4, 32, 8)
    return dict(zip(["q", "k", "v", "g", "beta"], inputs, strict=True), state=state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=mx.zeros((2, 3, 2, 16))), r"q of shape \(2, 3, 2, 32\) but got \(2, 3, 2, 16\)"),
        (dict(k=mx.zeros((2, 3, 3, 32))), "Hv to be a multiple of Hk but got Hk = 3, Hv = 4"),
        (dict(v=mx.zeros((2, 3, 4, 9))), r"v of shape \(2, 3, 4, 8\)"),
        (dict(g=mx.zeros((2, 3, 5))), r"g of shape \(2, 3, 4\) but got \(2, 3, 5\)"),
        (dict(g=mx.zeros((2, 3, 4), mx.float16)), "g in float32 but got float16"),
        (dict(beta=mx.zeros((2, 3, 4), mx.bfloat16)), "beta in float32 but got bfloat16"),
        (dict(state=mx.zeros((2, 4, 8, 32), mx.bfloat16)), "state in float32 but got bfloat16"),
        (dict(state=mx.zeros((2, 4, 8, 48))), "Dk to be a multiple of 32 up to 256 but got 48"),
        (dict(state=mx.zeros((2, 4, 8, 288))), "Dk to be a multiple of 32 up to 256 but got 288"),
        (dict(state=mx.zeros((2, 4, 0, 32))), "state with no empty dimension"),
        (dict(q=mx.zeros((2, 3, 2, 32), mx.int32)), "q in float32 but got int32"),
        (dict(v=mx.zeros((2, 3, 4, 8), mx.int32)), "v in float32, float16 or bfloat16"),
        (dict(mask=mx.zeros((2, 3))), "mask in bool but got float32"),
        (dict(mask=mx.zeros((2, 4), mx.bool_)), r"mask of shape \(2, 3\) but got \(2, 4\)"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:24],
)
def test_bad_inputs_are_refused_in_one_sentence(change, message):
    arguments = _arguments() | change
    with pytest.raises(ValueError, match=message) as refusal:
        ops.gated_delta_verify(**arguments)
    assert str(refusal.value).startswith("[gated_delta_verify] expected ")
    with pytest.raises(ValueError, match=message):
        ops.gated_delta_step(**arguments)


def test_an_empty_call_is_refused():
    arguments = {n: x if n == "state" else x[:, :0] for n, x in _arguments().items()}
    with pytest.raises(ValueError, match="at least one input but got T = 0"):
        ops.gated_delta_verify(**arguments)


def test_tape_and_keep_come_together():
    arguments = _arguments()
    _, tape, _ = ops.gated_delta_verify(**arguments)
    with pytest.raises(ValueError, match="tape and keep together but got only tape"):
        ops.gated_delta_verify(**arguments, tape=tape)
    with pytest.raises(ValueError, match="tape and keep together but got only keep"):
        ops.gated_delta_verify(**arguments, keep=mx.array([0, 0]))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ([1, 4], r"keep\[1\] in 0 .. 3 but got 4"),
        ([-1, 0], r"keep\[0\] in 0 .. 3 but got -1"),
        ([1], "2 values of keep but got 1"),
        (mx.array([1]), r"keep of shape \(2,\) but got \(1,\)"),
        (mx.array([1.0, 2.0]), "keep as integers but got float32"),
    ],
    ids=str,
)
def test_a_wrong_keep_is_refused(keep, message):
    arguments = _arguments()
    _, tape, _ = ops.gated_delta_verify(**arguments)
    with pytest.raises(ValueError, match=message):
        ops.gated_delta_replay(arguments["state"], tape, keep)
    with pytest.raises(ValueError, match=message):
        ops.gated_delta_verify(**arguments, tape=tape, keep=keep)


def test_a_foreign_tape_is_refused():
    arguments = _arguments()
    g, k, delta, _ = ops.gated_delta_verify(**arguments)[1]
    state = arguments["state"]
    with pytest.raises(ValueError, match=r"tape.delta of shape \(2, 3, 4, 8\)"):
        ops.gated_delta_replay(state, Tape(g, k, delta[..., :4]), [0, 0])
    with pytest.raises(ValueError, match=r"tape\.delta in float32 but got float16"):
        ops.gated_delta_replay(state, Tape(g, k, delta.astype(mx.float16)), [0, 0])
    half = Tape(g, k.astype(mx.float16), delta)
    with pytest.raises(ValueError, match=r"tape\.k in float32 but got float16"):
        ops.gated_delta_verify(**arguments, tape=half, keep=[0, 0])
