"""What holds for every operation: argument types, transforms of MLX, views, fork."""

from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from dflash_native import Tape, ops
from inputs import gated_delta, same

OPERATIONS = sorted(set(ops.__all__) - {"PackedWeight", "Tape", "verify_matmuls"})


def strided(x):
    """The same values with other strides."""
    view = mx.contiguous(x.swapaxes(0, -1)).swapaxes(0, -1)
    mx.eval(view)
    return view


def every_operation():
    """Name to (function of arrays, its arrays); each function gives a list of arrays."""
    inputs, state = gated_delta(2, 5, 2, 4, 32, 8)
    _, (g, k, delta, _), _ = ops.gated_delta_verify(*inputs, state)
    x, weight, window = (mx.random.normal(s) for s in ((2, 5, 12), (12, 4), (2, 3, 12)))
    gates = [mx.random.normal(s) for s in ((2, 5, 4), (2, 5, 4), (4,), (4,))]
    cache, new = mx.random.normal((2, 4, 9, 8)), mx.random.normal((2, 4, 3, 8))
    keep = mx.array([2, 5])
    row, scales = mx.random.normal((2, 5, 12)), mx.random.normal((12,))
    rows, dense, experts = (mx.random.normal(s) for s in ((2, 3, 64), (20, 64), (3, 20, 64)))
    chosen = mx.array([[0, 2, 1], [2, 2, 0]])
    calls = {
        "add_rms_norm": (lambda a, b: list(ops.add_rms_norm(a, b, scales, 1e-6)), [x, row]),
        "gated_delta_gates": (lambda *a: list(ops.gated_delta_gates(*a)), gates),
        "gated_delta_verify": (
            lambda *a: [(out := ops.gated_delta_verify(*a))[0], out[1].delta],
            [*inputs, state],
        ),
        "gated_delta_step": (lambda *a: list(ops.gated_delta_step(*a)), [*inputs, state]),
        "gated_delta_replay": (
            lambda s, *t: [ops.gated_delta_replay(s, Tape(*t), keep)],
            [state, g, k, delta],
        ),
        "causal_conv1d_verify": (lambda *a: [ops.causal_conv1d_verify(*a)], [x, weight, window]),
        "conv_window": (lambda w, x: [ops.conv_window(w, x, keep)], [window, x]),
        "kv_write": (lambda c, n: [ops.kv_write(c, n, mx.array([0, 6]))], [cache, new]),
        "rms_norm": (lambda a: [ops.rms_norm(a, scales, 1e-6)], [x * 1.1]),
        "rms_norm_gated": (lambda a, b: [ops.rms_norm_gated(a, b, scales, 1e-6)], [x + row, row]),
        "rope": (lambda a: [ops.rope(a, mx.array([3, 0]), 6, base=100.0)], [new]),
        "sigmoid_gate": (lambda a, b: [ops.sigmoid_gate(a, b)], [x, row]),
        "swiglu": (lambda a, b: [ops.swiglu(a, b)], [x, row]),
        "verify_attention": (
            lambda q, k, v: [ops.verify_attention(q, k, v, mx.array([0, 6]), 0.2)],
            [mx.random.normal(s) for s in ((2, 6, 3, 32), (2, 2, 9, 32), (2, 2, 9, 32))],
        ),
        "pack_matmul": (lambda w: [ops.pack_matmul(w, stream=mx.cpu).weight], [dense]),
        "verify_matmul": (lambda x, w: [ops.verify_matmul(x, w)], [rows, dense]),
        "verify_gather_matmul": (
            lambda x, w, i: [ops.verify_gather_matmul(x, w, i)],
            [rows, experts, chosen],
        ),
    }
    assert set(calls) == set(OPERATIONS)
    mx.eval([arrays for _, arrays in calls.values()])
    return calls


@pytest.mark.parametrize("operation", OPERATIONS)
def test_compiled_and_strided_calls_have_the_bits_of_plain_ones(backend, operation):
    """A placeholder of mx.compile says that it is contiguous: what it stands for may not be."""
    if operation == "pack_matmul" and backend == "mock":
        pytest.skip("it is the CPU's")
    call, arrays = every_operation()[operation]
    expected = call(*arrays)
    compiled = mx.compile(call)
    for variant in (arrays, [strided(x) for x in arrays], [x + 0 for x in arrays]):
        for found, right in zip(call(*variant), expected, strict=True):
            assert same(found, right)
        for found, right in zip(compiled(*variant), expected, strict=True):
            assert same(found, right)
    changed = [arrays[0] * 1.5, *arrays[1:]]
    pairs = zip(compiled(*changed), expected, strict=True)
    assert not all(same(a, b) for a, b in pairs)  # the control


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_no_array_is_refused_by_name(operation):
    call, arrays = every_operation()[operation]
    for at in range(len(arrays)):
        for wrong in (None, [1.0], "x", 3, np.zeros(3)):
            with pytest.raises(
                TypeError, match=rf"^\[{operation}\] expected \S+ to be an mx.array"
            ):
                call(*arrays[:at], wrong, *arrays[at + 1 :])
        with pytest.raises(ValueError, match=rf"^\[{operation}\] expected "):
            call(*arrays[:at], mx.zeros((2,) * 6), *arrays[at + 1 :])


def test_keep_in_other_integers(backend):
    inputs, state = gated_delta(2, 4, 1, 2, 32, 8)
    _, tape, _ = ops.gated_delta_verify(*inputs, state)
    expected = ops.gated_delta_replay(state, tape, [1, 3])
    for dtype in (mx.int64, mx.uint32, mx.uint64, mx.int16, mx.uint8):
        assert same(ops.gated_delta_replay(state, tape, mx.array([1, 3], dtype)), expected)
    assert same(ops.gated_delta_replay(state, tape, np.array([1, 3])), expected)
    assert not same(ops.gated_delta_replay(state, tape, [1, 2]), expected)
    with pytest.raises(TypeError, match="integer"):
        ops.gated_delta_replay(state, tape, [1.9, 3])
    wide = mx.array([2**32 + 1, 3], dtype=mx.int64)  # narrowed, it would be 1
    if backend == "cpu":
        with pytest.raises(RuntimeError, match=r"keep\[0\] in 0 .. 4 but got 2147483647"):
            mx.eval(ops.gated_delta_replay(state, tape, wide))
    else:
        assert mx.all(mx.isnan(ops.gated_delta_replay(state, tape, wide)[0]))


def test_a_failed_call_leaves_nan_and_no_old_memory(cpu):
    """Elsewhere the array could be read after the error, and held what the memory had held."""
    inputs, state = gated_delta(1, 3, 1, 1, 32, 4)
    _, tape, _ = ops.gated_delta_verify(*inputs, state)
    replayed = ops.gated_delta_replay(state, tape, mx.array([7]))
    with pytest.raises(RuntimeError, match="keep"):
        mx.eval(replayed)
    nan = None
    while nan is None:  # MLX may report one error more than once
        try:
            nan = mx.all(mx.isnan(replayed)).item()
        except RuntimeError as error:
            assert "keep" in str(error)
    assert nan


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="CUDA and Metal do not survive a fork")
@pytest.mark.parametrize("used", [False, True], ids=["imported", "imported in a thread pool"])
def test_the_import_does_not_make_fork_hang(used):
    """An evaluation at import starts MLX's threads, which a forked child does not have."""
    program = """
import os, sys
import dflash_native
child = os.fork()
if child == 0:
    import mlx.core as mx
    mx.set_default_device(mx.cpu)
    x, w = mx.ones((1, 300, 4096)), mx.ones((4096, 2))
    out = dflash_native.ops.causal_conv1d_verify(x, w, mx.zeros((1, 1, 4096)))
    os._exit(0 if out.shape == x.shape and out[0, 5, 7].item() > 1.7 else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    environment = dict(os.environ, DFLASH_NATIVE_NUM_THREADS="3" if used else "1")
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize(("T", "B"), [(70_000, 1), (1, 70_000)], ids=["inputs", "rows"])
def test_more_than_65535_inputs_and_rows(backend, T, B):
    """CUDA's grid ends at 65,535 in y and z."""
    x, weight = mx.random.normal((B, T, 3)), mx.random.normal((3, 2))
    out = ops.causal_conv1d_verify(x, weight, mx.zeros((B, 1, 3)))
    last = ops.causal_conv1d_verify(x[-1:, -1:], weight, x[-1:, -2:-1] if T > 1 else x[-1:] * 0)
    assert same(out[-1, -1], last[0, 0]) and not same(out[-1, -1], last[0, 0] * 1.5)
    if B > 1:
        inputs, state = gated_delta(B, 1, 1, 1, 32, 1)
        y, _, _ = ops.gated_delta_verify(*inputs, state)
        y_last, _, _ = ops.gated_delta_verify(*[i[-1:] for i in inputs], state[-1:])
        assert same(y[-1:], y_last)
