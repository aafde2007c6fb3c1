"""Random sessions of the recurrence and the conv window, compared with single steps
after each round.
"""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_native import ops
from inputs import DTYPES, at, gated_delta, name, same

HK, HV, DK, DV, C, K = 1, 4, 64, 33, 12, 4  # several threads, rows that are no multiple of 4
ROUNDS = st.lists(
    st.tuples(
        st.sampled_from(["verify", "verify", "verify", "step", "flush"]),
        st.integers(1, 17),  # inputs: 0 .. 16 drafts after the pending token
        st.lists(st.integers(0, 17), min_size=3, max_size=3),  # keep of each row, capped
        st.booleans(),  # masked
    ),
    min_size=8,
    max_size=24,
)


class Truth:
    """Each row's state and window, advanced one kept input at a time."""

    def __init__(self, state, window):
        self.rows = [(state[b : b + 1], window[b : b + 1]) for b in range(state.shape[0])]

    def advance(self, inputs, x, keep, mask):
        for b, n in enumerate(keep):
            state, window = self.rows[b]
            for t in range(n):
                one = [i[b : b + 1] for i in at(inputs, t, t + 1)]
                on = None if mask is None else mask[b : b + 1, t : t + 1]
                _, state = ops.gated_delta_step(*one, state, on)
                window = ops.conv_window(window, x[b : b + 1, t : t + 1], [1])
            self.rows[b] = state, window

    def compare(self, state, window):
        for b, (true_state, true_window) in enumerate(self.rows):
            assert same(state[b : b + 1], true_state)
            assert same(window[b : b + 1], true_window)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rounds=ROUNDS, batch=st.integers(1, 3), vector=st.booleans(), seed=st.integers(0, 10_000))
def test_random_rounds_end_in_the_state_of_single_steps(
    backend, dtype, rounds, batch, vector, seed
):
    """Verify with the last replay folded in, plain steps and prefills, flushes, per-row keeps.

    40 examples of 8 to 24 rounds for each dtype: some 2,000 rounds a backend, each compared.
    """
    mx.random.seed(seed)
    _, state = gated_delta(batch, 1, HK, HV, DK, DV, dtype, vector)
    window = mx.random.normal((batch, K - 1, C)).astype(dtype)
    truth = Truth(state, window)
    tape = keep = x_last = None
    for kind, T, keeps, masked in rounds:
        inputs, _ = gated_delta(batch, T, HK, HV, DK, DV, dtype, vector)
        x = mx.random.normal((batch, T, C)).astype(dtype)
        mask = mx.random.uniform(shape=(batch, T)) < 0.7 if masked else None
        if x_last is not None:
            window = ops.conv_window(window, x_last, keep)
        if kind == "verify":
            _, tape, state = ops.gated_delta_verify(*inputs, state, tape, keep, mask)
            keep = [min(n, T) for n in keeps[:batch]]
            x_last = x
            truth.advance(inputs, x, keep, mask)
            logical = ops.gated_delta_replay(state, tape, keep)
            truth.compare(logical, ops.conv_window(window, x, keep))
            continue
        if tape is not None:
            state = ops.gated_delta_replay(state, tape, keep)
        tape = keep = x_last = None
        if kind == "step":  # a plain step, or a prefill of T
            _, state = ops.gated_delta_step(*inputs, state, mask)
            window = ops.conv_window(window, x, [T] * batch)
            truth.advance(inputs, x, [T] * batch, mask)
        truth.compare(state, window)


def test_a_replay_of_one_input_too_many_is_seen(backend):
    """The control of the property above: off by one in keep gives other bits."""
    inputs, state = gated_delta(2, 6, HK, HV, DK, DV)
    window = mx.random.normal((2, K - 1, C))
    x = mx.random.normal((2, 6, C))
    truth = Truth(state, window)
    _, tape, _ = ops.gated_delta_verify(*inputs, state)
    truth.advance(inputs, x, [3, 4], None)
    truth.compare(ops.gated_delta_replay(state, tape, [3, 4]), ops.conv_window(window, x, [3, 4]))
    with pytest.raises(AssertionError):
        truth.compare(
            ops.gated_delta_replay(state, tape, [3, 5]), ops.conv_window(window, x, [3, 4])
        )
    with pytest.raises(AssertionError):
        truth.compare(
            ops.gated_delta_replay(state, tape, [3, 4]), ops.conv_window(window, x, [2, 4])
        )
