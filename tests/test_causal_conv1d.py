"""The causal convolution and its window."""

from __future__ import annotations

import mlx.core as mx
import pytest

from dflash_native import ops, reference
from inputs import DTYPES, error, name, same


def conv_inputs(B, T, C, K, dtype):
    x = mx.random.normal((B, T, C)).astype(dtype)
    weight = (mx.random.uniform(-0.5, 0.5, (C, K))).astype(dtype)
    window = mx.random.normal((B, K - 1, C)).astype(dtype)
    mx.eval(x, weight, window)
    return x, weight, window


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize(
    "shape", [(1, 16, 8192, 4), (2, 5, 300, 4), (3, 1, 7, 2), (1, 9, 33, 1)], ids=str
)
def test_conv_gives_what_the_reference_gives(backend, shape, dtype):
    x, weight, window = conv_inputs(*shape, dtype)
    limit = {mx.float32: 1e-6, mx.float16: 6e-4, mx.bfloat16: 5e-3}[dtype]
    out = ops.causal_conv1d_verify(x, weight, window)
    assert out.dtype == dtype
    assert error(out, reference.causal_conv1d_verify(x, weight, window)) < limit
    assert same(out, ops.causal_conv1d_verify(x, weight[..., None], window))  # mlx's layout
    assert error(out, reference.causal_conv1d_verify(x, weight[:, ::-1] * 1.5, window)) > 0.05


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("taps", [2, 4])
def test_every_width_adds_the_taps_in_the_order_of_one(backend, dtype, taps):
    """C1. Elsewhere a block's conv differed by one unit from the T = 1 conv, and the recurrence
    made a flipped argmax of it after some 400 tokens. 600 positions, blocks of 1, 5, 16 and 600.
    """
    x, weight, window = conv_inputs(2, 600, 96, taps, dtype)
    whole = ops.causal_conv1d_verify(x, weight, window)
    for width in (1, 5, 16):
        parts, before = [], window
        for start in range(0, 600, width):
            block = x[:, start : start + width]
            parts.append(ops.causal_conv1d_verify(block, weight, before))
            before = ops.conv_window(before, block, [block.shape[1]] * 2)
        assert same(mx.concatenate(parts, axis=1), whole)
        assert same(before, x[:, 600 - taps + 1 :])
    late = ops.causal_conv1d_verify(x, weight[:, ::-1], window)  # the control
    assert not same(late, whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_window_after_any_prefix(backend, dtype):
    """C1 and C3: the window after n inputs holds the n newest, for every n and by row."""
    x, _, window = conv_inputs(3, 6, 40, 4, dtype)
    padded = mx.concatenate([window, x], axis=1)
    for keep in ([0, 0, 0], [6, 6, 6], [1, 2, 3], [0, 5, 6]):
        after = ops.conv_window(window, x, keep)
        assert same(after, reference.conv_window(window, x, mx.array(keep)))
        for b, n in enumerate(keep):
            assert same(after[b], padded[b, n : n + 3])
        assert not same(after, ops.conv_window(window, x, [(n + 1) % 7 for n in keep]))


def test_rows_of_a_batch_are_independent(backend):
    x, weight, window = conv_inputs(3, 4, 50, 4, mx.bfloat16)
    whole = ops.causal_conv1d_verify(x, weight, window)
    for b in range(3):
        one = ops.causal_conv1d_verify(x[b : b + 1], weight, window[b : b + 1])
        assert same(one[0], whole[b])
    assert not same(whole[0], whole[1])


def test_extreme_sums_stay_finite(backend):
    """silu of large sums: x itself above, minus zero below, no NaN from exp."""
    x = mx.array([[[1e30, -1e30, 100.0, -100.0, 0.0]]])
    out = ops.causal_conv1d_verify(x, mx.ones((5, 1)), mx.zeros((1, 0, 5)))
    assert mx.allclose(out[0, 0], mx.array([1e30, 0.0, 100.0, 0.0, 0.0]), rtol=1e-6, atol=1e-30)


def test_device_keep_is_checked(backend):
    x, _, window = conv_inputs(2, 3, 8, 4, mx.float32)
    keep = mx.array([1, 4])
    if backend == "cpu":
        with pytest.raises(RuntimeError, match=r"\[conv_window\] expected keep\[1\] in 0 .. 3"):
            mx.eval(ops.conv_window(window, x, keep))
    else:
        after = ops.conv_window(window, x, keep)
        assert mx.all(mx.isnan(after[1])) and same(after[0], ops.conv_window(window, x, [1, 1])[0])


def test_bad_inputs_are_refused():
    x, weight, window = conv_inputs(2, 3, 8, 4, mx.float32)
    conv = ops.causal_conv1d_verify
    for arguments, message in [
        ((x, weight[:, :3], window), r"weight of shape \(8, 4\) but got \(8, 3\)"),
        ((x, weight, window[:1]), r"window of shape \(2, any, 8\) but got \(1, 3, 8\)"),
        ((x, weight.astype(mx.float16), window), "weight in float32 but got float16"),
        ((x.astype(mx.int32), weight, window), "x in float32, float16 or bfloat16 but got int32"),
        ((x[:, :0], weight, window), "x with no empty dimension"),
        ((x[0], weight, window), r"x of shape \(any, any, any\) but got \(3, 8\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            conv(*arguments)
    with pytest.raises(ValueError, match=r"keep\[0\] in 0 .. 3 but got 4"):
        ops.conv_window(window, x, [4, 0])
