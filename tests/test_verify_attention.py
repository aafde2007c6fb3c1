"""Attention of a block over its cache: the same bits at every width."""

from __future__ import annotations

import mlx.core as mx
import pytest

from dflash_native import ops, reference
from dispatch import check_same_bits
from inputs import DTYPES, error, name, same

CHUNK = 256
EDGES = [0, 1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1024]
HEAD_DIMS = [(32, 32), (64, 64), (96, 96), (128, 128), (256, 256), (192, 128)]
LIMIT = {mx.float32: 2e-6, mx.float16: 6e-4, mx.bfloat16: 5e-3}  # a rounding of the result


def attention_inputs(B, Hq, Hkv, T, capacity, D, Dv=None, dtype=mx.float32):
    """q, k, v with scores of a few units, so that a row looks at some keys more than at others."""
    q = mx.random.normal((B, Hq, T, D)) * 2
    k = mx.random.normal((B, Hkv, capacity, D))
    v = mx.random.normal((B, Hkv, capacity, Dv or D))
    found = [x.astype(dtype) for x in (q, k, v)]
    mx.eval(found)
    return found


def poisoned(x, start, value=mx.nan):
    """The cache with its rows from `start` on dead."""
    dead = mx.arange(x.shape[2])[:, None] >= start
    return mx.where(dead, mx.array(value, x.dtype), x)


def one_at_a_time(q, k, v, length, scale, window=None, sinks=None):
    """Each row of the block in a call of its own, the later ones dead and NaN."""
    rows = []
    for t in range(q.shape[2]):
        at = length + t
        dead = [poisoned(x, at + 1) for x in (k, v)]
        rows.append(
            ops.verify_attention(
                q[:, :, t : t + 1], *dead, [at] * q.shape[0], scale, window, sinks=sinks
            )
        )
    return mx.concatenate(rows, axis=2)


def split_at_the_block(q, k, v, length, scale):
    """A control: committed keys and the block's own in sums of their own, whatever the position."""
    T = q.shape[2]
    parts = []
    for keys, seen in (
        (slice(0, length), None),
        (slice(length, length + T), mx.tri(T, dtype=mx.bool_)),
    ):
        scores = (q @ k[:, :, keys].swapaxes(-1, -2)) * scale
        if seen is not None:
            scores = mx.where(seen, scores, -mx.inf)
        top = scores.max(-1, keepdims=True)
        weights = mx.exp(scores - top)
        parts.append((top, weights.sum(-1, keepdims=True), weights @ v[:, :, keys]))
    (m1, l1, o1), (m2, l2, o2) = parts
    top = mx.maximum(m1, m2)
    w1, w2 = mx.exp(m1 - top), mx.exp(m2 - top)
    return (o1 * w1 + o2 * w2) / (l1 * w1 + l2 * w2)


@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("T", [1, 2, 5, 16, 33])
def test_attention_gives_what_the_reference_and_mlx_give(backend, T, length):
    dtype = DTYPES[(length + T) % 3]
    q, k, v = attention_inputs(1, 4, 2, T, length + T + 3, 64, dtype=dtype)
    out = ops.verify_attention(q, poisoned(k, length + T), poisoned(v, length + T), [length], 0.125)
    assert out.dtype == dtype and out.shape == q.shape
    assert error(out, reference.verify_attention(q, k, v, mx.array([length]), 0.125)) < LIMIT[dtype]
    keys, values = k[:, :, : length + T], v[:, :, : length + T]
    stock = mx.fast.scaled_dot_product_attention(
        *(x.astype(mx.float32) for x in (q, keys, values)), scale=0.125, mask="causal"
    )
    assert error(out, stock) < LIMIT[dtype]
    if length + T > 1:
        assert error(out, reference.verify_attention(q, k, v, mx.array([length]), 0.15)) > 0.02


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("options", ["causal", "unrestricted", "mask", "window", "sinks", "all"])
def test_every_option_gives_what_the_reference_gives(backend, options, dims, dtype):
    D, Dv = dims
    q, k, v = attention_inputs(2, 6, 2, 7, 300, D, Dv, dtype)
    lengths, scale = [249, 13], D**-0.5
    chosen = {
        "causal": {},
        "unrestricted": {"causal": False},
        "mask": {"mask": mx.random.bernoulli(0.5, (7, 7))},
        "window": {"window": 20},
        "sinks": {"sinks": mx.random.normal((6,)) * 3},
    }
    chosen["all"] = chosen["mask"] | chosen["window"] | chosen["sinks"]
    out = ops.verify_attention(q, k, v, lengths, scale, **chosen[options])
    expected = reference.verify_attention(q, k, v, mx.array(lengths), scale, **chosen[options])
    assert out.dtype == dtype and out.shape == (2, 6, 7, Dv)
    assert error(out, expected) < LIMIT[dtype]
    if options != "causal":
        assert error(ops.verify_attention(q, k, v, lengths, scale), expected) > 0.02


@pytest.mark.parametrize("window", [1, 5, 100, 256, 1000])
def test_windows_and_sinks_give_what_mlx_gives(backend, window):
    q, k, v = attention_inputs(1, 8, 2, 9, 530, 64)
    sinks = mx.random.normal((8,)) * 2
    at = 521 + mx.arange(9)[:, None] - mx.arange(530)
    stock = mx.fast.scaled_dot_product_attention(
        q, k, v, scale=0.125, mask=(at >= 0) & (at < window), sinks=sinks
    )
    out = ops.verify_attention(q, k, v, [521], 0.125, window, sinks=sinks)
    assert error(out, stock) < 2e-6
    other = ops.verify_attention(q, k, v, [521], 0.125, window + 1, sinks=sinks)
    assert error(other, stock) > 1e-3 or window == 1000


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("group", [1, 4, 6, 8])
def test_a_block_has_the_bits_of_single_rows(backend, group, dims, dtype):
    """C1, over a chunk's edge; the rows after a single one are dead and hold NaN."""
    D, Dv = dims
    q, k, v = attention_inputs(1, 2 * group, 2, 6, 270, D, Dv, dtype)
    for length in (0, 253):
        for options in ({}, {"window": 9}, {"sinks": mx.random.normal((2 * group,))}):
            block = ops.verify_attention(q, k, v, [length], D**-0.5, **options)
            assert same(block, one_at_a_time(q, k, v, length, D**-0.5, **options))
            late = one_at_a_time(q, k, v, length + 1, D**-0.5, **options)  # the control
            assert not same(block, late)


@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("T", [2, 5, 16, 33])
def test_bits_at_every_edge_and_width(backend, T, length):
    """C1: keys belong to the chunk of their absolute position. Where the committed keys and the
    block's are summed apart, 48 of 52 simulated cases differ.
    """
    dtype = DTYPES[(length + T) % 3]
    q, k, v = attention_inputs(1, 4, 1, T, length + T, 64, dtype=dtype)
    block = ops.verify_attention(q, k, v, [length], 0.125)
    assert same(block, one_at_a_time(q, k, v, length, 0.125))
    if dtype == mx.float32 and length:
        split = split_at_the_block(q, k, v, length, 0.125)  # the control
        assert error(block, split) < 2e-6 and not same(block, split)


def test_bits_do_not_depend_on_the_capacity(backend):
    q, k, v = attention_inputs(2, 4, 2, 5, 600, 64)
    out = ops.verify_attention(q, k, v, [250, 17], 0.125)
    exact = [x[:, :, :255] for x in (k, v)]
    assert same(ops.verify_attention(q, *exact, [250, 17], 0.125), out)
    moved = [mx.roll(x, 1, axis=2) for x in (k, v)]  # the control
    assert not same(ops.verify_attention(q, *moved, [250, 17], 0.125), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_rows_of_a_batch_are_independent(backend, dtype):
    """C1: three requests of different lengths, alone and together."""
    q, k, v = attention_inputs(3, 6, 2, 5, 800, 64, dtype=dtype)
    lengths = [0, 255, 700]
    whole = ops.verify_attention(q, k, v, lengths, 0.125, window=300)
    for b, length in enumerate(lengths):
        one = [x[b : b + 1] for x in (q, k, v)]
        assert same(ops.verify_attention(*one, [length], 0.125, window=300)[0], whole[b])
        assert not same(ops.verify_attention(*one, [length + 1], 0.125, window=300)[0], whole[b])


@pytest.mark.parametrize("value", [mx.nan, mx.inf, -mx.inf], ids=str)
def test_other_rows_of_the_block_do_not_reach_a_row(backend, value):
    """C1: a row that must not be seen is skipped; weighted zero, it would give NaN."""
    q, k, v = attention_inputs(1, 6, 2, 5, 300, 64)
    mask = mx.array([[i == j or (i > j and (i + j) % 2 == 0) for j in range(5)] for i in range(5)])
    options = {"causal": {}, "mask": {"mask": mask}, "window": {"window": 1}}
    for length in (0, 254, 290):
        for chosen in options.values():
            block = ops.verify_attention(q, k, v, [length], 0.125, **chosen)
            bad_q, bad_k, bad_v = mx.array(q), mx.array(k), mx.array(v)
            bad_q[:, :, 3] = value
            bad_k[:, :, length + 3] = value
            bad_v[:, :, length + 3] = value
            bad = ops.verify_attention(bad_q, bad_k, bad_v, [length], 0.125, **chosen)
            assert not same(bad[:, :, 3], block[:, :, 3])  # the control
            for t in {0, 1, 2} | ({4} if chosen else set()):
                assert same(bad[:, :, t], block[:, :, t])


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("value", [mx.nan, mx.inf, -mx.inf], ids=str)
def test_bits_where_the_history_is_not_finite(backend, value, dtype):
    """C1: on a GPU infinity stayed infinity for a row alone, and became NaN in a block."""
    q, k, v = attention_inputs(1, 4, 2, 5, 300, 32, dtype=dtype)
    v[:, :, 3] = value
    for length, window in ((30, None), (38, 39)):
        block = ops.verify_attention(q, k, v, [length], 0.2, window)
        assert same(block, one_at_a_time(q, k, v, length, 0.2, window))
        seen = mx.array([window is None or length + t - 3 < window for t in range(5)])
        assert mx.array_equal(mx.isfinite(block).any((0, 1, 3)), ~seen)
        assert mx.array_equal(mx.isfinite(block).all((0, 1, 3)), ~seen)


def test_a_mask_is_what_it_says(backend):
    """The causal mask as a mask, the full one, and each row of a tree as a chain of its own."""
    q, k, v = attention_inputs(1, 4, 2, 6, 280, 64, dtype=mx.bfloat16)
    call = lambda **options: ops.verify_attention(q, k, v, [253], 0.125, **options)  # noqa: E731
    causal = mx.tri(6, dtype=mx.bool_)
    assert same(call(mask=causal), call())
    assert same(call(mask=mx.ones((6, 6), mx.bool_)), call(causal=False))
    assert same(call(mask=causal, causal=False), call())
    assert same(call(mask=causal, window=4), call(window=4))
    assert not same(call(mask=causal.T), call())


def test_a_row_that_sees_nothing_is_zero(backend):
    q, k, v = attention_inputs(1, 4, 2, 3, 20, 64)
    mask = mx.array([[False] * 3, [True, False, False], [False] * 3])
    for sinks in (None, mx.array([1.0, -5.0, 0.0, -mx.inf])):
        out = ops.verify_attention(
            q, k * mx.nan, v, [0], 0.125, mask=mx.zeros((3, 3), mx.bool_), sinks=sinks
        )
        assert same(out, mx.zeros(q.shape))
        out = ops.verify_attention(q, k, v, [0], 0.125, mask=mask, sinks=sinks)
        assert same(out[:, :, ::2], mx.zeros((1, 4, 2, 64)))
        assert mx.all(mx.any(out[:, :, 1] != 0, axis=-1))  # the control
    out = ops.verify_attention(q, k, v, [9], 0.125, window=1, mask=mask)
    assert same(out, mx.zeros(q.shape))


def test_scores_far_apart(backend):
    """The top score is subtracted first: no overflow, and a far key has no weight."""
    k = mx.zeros((1, 1, 600, 32))
    k[..., 300, 0] = 100.0
    v = mx.broadcast_to(mx.arange(600.0)[:, None], (1, 1, 600, 32))
    q = mx.ones((1, 1, 1, 32)) * 100
    assert same(ops.verify_attention(q, k, v, [599], 1.0), mx.full((1, 1, 1, 32), 300.0))
    away = ops.verify_attention(-q, k, v, [599], 1.0)
    assert mx.allclose(away, mx.full((1, 1, 1, 32), (599 * 300 - 300) / 599), rtol=1e-6)
    even = ops.verify_attention(q * 0, k, v, [599], 1.0)
    assert mx.allclose(even, mx.full((1, 1, 1, 32), 299.5), rtol=1e-6)


def test_131072_keys(backend):
    q, k, v = attention_inputs(1, 2, 1, 2, 131_072, 32, dtype=mx.float16)
    length = 131_070
    out = ops.verify_attention(q, k, v, [length], 32**-0.5)
    stock = mx.fast.scaled_dot_product_attention(
        *(x.astype(mx.float32) for x in (q, k, v)), scale=32**-0.5, mask="causal"
    )
    assert error(out, stock) < LIMIT[mx.float16]
    assert same(out, one_at_a_time(q, k, v, length, 32**-0.5))
    assert not same(out, ops.verify_attention(q, k, v, [length - 1], 32**-0.5))


PROGRAM = """
import hashlib
import mlx.core as mx
mx.set_default_device(mx.cpu)
from dflash_native import _native, ops
mx.random.seed(5)
digest = hashlib.sha256()
mask = mx.random.bernoulli(0.5, (9, 9))
for dtype in (mx.float32, mx.float16, mx.bfloat16):
    for D, Dv in ((32, 32), (192, 128)):
        q = mx.random.normal((2, 6, 9, D)).astype(dtype) * SCALE
        k = mx.random.normal((2, 2, 600, D)).astype(dtype)
        v = mx.random.normal((2, 2, 600, Dv)).astype(dtype)
        for options in ({}, {"mask": mask, "window": 100}, {"sinks": mx.arange(6.0)}):
            out = ops.verify_attention(q, k, v, [590, 250], D**-0.5, **options)
            digest.update(bytes(memoryview(out.view(mx.uint8))))
print(_native.extension.cpu_isa(), _native.extension.cpu_threads(), digest.hexdigest())
"""


def test_instruction_sets_and_thread_counts_give_the_same_bits(cpu):
    check_same_bits(PROGRAM, "2.0", "2.01")


def test_device_lengths_are_checked(backend):
    q, k, v = attention_inputs(2, 2, 1, 3, 10, 32)
    for bad in (8, -1, 2**31 - 1):
        lengths = mx.array([2, bad])
        if backend == "cpu":
            with pytest.raises(
                RuntimeError, match=r"\[verify_attention\] expected lengths\[1\] in 0 .. 7"
            ):
                mx.eval(ops.verify_attention(q, k, v, lengths, 1.0))
        else:
            out = ops.verify_attention(q, k, v, lengths, 1.0)
            assert mx.all(mx.isnan(out[1]))
            assert same(out[0], ops.verify_attention(q, k, v, [2, 2], 1.0)[0])


def test_bad_inputs_are_refused():
    q, k, v = attention_inputs(2, 4, 2, 3, 10, 32)
    at = [0, 0]
    mask = mx.ones((3, 3), mx.bool_)
    for arguments, message in [
        (
            (q[0], k, v, mx.array(at), 1.0),
            r"q of shape \(any, any, any, any\) but got \(4, 3, 32\)",
        ),
        ((q, k[..., :16], v, at, 1.0), r"k of shape \(2, any, any, 32\) but got \(2, 2, 10, 16\)"),
        ((q, k, v[:, :, :9], at, 1.0), r"v of shape \(2, 2, 10, any\) but got \(2, 2, 9, 32\)"),
        ((q, k.astype(mx.float16), v, at, 1.0), "k in float32 but got float16"),
        ((q, k, v.astype(mx.bfloat16), at, 1.0), "v in float32 but got bfloat16"),
        ((q.astype(mx.int32), k, v, at, 1.0), "q in float32, float16 or bfloat16 but got int32"),
        ((q[:, :, :0], k, v, at, 1.0), "q with no empty dimension"),
        ((q[:, :3], k, v, at, 1.0), "Hq to be a multiple of Hkv but got Hq = 3, Hkv = 2"),
        ((q, k, v[..., :16], at, 1.0), "D = 192 with Dv = 128, but got D = 32, Dv = 16"),
        ((q, k[:, :, :2], v[:, :, :2], mx.array(at), 1.0), r"at most 2 rows \(the capacity\)"),
        ((q, k, v, [0, 8], 1.0), r"lengths\[1\] in 0 .. 7 but got 8"),
        ((q, k, v, [0], 1.0), "2 values of lengths but got 1"),
        ((q, k, v, at, 1.0, 0), "a window of at least 1 but got 0"),
        ((q, k, v, at, 1.0, None, True, mask[:2]), r"mask of shape \(3, 3\) but got \(2, 3\)"),
        ((q, k, v, at, 1.0, None, True, mx.ones((3, 3))), "mask in bool but got float32"),
        (
            (q, k, v, at, 1.0, None, True, None, mx.zeros(3)),
            r"sinks of shape \(4,\) but got \(3,\)",
        ),
        (
            (q, k, v, at, 1.0, None, True, None, mx.zeros(4, mx.float16)),
            "sinks in float32 but got float16",
        ),
    ]:
        with pytest.raises(ValueError, match=r"^\[verify_attention\] expected .*" + message):
            ops.verify_attention(*arguments)
    with pytest.raises(TypeError, match=r"mask to be an mx.array but got list"):
        ops.verify_attention(q, k, v, at, 1.0, mask=[[True]])
