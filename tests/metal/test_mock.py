"""The host code of csrc/ for Metal, on the mock device inside MLX graphs.

The operations are those of `dflash_native.ops`; the oracle is `dflash_native.reference`. Out of
range device values poison their row here, as on any GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from dflash_native import ops, reference
from dflash_native.tape import Tape

from . import SCHEDULES, mock
from .tools import ROOT

B, T, HK, HV, DK, DV = 2, 5, 2, 4, 32, 6
DTYPES = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}  # tolerance of y: its rounding


@pytest.fixture(autouse=True)
def on_mock_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """ops on the mock device; the schedule goes by the test's name, so that all three are used."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    monkeypatch.setattr(ops, "_ext", mock.load())
    schedule = SCHEDULES[len(request.node.name) % len(SCHEDULES)]
    monkeypatch.setenv("DFLASH_METAL_SCHEDULE", str(schedule))
    yield
    mx.set_default_device(device)


def same(a: mx.array, b: mx.array) -> bool:
    bits = {4: mx.uint32, 2: mx.uint16}[a.dtype.size]
    return bool(mx.array_equal(a.view(bits), b.view(bits)))


def close(a: mx.array, b: mx.array, tolerance: float = 2e-6) -> bool:
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return (
        mx.linalg.norm((a - b).flatten()).item() <= tolerance * mx.linalg.norm(b.flatten()).item()
    )


def recurrence(
    dtype: str, vector: bool = False, inputs: int = T, strided: bool = False
) -> tuple[list[mx.array], mx.array]:
    """q, k, v, g, beta and the state; `strided`: views that the operation has to copy."""
    q, k = mx.random.normal((2, B, inputs, HK, DK))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    v = mx.random.normal((B, inputs, HV, DV))
    g = mx.random.uniform(0.7, 1.0, (B, inputs, HV, DK) if vector else (B, inputs, HV))
    beta = mx.random.uniform(0.0, 1.0, (B, inputs, HV))
    state = mx.random.normal((B, HV, DV, DK)) * 0.1
    q, k, v = (x.astype(getattr(mx, dtype)) for x in (q * DK**-0.5, k, v))
    given = [q, k, v, g, beta]
    if strided:
        given = [mx.contiguous(x.swapaxes(0, 1)).swapaxes(0, 1) for x in given]
        state = mx.contiguous(state.swapaxes(2, 3)).swapaxes(2, 3)
    return given, state


def part(given: list[mx.array], start: int, stop: int) -> list[mx.array]:
    return [x[:, start:stop] for x in given]


@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_delta(dtype: str, vector: bool) -> None:
    given, state = recurrence(dtype, vector, strided=vector)
    mask = mx.array([[1, 0, 1, 1, 0], [1] * T]).astype(mx.bool_)
    for valid in (None, mask):
        y, tape, checkpoint = ops.gated_delta_verify(*given, state, mask=valid)
        y_ref, tape_ref, _ = reference.gated_delta_verify(*given, state, mask=valid)
        assert y.dtype == y_ref.dtype and close(y * 2, y_ref * 2, DTYPES[dtype])
        assert close(tape.delta, tape_ref.delta) and same(checkpoint, state)
        y_step, after = ops.gated_delta_step(*given, state, valid)
        assert same(y_step, y)
        assert close(after, reference.gated_delta_step(*given, state, valid)[1])


@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounds(dtype: str, vector: bool) -> None:
    """Verify, keep a prefix, verify on top of it: the bits of single steps."""
    given, state = recurrence(dtype, vector)
    following, _ = recurrence(dtype, vector, 3)
    mask = mx.array([[1, 0, 1, 1, 0], [1] * T]).astype(mx.bool_)
    for valid in (None, mask):
        states = [state]
        for t in range(T):
            one = None if valid is None else valid[:, t : t + 1]
            states.append(ops.gated_delta_step(*part(given, t, t + 1), states[-1], one)[1])
        assert same(states[-1], ops.gated_delta_step(*given, state, valid)[1])
        _, tape, _ = ops.gated_delta_verify(*given, state, mask=valid)
        for keep in ([0, T], [2, 3], [T, 1]):
            expected = mx.stack([states[n][b] for b, n in enumerate(keep)])
            assert same(ops.gated_delta_replay(state, tape, keep), expected)
            y, next_tape, checkpoint = ops.gated_delta_verify(*following, state, tape, keep)
            y_plain, plain_tape, _ = ops.gated_delta_verify(*following, expected)
            assert same(checkpoint, expected)
            assert same(y, y_plain) and same(next_tape.delta, plain_tape.delta)
            assert not same(ops.gated_delta_replay(state, tape, keep[::-1]), expected)  # control


def test_a_wrong_keep_poisons_its_row() -> None:
    given, state = recurrence("float16")
    following, _ = recurrence("float16", inputs=3)
    _, tape, _ = ops.gated_delta_verify(*given, state)
    for bad in (-1, T + 1):
        keep = mx.array([2, bad])
        replayed = ops.gated_delta_replay(state, tape, keep)
        assert mx.all(mx.isnan(replayed[1]))
        assert same(replayed[0], ops.gated_delta_replay(state, tape, [2, 2])[0])
        y, next_tape, checkpoint = ops.gated_delta_verify(*following, state, tape, keep)
        for x in (y, next_tape.delta, checkpoint):
            assert mx.all(mx.isnan(x[1])) and mx.all(mx.isfinite(x[0]))


def test_the_device_is_the_mock() -> None:
    """The CPU kernel raises where a GPU poisons: the tests above ran the Metal path."""
    _, state = recurrence("float32")
    tape = Tape(mx.ones((B, 1, HV)), mx.ones((B, 1, HK, DK)), mx.zeros((B, 1, HV, DV)))
    assert mx.all(mx.isnan(ops.gated_delta_replay(state, tape, mx.array([9, 9]))))
    assert ops._ext.metal_kernel_source() == "compiled on first use"


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_delta_gates(dtype: str) -> None:
    a, b = (3 * mx.random.normal((2, B, T, HV))).astype(getattr(mx, dtype))
    A_log, dt_bias = mx.log(mx.random.uniform(1, 16, (HV,))), mx.random.normal((HV,))
    got = ops.gated_delta_gates(a, b, A_log, dt_bias)
    for x, expected in zip(got, reference.gated_delta_gates(a, b, A_log, dt_bias), strict=True):
        assert x.dtype == mx.float32 and close(x, expected)
    one = ops.gated_delta_gates(a[1:, 2:3], b[1:, 2:3], A_log, dt_bias)
    assert same(one[0], got[0][1:, 2:3]) and not same(one[0], got[0][1:, 3:4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_causal_conv1d(dtype: str) -> None:
    channels, taps = 37, 4
    kind = getattr(mx, dtype)
    x = mx.random.normal((B, T, channels)).astype(kind)
    window = mx.random.normal((B, taps - 1, channels)).astype(kind)
    weight = mx.random.normal((channels, taps, 1)).astype(kind)
    got = ops.causal_conv1d_verify(x, weight, window)
    assert close(got, reference.causal_conv1d_verify(x, weight, window), DTYPES[dtype])
    for keep in ([0, T], [3, 1]):
        after = ops.conv_window(window, x, keep)
        assert same(after, reference.conv_window(window, x, mx.array(keep)))
    at = ops.conv_window(window, x, [3, 3])
    tail = ops.causal_conv1d_verify(x[:, 3:], weight, at)
    assert same(tail, got[:, 3:])
    assert not same(ops.causal_conv1d_verify(x[:, 3:], weight, window), got[:, 3:])  # control
    poisoned = ops.conv_window(window, x, mx.array([T + 1, 0]))
    assert mx.all(mx.isnan(poisoned[0])) and same(poisoned[1], window[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_write(dtype: str) -> None:
    kind = getattr(mx, dtype)
    before = mx.random.normal((B, 3, 16, 12)).astype(kind)
    rows = mx.random.normal((B, 3, T, 12)).astype(kind)
    mx.eval(before, rows)
    kept = before + 0  # evaluated and held: the operation must not write into it
    mx.eval(kept)
    held = ops.kv_write(kept, rows, [0, 16 - T])
    assert same(held, reference.kv_write(before, rows, mx.array([0, 16 - T])))
    assert same(kept, before)
    donated = ops.kv_write(before + 0, rows, mx.array([3, 7]))
    assert same(donated, reference.kv_write(before, rows, mx.array([3, 7])))
    assert not same(donated, held)
    wrong = ops.kv_write(before + 0, rows, mx.array([1, 16 - T + 1]))
    assert mx.any(mx.isnan(wrong[1])) and mx.all(mx.isfinite(wrong[0]))


def strided(x: mx.array) -> mx.array:
    """The same values in a view that the operation has to copy."""
    return mx.contiguous(x.swapaxes(-1, -2)).swapaxes(-1, -2)


def weight(
    dtype: str, bits: int | None, group: int, *shape: int
) -> tuple[tuple[mx.array, ...], dict[str, int]]:
    """A weight's arrays as strided views, and the keywords that belong to it."""
    values = mx.random.normal(shape).astype(getattr(mx, dtype))
    if bits is None:
        return (strided(values),), {}
    arrays = mx.quantize(values, group_size=group, bits=bits)
    return tuple(strided(x) for x in arrays), {"group_size": group, "bits": bits}


KINDS = [("bfloat16", None, 64), ("float16", None, 64), ("float32", None, 64)] + [
    (dtype, bits, group)
    for bits, dtype in ((4, "bfloat16"), (8, "float16"))
    for group in (32, 64, 128)
]


@pytest.mark.parametrize(("dtype", "bits", "group"), KINDS, ids=str)
@pytest.mark.parametrize("x_dtype", ["float32", None], ids=["float32", "own"])
def test_verify_matmul(dtype: str, bits: int | None, group: int, x_dtype: str | None) -> None:
    arrays, keywords = weight(dtype, bits, group, 40, 256)
    x = strided(mx.random.normal((3, 3, 256)).astype(getattr(mx, x_dtype or dtype)))
    bias = mx.random.normal((40,)).astype(mx.bfloat16)
    got = ops.verify_matmul(x, *arrays, bias=bias, **keywords)
    expected = reference.verify_matmul(x, *arrays, bias=bias, **keywords)
    assert got.dtype == expected.dtype == getattr(mx, x_dtype or dtype)
    assert close(got, expected, DTYPES[x_dtype or dtype])
    assert not close(ops.verify_matmul(x, *arrays, **keywords), expected, 0.02)
    one = ops.verify_matmul(x[1, 2], *arrays, bias=bias, **keywords)
    assert same(one, got[1, 2]) and not same(one, got[1, 1])


@pytest.mark.parametrize(("dtype", "bits", "group"), [KINDS[0], KINDS[4]], ids=str)
@pytest.mark.parametrize("slots", [1, 3])
def test_verify_gather_matmul(dtype: str, bits: int | None, group: int, slots: int) -> None:
    arrays, keywords = weight(dtype, bits, group, 4, 40, 128)
    weights, *scales = arrays
    x = strided(mx.random.normal((2, slots, 128)))
    bias = mx.random.normal((4, 40))
    indices = mx.array([[0, 3, 3], [2, 1, 0]])
    got = ops.verify_gather_matmul(x, weights, indices, *scales, bias=bias, **keywords)
    expected = reference.verify_gather_matmul(x, weights, indices, *scales, bias=bias, **keywords)
    assert got.dtype == mx.float32 and close(got, expected)
    for r, j in ((0, 1), (1, 0)):
        e = indices[r, j].item()
        own = [a[e] for a in arrays]
        alone = ops.verify_matmul(x[r, j % slots], *own, bias=bias[e], **keywords)
        assert same(alone, got[r, j]) and not same(alone, got[1 - r, j])
    for bad in (-1, 4, 2**32):
        wrong = mx.array([[0, 3, 3], [2, bad, 0]], mx.int64)
        poisoned = ops.verify_gather_matmul(x, weights, wrong, *scales, bias=bias, **keywords)
        assert mx.all(mx.isnan(poisoned[1, 1])) and same(poisoned[0], got[0])
        assert same(poisoned[1, ::2], got[1, ::2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", ["causal", "unrestricted", "window and sinks", "mask"])
def test_verify_attention(dtype: str, options: str) -> None:
    chosen: dict[str, Any] = {
        "causal": {},
        "unrestricted": {"causal": False},
        "window and sinks": {"window": 4, "sinks": mx.array([1.0, -2.0, 0.5, 3.0])},
        "mask": {"mask": strided(mx.random.bernoulli(0.5, (3, 3)) | mx.eye(3, dtype=mx.bool_))},
    }[options]
    kind = getattr(mx, dtype)
    q = strided(mx.random.normal((B, 4, 3, 64)).astype(kind))
    k, v = (strided(x.astype(kind)) for x in mx.random.normal((2, B, 2, 270, 64)))
    lengths = [255, 9]
    got = ops.verify_attention(q, k, v, lengths, 0.125, **chosen)
    expected = reference.verify_attention(q, k, v, mx.array(lengths), 0.125, **chosen)
    assert got.dtype == kind and close(got, expected, DTYPES[dtype])
    other = ops.verify_attention(q, k, v, [254, 8], 0.125, **chosen)
    assert not close(other, expected, 0.05)
    if options in ("causal", "window and sinks"):
        rows = [
            ops.verify_attention(q[:, :, t : t + 1], k, v, [255 + t, 9 + t], 0.125, **chosen)
            for t in range(3)
        ]
        assert same(mx.concatenate(rows, axis=2), got)
    for bad in (-1, 268, 2**31 - 1, 2**40):
        wrong = ops.verify_attention(q, k, v, mx.array([255, bad], mx.int64), 0.125, **chosen)
        assert mx.all(mx.isnan(wrong[1])) and same(wrong[0], got[0])


def test_packed_weights_are_refused() -> None:
    """They are the CPU's; here nothing would read them rightly."""
    dense = mx.zeros((16, 32))
    with pytest.raises(ValueError, match=r"^\[pack_matmul\] expected a stream of the CPU but got"):
        ops.pack_matmul(dense)
    packed = ops.PackedWeight(mx.zeros((1, 32, 16)), None, None, 16, 32, None, None)
    with pytest.raises(ValueError, match=r"^\[verify_matmul\] expected a plain weight on a GPU"):
        ops.verify_matmul(mx.zeros((1, 32)), packed)
    experts = ops.PackedWeight(mx.zeros((2, 1, 32, 16)), None, None, 16, 32, None, None)
    with pytest.raises(ValueError, match=r"^\[verify_gather_matmul\] expected a plain weight on a"):
        ops.verify_gather_matmul(mx.zeros((1, 32)), experts, mx.array([0]))
    assert ops.verify_matmul(mx.zeros((1, 32)), dense).shape == (1, 16)


PROGRAM = """
import hashlib
import mlx.core as mx
mx.set_default_device(mx.cpu)
from dflash_native import ops
mx.random.seed(1)
x, w = mx.random.normal((9, 16)), mx.random.normal((65536, 16))
q, k = mx.random.normal((1, 2, 25, 32)), mx.random.normal((1, 1, 40, 32))
q, k = q.astype(mx.float16), k.astype(mx.float16)
outs = ops.verify_matmul(x, w), ops.verify_attention(q, k, k, [15], 0.2)
print(hashlib.sha256(b"".join(bytes(memoryview(y.view(mx.uint8))) for y in outs)).hexdigest())
"""


def run(tiles: str | None) -> subprocess.CompletedProcess[str]:
    environment = mock.environment() | {"DFLASH_METAL_TRACE": "1"}
    environment |= {} if tiles is None else {"DFLASH_NATIVE_TILES": tiles}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


def test_tiles_are_the_users() -> None:
    """Other kernels run, which give the same bits."""
    found = {}
    for tiles, matmul, attention in (
        (None, 1, 2),
        ("matmul=2,attention=4", 2, 4),
        ("attention=1", 1, 1),
    ):
        done = run(tiles)
        assert done.returncode == 0, done.stderr
        assert done.stderr.split() == [
            f"verify_matmul_dense_float_float_{matmul}_2",
            f"attend_chunk_half_32_32_2_{attention}_true",
            "combine_chunks_half_32",
        ]
        found[tiles] = done.stdout
    assert len({*found.values()}) == 1 and len(found[None]) == 65


@pytest.mark.parametrize("tiles", ["matmul=3", "attention", "matmul=2,columns=4", "matmul=2 "])
def test_tiles_that_make_no_sense_are_refused(tiles: str) -> None:
    done = run(tiles)
    assert done.returncode == 1 and "[DFLASH_NATIVE_TILES] expected matmul= or" in done.stderr
    assert f'but got "{tiles}".' in done.stderr
