"""Norms, gates and rotary positions: each row by itself."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.activations import swiglu
from mlx_lm.models.qwen3_next import Qwen3NextRMSNormGated

from dflash_native import ops, reference
from dispatch import check_same_bits
from inputs import DTYPES, error, name, same

EPS = 1e-6
SIZES = [1, 7, 16, 40, 255, 256, 257, 2560]
LIMIT = {mx.float32: 1e-6, mx.float16: 6e-4, mx.bfloat16: 5e-3}
MLX_LIMIT = {mx.float32: 1e-6, mx.float16: 1.5e-3, mx.bfloat16: 1.2e-2}  # MLX rounds in between

OPERATIONS = {
    "rms_norm": lambda m, x, y, w: m.rms_norm(x, w, EPS),
    "rms_norm without a weight": lambda m, x, y, w: m.rms_norm(x, None, EPS),
    "rms_norm_gated": lambda m, x, y, w: m.rms_norm_gated(x, y, w, EPS),
    "add_rms_norm": lambda m, x, y, w: mx.concatenate(m.add_rms_norm(x, y, w, EPS), axis=-1),
    "swiglu": lambda m, x, y, w: m.swiglu(x, y),
    "sigmoid_gate": lambda m, x, y, w: m.sigmoid_gate(x, y),
}


def gated(x, gate, weight):
    """mlx-lm's module on these arrays."""
    module = Qwen3NextRMSNormGated(x.shape[-1], EPS)
    module.weight = weight
    return module(x, gate)


STOCK = {
    "rms_norm": lambda x, y, w: mx.fast.rms_norm(x, w, EPS),
    "rms_norm without a weight": lambda x, y, w: mx.fast.rms_norm(x, None, EPS),
    "rms_norm_gated": gated,
    "add_rms_norm": lambda x, y, w: mx.concatenate(
        [x + y, mx.fast.rms_norm(x + y, w, EPS)], axis=-1
    ),
    "swiglu": lambda x, y, w: swiglu(x, y),
    "sigmoid_gate": lambda x, y, w: x * mx.sigmoid(y),
}


def row_inputs(*shape, dtype=mx.float32):
    x, y = (mx.random.normal(shape) * 2 for _ in range(2))
    weight = mx.random.uniform(0.5, 1.5, shape[-1:])
    found = [each.astype(dtype) for each in (x, y, weight)]
    mx.eval(found)
    return found


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("size", SIZES)
def test_rows_are_what_the_reference_and_mlx_give(backend, size, dtype, operation):
    x, y, weight = row_inputs(2, 3, size, dtype=dtype)
    out = OPERATIONS[operation](ops, x, y, weight)
    expected = OPERATIONS[operation](reference, x, y, weight)
    limit = LIMIT if backend == "cpu" else MLX_LIMIT
    assert out.dtype == dtype and out.shape == expected.shape
    assert error(out, expected) < limit[dtype]
    assert error(out, STOCK[operation](x, y, weight)) < MLX_LIMIT[dtype]
    assert error(OPERATIONS[operation](ops, -x, y * 1.5, weight), expected) > 0.05


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("size", [7, 40, 257, 2560])
def test_a_row_has_its_bits_alone_and_among_others(backend, size, dtype, operation):
    """C1, whatever the others hold. MLX's flat loops over all values of a block have tails."""
    call = OPERATIONS[operation]
    x, y, weight = row_inputs(2, 5, size, dtype=dtype)
    whole = call(ops, x, y, weight)
    for b in range(2):
        for t in range(5):
            one = call(ops, x[b, t], y[b, t], weight)
            assert same(one, whole[b, t])
            assert not same(one, whole[1 - b, t])  # the control
    for value in (mx.nan, mx.inf):
        bad_x, bad_y = mx.array(x), mx.array(y)
        bad_x[0, 2], bad_y[0, 2] = value, value
        bad = call(ops, bad_x, bad_y, weight)
        assert same(bad[:, :2], whole[:, :2]) and same(bad[:, 3:], whole[:, 3:])
        assert same(bad[1, 2], whole[1, 2]) and not same(bad[0, 2], whole[0, 2])


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_any_layout_is_read_in_place(backend, operation, dtype):
    call = OPERATIONS[operation]
    x, y, weight = row_inputs(3, 4, 5, 40, dtype=dtype)
    both = mx.concatenate([x, y], axis=-1)
    mx.eval(both)
    expected = call(ops, x, y, weight)
    assert same(call(ops, *mx.split(both, 2, axis=-1), weight), expected)
    turned = [mx.contiguous(each.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3) for each in (x, y)]
    assert same(call(ops, *turned, weight), expected)
    columns = [mx.contiguous(each.swapaxes(1, 3)).swapaxes(1, 3) for each in (x, y)]
    assert same(call(ops, *columns, weight[::-1][::-1]), expected)
    assert same(call(ops, x[::-1], y[::-1], weight)[::-1], expected)
    row = mx.broadcast_to(y[:1, :1], y.shape)
    assert same(call(ops, x, row, weight), call(ops, x, mx.contiguous(row), weight))
    assert not same(call(ops, x[::-1], y[::-1], weight), expected)  # the control


def test_dtypes_promote_as_in_mlx(backend):
    x, y, weight = row_inputs(2, 40)
    half, bfloat = mx.float16, mx.bfloat16
    assert ops.rms_norm(x.astype(half), weight, EPS).dtype == mx.float32
    assert ops.rms_norm(x.astype(half), weight.astype(bfloat), EPS).dtype == mx.float32
    assert ops.swiglu(x.astype(bfloat), y).dtype == mx.float32
    assert ops.sigmoid_gate(x.astype(half), y.astype(half)).dtype == half
    gated = ops.rms_norm_gated(x.astype(half), y.astype(half), weight, EPS)
    assert gated.dtype == half
    assert error(gated, reference.rms_norm_gated(x, y, weight, EPS)) < 2e-3
    total, normed = ops.add_rms_norm(x.astype(half), y, weight, EPS)
    assert total.dtype == normed.dtype == mx.float32
    assert same(normed, ops.rms_norm(total, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_add_rms_norm_is_a_sum_and_its_norm(backend, dtype):
    x, y, weight = row_inputs(4, 300, dtype=dtype)
    total, normed = ops.add_rms_norm(x, y, weight, EPS)
    assert same(total, x + y)
    assert same(normed, ops.rms_norm(x + y, weight, EPS))
    assert not same(normed, ops.rms_norm(x - y, weight, EPS))


def test_extreme_rows_stay_finite(backend):
    x = mx.array([[1e4, -1e4, 100.0, -100.0, 0.0, -0.0, 1e-30]])
    ones = mx.ones_like(x)
    expected = mx.array([[1e4, 0.0, 100.0, 0.0, 0.0, 0.0, 5e-31]])
    assert mx.allclose(ops.swiglu(x, ones), expected, rtol=1e-6, atol=1e-35)
    gates = mx.array([[1.0, 0.0, 1.0, 0.0, 0.5, 0.5, 0.5]])
    assert mx.allclose(ops.sigmoid_gate(ones, x), gates, rtol=1e-6, atol=1e-35)
    assert same(ops.rms_norm(mx.zeros((2, 40)), None, EPS), mx.zeros((2, 40)))
    assert mx.allclose(ops.rms_norm(mx.full((1, 40), 1e15), None, EPS), mx.ones((1, 40)))


def rope_inputs(B, H, T, D, dtype=mx.float32):
    x = mx.random.normal((B, H, T, D)).astype(dtype)
    mx.eval(x)
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("traditional", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize(("D", "dims"), [(64, 64), (128, 32), (256, 64), (96, 96), (10, 6)])
def test_rope_gives_what_the_reference_and_mlx_give(backend, D, dims, traditional, dtype):
    x = rope_inputs(2, 3, 5, D, dtype)
    lengths = mx.array([0, 8190])
    freqs = mx.concatenate([mx.random.uniform(1, 1e4, (dims // 2 - 1,)), mx.array([mx.inf])])
    for chosen in (
        {"base": 1e6},
        {"base": 1e4, "scale": 0.25},
        {"freqs": freqs},
        {"freqs": freqs, "scale": 2.0},
    ):
        out = ops.rope(x, lengths, dims, traditional=traditional, **chosen)
        assert out.dtype == dtype and same(out[..., dims:], x[..., dims:])
        expected = reference.rope(x, lengths, dims, traditional=traditional, **chosen)
        assert error(out, expected) < (LIMIT[dtype] if backend == "cpu" else 5e-3)
        rest = {"base": None, "freqs": None, "scale": 1.0} | chosen
        stock = mx.fast.rope(
            x.astype(mx.float32), dims, traditional=traditional, offset=lengths, **rest
        )
        assert error(out, stock) < LIMIT[dtype]
        late = ops.rope(x, lengths + 5000, dims, traditional=traditional, **chosen)
        assert error(late, expected) > 0.05


@pytest.mark.parametrize("position", [0, 1000, 131_000, 1_000_000])
def test_rope_turns_far_positions_as_mlx_does(backend, position):
    """The angles are MLX's to the bit: at 131,000 one unit in a frequency turns by 0.01."""
    x = rope_inputs(1, 2, 16, 128)
    at = mx.array([position])
    out = ops.rope(x, at, 128, base=1e7)
    stock = mx.fast.rope(x, 128, traditional=False, base=1e7, scale=1.0, offset=at)
    assert error(out, stock) < 1e-6
    other = ops.rope(x, at, 128, base=1.000001e7)
    assert position < 131_000 or error(other, stock) > 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_a_turned_row_has_its_bits_alone_and_among_others(backend, dtype):
    x = rope_inputs(3, 4, 6, 64, dtype)
    lengths = [0, 255, 5000]
    whole = ops.rope(x, lengths, 32, base=1e4)
    for b, length in enumerate(lengths):
        for t in range(6):
            one = ops.rope(x[b : b + 1, :, t : t + 1], [length + t], 32, base=1e4)
            assert same(one[0, :, 0], whole[b, :, t])
            assert not same(
                ops.rope(x[b : b + 1, :, t : t + 1], [length + t + 1], 32, base=1e4), one
            )
    bad = mx.array(x)
    bad[1, :, 2] = mx.nan
    bad = ops.rope(bad, lengths, 32, base=1e4)
    assert same(bad[::2], whole[::2]) and same(bad[1, :, 3:], whole[1, :, 3:])
    turned = mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2)
    assert same(ops.rope(turned, lengths, 32, base=1e4), whole)
    assert same(
        ops.rope(x[..., ::-1], lengths, 32, base=1e4),
        ops.rope(mx.contiguous(x[..., ::-1]), lengths, 32, base=1e4),
    )


def test_streams_and_devices_of_the_cpu_are_one():
    x = mx.random.normal((3, 40))
    expected = ops.swiglu(x, x + 1, stream=mx.cpu)
    for stream in (mx.Device(mx.cpu), mx.default_stream(mx.cpu)):
        assert same(ops.swiglu(x, x + 1, stream=stream), expected)
    assert not same(ops.swiglu(x + 1, x, stream=mx.cpu), expected)


PROGRAM = """
import hashlib
import mlx.core as mx
mx.set_default_device(mx.cpu)
from dflash_native import _native, ops
mx.random.seed(5)
digest = hashlib.sha256()
for dtype in (mx.float32, mx.float16, mx.bfloat16):
    for size in (13, 1000, 9216):
        x, y = (mx.random.normal((3, 7, size)).astype(dtype) * SCALE for _ in range(2))
        heads = x[..., :12].reshape(3, 7, 2, 6).swapaxes(1, 2)
        for out in (
            ops.rms_norm(x, y[0, 0], 1e-6),
            ops.rms_norm_gated(x, y, y[0, 0], 1e-6),
            *ops.add_rms_norm(x, y, None, 1e-6),
            ops.swiglu(x, y),
            ops.sigmoid_gate(x, y),
            ops.rope(heads, [0, 99, 131072], 6, base=1e4),
        ):
            digest.update(bytes(memoryview(out.view(mx.uint8))))
print(_native.extension.cpu_isa(), _native.extension.cpu_threads(), digest.hexdigest())
"""


def test_instruction_sets_and_thread_counts_give_the_same_bits():
    check_same_bits(PROGRAM, "2.0", "2.01")


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="MLX's own checks and messages")
def test_bad_inputs_are_refused():
    x, y, weight = row_inputs(2, 3, 8)
    heads = rope_inputs(2, 3, 4, 8)
    deep = mx.zeros((1,) * 9)
    for call, message in [
        (lambda: ops.rms_norm(x, weight[:7], EPS), r"\[rms_norm\] .*weight of shape \(8,\)"),
        (
            lambda: ops.rms_norm(x.astype(mx.int32), weight, EPS),
            "x in float32, float16 or bfloat16",
        ),
        (lambda: ops.rms_norm(x[:0], weight, EPS), "x with no empty dimension"),
        (lambda: ops.rms_norm(mx.array(1.0), None, EPS), "x with 1 .. 8 dimensions but got 0"),
        (lambda: ops.rms_norm(deep, None, EPS), "x with 1 .. 8 dimensions but got 9"),
        (lambda: ops.rms_norm_gated(x, y[:1], weight, EPS), r"gate of shape \(2, 3, 8\)"),
        (lambda: ops.add_rms_norm(x, y[..., :4], weight, EPS), r"residual of shape \(2, 3, 8\)"),
        (lambda: ops.swiglu(x[:1], y), r"\[swiglu\] expected gate of shape \(2, 3, 8\)"),
        (lambda: ops.sigmoid_gate(x, y.astype(mx.int8)), "gate in float32, float16 or bfloat16"),
        (lambda: ops.rope(x, [0, 0], 8, base=1e4), r"x of shape \(any, any, any, any\)"),
        (lambda: ops.rope(heads, [0], 8, base=1e4), "2 values of lengths but got 1"),
        (lambda: ops.rope(heads, mx.zeros(2), 8, base=1e4), "lengths as integers but got float32"),
        (lambda: ops.rope(heads, [0, 0], 10, base=1e4), "dims to be even, 2 .. 8, but got 10"),
        (lambda: ops.rope(heads, [0, 0], 7, base=1e4), "dims to be even, 2 .. 8, but got 7"),
        (lambda: ops.rope(heads, [0, 0], 8), "one of base and freqs but got neither"),
        (lambda: ops.rope(heads, [0, 0], 8, base=1.0, freqs=x), "base and freqs but got both"),
        (lambda: ops.rope(heads, [0, 0], 8, freqs=mx.ones(3)), r"freqs of shape \(4,\) but got"),
        (lambda: ops.rope(mx.zeros((1, 1, 1, 1026)), [0], 8, base=1.0), "D of at most 1024"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match=r"\[rms_norm\] expected weight to be an mx.array"):
        ops.rms_norm(x, [1.0] * 8, EPS)
