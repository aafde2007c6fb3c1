"""Products whose bits do not depend on the number of rows."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_native import ops, reference
from dispatch import check_same_bits
from inputs import DTYPES, error, name, same

LIMITS = {mx.float32: 2e-6, mx.float16: 6e-4, mx.bfloat16: 5e-3}
"""Sums of some 100 products in another order; one rounding to 11 bits; one to 8."""

WIDTHS = (1, 2, 3, 5, 6, 7, 16, 31, 32, 33, 64)
QUANTISED = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]


class Weight:
    """A weight's arrays and keywords, and the same one packed."""

    def __init__(self, values, bits=None, group=64):
        self.keywords = {"group_size": group, "bits": bits} if bits else {}
        self.arrays = mx.quantize(values, **self.keywords) if bits else (values,)
        mx.eval(self.arrays)

    @property
    def packed(self):
        return ops.pack_matmul(*self.arrays, **self.keywords)

    def multiply(self, x, bias=None, module=ops):
        return module.verify_matmul(x, *self.arrays, bias=bias, **self.keywords)

    def gather(self, x, indices, bias=None, module=ops):
        weight, *scales = self.arrays
        return module.verify_gather_matmul(x, weight, indices, *scales, bias=bias, **self.keywords)


def draw(dtype, *shape):
    x = mx.random.normal(shape).astype(dtype)
    mx.eval(x)
    return x


KINDS = [pytest.param(dtype, None, 64, id=name(dtype)) for dtype in DTYPES] + [
    pytest.param(mx.bfloat16, bits, group, id=f"{bits} bits by {group}")
    for bits, group in QUANTISED
]
"""Dense weights of each dtype, and each way to quantise."""


def skip_unless_cpu(backend):
    if backend != "cpu":
        pytest.skip("packed weights are the CPU's")


def packings(backend, weight):
    """What a weight is handed over as: MLX's arrays, and packed where the CPU runs."""
    calls = {"rows": weight.multiply}
    if backend == "cpu":
        packed = weight.packed
        calls["packed"] = lambda x, bias=None: ops.verify_matmul(x, packed, bias=bias)
    return calls.items()


@pytest.mark.parametrize(("dtype", "bits", "group"), KINDS)
@pytest.mark.parametrize("N", [1, 15, 16, 17, 64, 100])
def test_every_number_of_rows_gives_the_bits_of_one(backend, dtype, bits, group, N):
    """C1. Elsewhere row 0 of a product of four rows differed from that of one row in 3 of 17,408
    outputs, and a flipped argmax followed. Packed and unpacked weights give the same bits, too.
    """
    for K in (128, 384) if bits else (32, 35, 128, 300):
        weight = Weight(draw(dtype, N, K), bits, group)
        x, bias = draw(dtype, 64, K), draw(dtype, N)
        for b in (None, bias):
            single = [weight.multiply(x[i : i + 1], b) for i in range(64)]
            single = mx.concatenate(single)
            assert error(single, weight.multiply(x, b, reference)) < LIMITS[dtype]
            for _, multiply in packings(backend, weight):
                for width in WIDTHS:
                    assert same(multiply(x[:width], b), single[:width])
                assert same(multiply(x[5], b), single[5])
                assert same(multiply(x.reshape(2, 4, 8, K), b).reshape(64, N), single)
        assert not same(weight.multiply(x * 1.01), weight.multiply(x))  # the control


@pytest.mark.parametrize(("dtype", "bits", "group"), KINDS)
@pytest.mark.parametrize("rows", [1, 16])
def test_several_weights_have_the_bits_of_each(backend, dtype, bits, group, rows):
    """Weights of one format are one launch on CUDA: blocks must find their own weight's rows."""
    x = draw(dtype, 2, rows, 256)
    weights = [Weight(draw(dtype, N, 256), bits, group) for N in (96, 16, 1, 250)]
    other = Weight(draw(dtype, 40, 256), None if bits else 8, group)
    for some in (weights, weights[:2], weights[:1], [*weights[:2], other]):
        for biased in (False, True):
            biases = [draw(dtype, w.arrays[0].shape[0]) if biased else None for w in some]
            arguments = [
                dict(zip(("weight", "scales", "biases"), w.arrays, strict=False))
                | w.keywords
                | {"bias": bias}
                for w, bias in zip(some, biases, strict=True)
            ]
            found = ops.verify_matmuls(x, arguments)
            expected = [w.multiply(x, bias) for w, bias in zip(some, biases, strict=True)]
            assert [*map(same, found, expected)] == [True] * len(some)
    assert not same(found[0], ops.verify_matmuls(x * 1.01, arguments)[0])  # the control


def test_another_order_gives_other_bits(backend):
    """The control of the test above: what it compares is fine enough to see an order of sums."""
    weight, x = Weight(draw(mx.float32, 100, 384)), draw(mx.float32, 16, 384)
    flipped = Weight(weight.arrays[0][:, ::-1]).multiply(x[:, ::-1])
    assert error(flipped, weight.multiply(x)) < LIMITS[mx.float32]
    assert not same(flipped, weight.multiply(x))


@pytest.mark.parametrize(("dtype", "bits", "group"), KINDS)
def test_within_rounding_of_mlx_own_product(backend, dtype, bits, group):
    weight = Weight(draw(dtype, 200, 640), bits, group)
    x = draw(dtype, 9, 640)
    if bits:
        wide = [a.astype(mx.float32) for a in weight.arrays[1:]]
        theirs = mx.quantized_matmul(
            x.astype(mx.float32), weight.arrays[0], *wide, transpose=True, **weight.keywords
        )
    else:
        theirs = x.astype(mx.float32) @ weight.arrays[0].astype(mx.float32).T
    for _, multiply in packings(backend, weight):
        assert error(multiply(x), theirs) < LIMITS[dtype]
        assert error(multiply(x * 1.05), theirs) > 0.04  # the control


@pytest.mark.parametrize(("dtype", "bits", "group"), KINDS)
def test_sums_that_are_representable_are_exact(backend, dtype, bits, group):
    """Small integers: no order of sums rounds."""
    K, N = 256, 50
    x = mx.random.randint(-2, 3, (7, K)).astype(dtype)
    if bits:
        q = mx.random.randint(0, 2**bits, (N, K)).astype(mx.uint32).reshape(N, -1, 32 // bits)
        words = (q << mx.arange(0, 32, bits, dtype=mx.uint32)).sum(-1).astype(mx.uint32)
        scales = mx.random.randint(1, 3, (N, K // group)).astype(mx.float32)
        biases = mx.random.randint(-20, 3, (N, K // group)).astype(mx.float32)
        weight = Weight(draw(dtype, N, K), bits, group)
        weight.arrays = words, scales, biases
    else:
        weight = Weight(mx.random.randint(-3, 4, (N, K)).astype(mx.float32))
        weight.arrays = (weight.arrays[0].astype(dtype),)
        x = x.astype(mx.float32)  # so that the result is not rounded
    expected = weight.multiply(x, module=reference)
    assert expected.dtype == mx.float32
    for _, multiply in packings(backend, weight):
        assert mx.array_equal(multiply(x), expected)
        assert not mx.array_equal(multiply(x.at[0, 200].add(1)), expected)


@pytest.mark.parametrize(("bits", "K"), [(None, 256), (None, 96), (4, 256)])
def test_rows_do_not_hear_of_nan_and_infinity_in_others(backend, bits, K):
    """With K = 96 the GPU's kernel read 32 values past the end of each row, its neighbour's first
    ones, and multiplied them by zero: one NaN in row 3 made row 2 NaN.
    """
    weight = Weight(draw(mx.bfloat16, 100, K), bits)
    x, bias = draw(mx.bfloat16, 33, K), draw(mx.bfloat16, 100)
    clean = weight.multiply(x, bias)
    for bad in (mx.nan, mx.inf, -mx.inf):
        spoilt = mx.array(x)
        spoilt[3, 17], spoilt[20], spoilt[32, K - 1] = bad, bad, bad
        for _, multiply in packings(backend, weight):
            out = multiply(spoilt, bias)
            for row in range(33):
                assert same(out[row], clean[row]) == (row not in (3, 20, 32))
                if row in (3, 20, 32):  # one pattern of NaN, however many rows there are
                    assert same(multiply(spoilt[row : row + 1], bias)[0], out[row])


def test_values_at_the_ends_of_fp32(backend):
    """Quantised words carry powers of two, which x makes good: below 2^-98 it loses bits by that,
    but the same ones for every number of rows.
    """
    weight = Weight(draw(mx.float32, 64, 128), 4)
    sizes = mx.array([1e-38, 2e-29, 1e30, 1.0] * 4)
    x = draw(mx.float32, 16, 128) * sizes[:, None]
    expected = weight.multiply(x, module=reference)
    for _, multiply in packings(backend, weight):
        out = multiply(x)
        for row in range(16):
            assert same(multiply(x[row : row + 1])[0], out[row])
            if row % 4:
                found, right = (y[row] / sizes[row] for y in (out, expected))
                assert error(found, right) < LIMITS[mx.float32]
        assert mx.abs(out[::4] - expected[::4]).max() < 1e-35


@pytest.mark.parametrize("x_dtype", DTYPES, ids=name)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_types_are_promoted_as_mlx_does(backend, x_dtype, dtype):
    x = draw(x_dtype, 3, 64)
    for bits in (None, 8):
        weight = Weight(draw(dtype, 20, 64), bits)
        for bias in (None, draw(mx.float32, 20), draw(mx.float16, 20), draw(mx.bfloat16, 20)):
            expected = weight.multiply(x, bias, reference)
            for _, multiply in packings(backend, weight):
                out = multiply(x, bias)
                assert out.dtype == expected.dtype == mx.result_type(x, draw(dtype, 1))
                assert error(out, expected) < LIMITS[out.dtype]
                if bias is not None:
                    assert error(multiply(x, bias + 1), expected) > 0.05


@pytest.mark.parametrize(("dtype", "bits", "group"), KINDS)
def test_gathered_rows_have_the_bits_of_their_expert(backend, dtype, bits, group):
    E, N, K, k = 5, 40, 128, 3
    weight = Weight(draw(dtype, E, N, K), bits, group)
    bias = draw(dtype, E, N)
    indices = mx.random.randint(0, E, (2, 9, k))
    alone = [Weight(draw(dtype, N, K), bits, group) for _ in range(E)]
    for e, expert in enumerate(alone):
        expert.arrays = [a[e] for a in weight.arrays]
    for slots in (1, k):
        x = draw(dtype, 2, 9, slots, K)
        for b in (None, bias):
            out = weight.gather(x, indices, b)
            assert out.shape == (2, 9, k, N)
            assert error(out, weight.gather(x, indices, b, reference)) < LIMITS[dtype]
            if backend == "cpu":
                assert same(ops.verify_gather_matmul(x, weight.packed, indices, bias=b), out)
            for r in range(9):
                for j in range(k):
                    e = indices[1, r, j].item()
                    one = alone[e].multiply(x[1, r, j % slots], None if b is None else b[e])
                    assert same(one, out[1, r, j])
            assert same(weight.gather(x[1:, 4:6], indices[1:, 4:6], b)[0], out[1, 4:6])
            assert not same(weight.gather(x, (indices + 1) % E, b), out)  # the control


def test_many_rows_of_one_expert(backend):
    """More rows than one job and than one pass over the scratch memory take."""
    weight = Weight(draw(mx.float32, 3, 20, 64), 8)
    x = draw(mx.float32, 300, 1, 64)
    indices = mx.where(mx.arange(300)[:, None] < 290, 2, 0)
    out = weight.gather(x, indices)
    for row in (0, 127, 128, 289, 290, 299):
        assert same(weight.gather(x[row : row + 1], indices[row : row + 1])[0], out[row])
    dense = Weight(draw(mx.float32, 20, 64))
    whole = dense.multiply(x[:, 0])
    assert same(dense.multiply(x[299]), whole[299:]) and not same(whole[298:299], whole[299:])


@pytest.mark.parametrize("dtype", [mx.int64, mx.uint32, mx.uint8], ids=name)
def test_indices_in_other_integers(backend, dtype):
    weight, x = Weight(draw(mx.float32, 4, 8, 32)), draw(mx.float32, 3, 1, 32)
    indices = mx.array([[0, 3], [2, 2], [1, 0]])
    assert same(weight.gather(x, indices.astype(dtype)), weight.gather(x, indices))


def test_device_indices_are_checked(backend):
    weight, x = Weight(draw(mx.float32, 4, 8, 32)), draw(mx.float32, 3, 1, 32)
    for bad in (4, -1, 2**32):
        indices = mx.array([[0, 3], [2, bad], [1, 0]], dtype=mx.int64)
        if backend == "cpu":
            with pytest.raises(
                RuntimeError, match=r"\[verify_gather_matmul\] expected indices\[3\] in 0 .. 3 but"
            ):
                mx.eval(weight.gather(x, indices))
        else:
            out = weight.gather(x, indices)
            assert mx.all(mx.isnan(out[1, 1])) and not mx.any(mx.isnan(out[[0, 2]]))


def test_packed_weights_are_as_large_as_the_model_and_read_like_it(backend):
    skip_unless_cpu(backend)
    for dtype, bits in ((mx.bfloat16, None), (mx.float32, None), (mx.float16, 4), (mx.bfloat16, 8)):
        weight = Weight(draw(dtype, 64, 256), bits)
        packed = weight.packed
        assert packed.nbytes == sum(a.nbytes for a in weight.arrays)
        assert (packed.outputs, packed.inputs, packed.dtype) == (64, 256, dtype)
        assert (packed.bits, packed.group_size) == ((bits, 64) if bits else (None, None))
    dense = draw(mx.float32, 20, 3)
    packed = ops.pack_matmul(dense, stream=mx.cpu)
    blocks = mx.pad(dense, [(0, 12), (0, 0)]).reshape(2, 16, 3).swapaxes(1, 2)
    assert same(packed.weight, blocks) and packed.scales is None


PROGRAM = """
import hashlib
import mlx.core as mx
mx.set_default_device(mx.cpu)
from dflash_native import _native, ops
mx.random.seed(3)
digest = hashlib.sha256()
for dtype in (mx.float32, mx.float16, mx.bfloat16):
    for N, K in ((70, 384), (5, 128), (200, 256)):
        w, x = mx.random.normal((N, K)).astype(dtype), mx.random.normal((16, K)).astype(dtype)
        for arrays, keywords in [((w, ), {}), ((w[:, :77], ), {})] + [
            (mx.quantize(w, bits=bits, group_size=group), dict(bits=bits, group_size=group))
            for bits in (4, 8) for group in (32, 64, 128)
        ]:
            packed = ops.pack_matmul(*arrays, **keywords)
            for rows in (1, 2, 16):
                out = ops.verify_matmul(x[:rows, :packed.inputs] * SCALE, packed)
                digest.update(bytes(memoryview(out.view(mx.uint8))))
print(_native.extension.cpu_isa(), _native.extension.cpu_threads(), digest.hexdigest())
"""


def test_instruction_sets_and_thread_counts_give_the_same_bits(backend):
    skip_unless_cpu(backend)
    check_same_bits(PROGRAM, "1.0", "1.001")


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    rows=st.integers(1, 70),
    N=st.integers(1, 150),
    groups=st.integers(1, 5),
    kind=st.sampled_from([*DTYPES, *QUANTISED]),
    biased=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_random_shapes(backend, rows, N, groups, kind, biased, seed):
    """Any shape: near the reference, each row with the bits of the row alone, packed or not."""
    mx.random.seed(seed)
    if isinstance(kind, tuple):
        bits, group = kind
        K, dtype = groups * group, mx.bfloat16
        weight = Weight(draw(dtype, N, K), bits, group)
    else:
        K, dtype = groups * 37 + seed % 5, kind
        weight = Weight(draw(dtype, N, K))
    x, bias = draw(dtype, rows, K), draw(dtype, N) if biased else None
    out = weight.multiply(x, bias)
    assert mx.allclose(
        out.astype(mx.float32),
        weight.multiply(x, bias, reference).astype(mx.float32),
        rtol=LIMITS[dtype] * 2,
        atol=LIMITS[dtype] * K**0.5,
    )
    row = seed % rows
    for _, multiply in packings(backend, weight):
        assert same(multiply(x, bias), out)
        assert same(multiply(x[row], bias), out[row])
        changed = x[row] + mx.where(mx.arange(K) == seed % K, 1, 0).astype(dtype)
        assert not same(multiply(changed, bias), out[row]) or N < 8


def test_bad_inputs_are_refused():
    x, w = mx.zeros((2, 64)), mx.zeros((10, 64))
    q, s, b = mx.quantize(mx.zeros((10, 64)), bits=4)
    for arguments, keywords, message in [
        ((x[:, :60], w), {}, r"x of shape \(any, 64\) but got \(2, 60\)"),
        ((mx.array(1.0), w), {}, r"x of shape \(64,\) but got \(\)"),
        ((x[:0], w), {}, "x with no empty dimension"),
        ((x.astype(mx.int32), w), {}, "x in float32, float16 or bfloat16 but got int32"),
        ((x, w[0]), {}, r"weight of shape \(any, any\) but got \(64,\)"),
        ((x, w[:0]), {}, "weight with no empty dimension"),
        ((x, w.astype(mx.uint32)), {}, "weight in float32, float16 or bfloat16 but got uint32"),
        ((x, w, s, b), {}, "weight in uint32 but got float32"),
        ((x, q, s), {}, "scales and biases together"),
        ((x, q, None, b), {}, "scales and biases together"),
        ((x, q, s, b[:9]), {}, r"biases of shape \(10, 1\) but got \(9, 1\)"),
        ((x, q, s, b.astype(mx.float16)), {}, "biases in float32 but got float16"),
        ((x, q, s, b), {"bits": 3}, "bits to be 4 or 8 but got 3"),
        ((x, q, s, b), {"bits": 8}, r"K to be a multiple of group_size 64 but got K = 32"),
        ((x, q, s, b), {"group_size": 16}, "group_size to be 32, 64 or 128 but got 16"),
        ((x, q, s, b), {"group_size": 32}, r"scales of shape \(10, 2\) but got \(10, 1\)"),
        ((x, w), {"bias": mx.zeros((9,))}, r"bias of shape \(10,\) but got \(9,\)"),
        ((x, w), {"bias": mx.zeros((10,), mx.int32)}, "bias in float32, float16 or bfloat16"),
    ]:
        with pytest.raises(ValueError, match=rf"^\[verify_matmul\] expected {message}"):
            ops.verify_matmul(*arguments, **keywords)


def test_bad_gathers_are_refused():
    gather = ops.verify_gather_matmul
    x, w, indices = mx.zeros((2, 1, 64)), mx.zeros((3, 10, 64)), mx.zeros((2, 4), mx.int32)
    for arguments, message in [
        ((x, w[0], indices), r"weight of shape \(any, any, any\) but got \(10, 64\)"),
        ((x[:1], w, indices), r"x of shape \(2, 1, 64\) but got \(1, 1, 64\)"),
        ((mx.zeros((2, 3, 64)), w, indices), r"x of shape \(2, 4, 64\) but got \(2, 3, 64\)"),
        ((x[0], w, indices), r"x of shape \(2, 1, 64\) but got \(1, 64\)"),
        ((x, w, indices.astype(mx.float32)), "indices as integers but got float32"),
        ((x, w, indices[:, :0]), "indices with no empty dimension"),
        ((x, w, mx.array(0)), r"indices of shape \(any,\) but got \(\)"),
        ((x, w, indices, None, None, mx.zeros((10,))), r"bias of shape \(3, 10\) but got \(10,\)"),
    ]:
        with pytest.raises(ValueError, match=rf"^\[verify_gather_matmul\] expected {message}"):
            gather(*arguments)


def test_bad_packed_weights_are_refused(backend):
    skip_unless_cpu(backend)
    dense = mx.zeros((20, 32))
    q, s, b = mx.quantize(mx.zeros((20, 64)), bits=8)
    for arguments, message in [
        ((dense[0],), r"weight of shape \(any, any\) but got \(32,\)"),
        ((dense[:, :0],), "weight with no empty dimension"),
        ((q, s), "scales and biases together"),
        ((mx.zeros((2,) * 4),), r"weight of shape \(any, any\)"),
    ]:
        with pytest.raises(ValueError, match=rf"^\[pack_matmul\] expected {message}"):
            ops.pack_matmul(*arguments, bits=8)
    packed = ops.pack_matmul(q, s, b, bits=8, stream=mx.cpu)
    x = mx.zeros((1, 64))
    with pytest.raises(ValueError, match=r"no scales and biases beside a packed weight"):
        ops.verify_matmul(x, packed, s, b)
    parts = packed.weight, packed.scales, packed.biases
    for wrong in (
        ops.PackedWeight(*parts, 40, 64, 64, 8),
        ops.PackedWeight(*parts, 20, 128, 64, 8),
        ops.PackedWeight(*parts, 20, 64, 64, 4),
        ops.PackedWeight(*parts, -20, -1, 64, 8),
        ops.PackedWeight(q, s, b, 20, 64, 64, 8),
    ):
        with pytest.raises(ValueError, match=r"^\[verify_matmul\] expected "):
            ops.verify_matmul(x, wrong)
    with pytest.raises(ValueError, match=r"^\[verify_gather_matmul\] expected the packed weight"):
        ops.verify_gather_matmul(x, packed, mx.array([0]))
