"""Decay and write strength: one place for exp, softplus and sigmoid."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dflash_native import ops, reference
from inputs import DTYPES, error, name, same


def exact(a, b, A_log, dt_bias):
    """In double precision."""
    a, b, A_log, dt_bias = (
        np.array(x.astype(mx.float32)).astype(np.float64) for x in (a, b, A_log, dt_bias)
    )
    g = np.exp(-np.exp(A_log) * np.logaddexp(0.0, a + dt_bias))
    return g, 1.0 / (1.0 + np.exp(-b))


def gate_inputs(B, T, Hv, dtype):
    a, b = (mx.random.normal((B, T, Hv)) * 4).astype(dtype), mx.random.normal((B, T, Hv)) * 4
    return a, b.astype(dtype), mx.random.uniform(-2, 2.7, (Hv,)), mx.random.normal((Hv,))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", [(1, 1, 32), (2, 16, 48), (3, 5, 3)], ids=str)
def test_gates_against_double_precision(backend, shape, dtype):
    """fp32 from the activations on, also for 16-bit ones."""
    inputs = gate_inputs(*shape, dtype)
    g, beta = ops.gated_delta_gates(*inputs)
    g_exact, beta_exact = exact(*inputs)
    assert g.dtype == beta.dtype == mx.float32
    assert np.abs(np.array(g) - g_exact).max() < 5e-7
    assert np.abs(np.array(beta) - beta_exact).max() < 3e-7
    g_ref, beta_ref = reference.gated_delta_gates(*inputs)
    assert error(g, g_ref) < 1e-6 and error(beta, beta_ref) < 1e-6
    rounded = exact(inputs[0].astype(mx.bfloat16) * 1.01, *inputs[1:])[0]
    assert np.abs(np.array(g) - rounded).max() > 1e-4  # the control


def test_small_rates_keep_their_digits(backend):
    """1 - g for a strongly negative a + dt_bias: 1 + e^x alone would lose it all."""
    a = mx.array([-8.0, -12.0, -14.0]).reshape(1, 1, 3)
    g, _ = ops.gated_delta_gates(a, a, mx.full((3,), 3.0), mx.zeros((3,)))
    g_exact, _ = exact(a, a, mx.full((3,), 3.0), mx.zeros((3,)))
    assert (
        np.abs((1 - np.array(g, np.float64)) - (1 - g_exact)).max() < 1.2e-7
    )  # one unit of g; 1 - g is 1.7e-5 here


def test_extremes_are_finite(backend):
    a = mx.array([-1e4, -90.0, 0.0, 90.0, 1e4]).reshape(1, 1, 5)
    g, beta = ops.gated_delta_gates(a, a, mx.full((5,), 2.7), mx.zeros((5,)))
    assert mx.all(mx.isfinite(g)) and mx.all(mx.isfinite(beta))
    assert g.reshape(-1).tolist()[0] == 1.0 and g.reshape(-1).tolist()[-1] == 0.0
    assert beta.reshape(-1).tolist()[2] == 0.5


def test_every_width_has_the_same_bits(backend):
    a, b, A_log, dt_bias = gate_inputs(2, 40, 6, mx.bfloat16)
    whole = ops.gated_delta_gates(a, b, A_log, dt_bias)
    for t in range(40):
        one = ops.gated_delta_gates(a[1:, t : t + 1], b[1:, t : t + 1], A_log, dt_bias)
        assert same(one[0], whole[0][1:, t : t + 1]) and same(one[1], whole[1][1:, t : t + 1])
    assert not same(one[0], whole[0][1:, :1])


def test_bad_inputs_are_refused():
    a, b, A_log, dt_bias = gate_inputs(1, 2, 4, mx.float32)
    for arguments, message in [
        ((a, b[..., :3], A_log, dt_bias), r"b of shape \(1, 2, 4\) but got \(1, 2, 3\)"),
        ((a, b, A_log[:3], dt_bias), r"A_log of shape \(4,\) but got \(3,\)"),
        ((a, b.astype(mx.float16), A_log, dt_bias), "b in float32 but got float16"),
        ((a, b, A_log, dt_bias.astype(mx.int32)), "dt_bias in float32, float16 or bfloat16"),
        ((a[:, :0], b[:, :0], A_log, dt_bias), "a with no empty dimension"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.gated_delta_gates(*arguments)
