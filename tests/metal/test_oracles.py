"""The shipped shaders against Apple's compilation of MLX's kernels for the same thing.

Both run on the emulator; the sums are in another order, so the results differ by rounding. Where
MLX's kernel adds in fp32, the tolerance is 2e-6 and one rounding of the dtype; every test has a
fault that must exceed it. And the metallib, the inventory of built-ins and the loader.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import BenchError, air, launch, macos, metallib, mlx_kernels, oracle
from .compare import ULP, close, on_every_schedule
from .launch import KINDS, Inputs, decode, encode
from .runner import Library
from .test_matmul_shaders import product
from .tools import NM, emulator_objects, run

pytestmark = pytest.mark.usefixtures("metallib")


def tolerance(kind: str) -> float:
    return 2e-6 + (0 if kind == "float" else ULP[kind])


@functools.cache
def apples(*names: str) -> Library:
    return oracle.oracle(*names)


def attention_inputs(
    kind: str, dims: tuple[int, int], inputs: int, batch: int = 2
) -> tuple[np.ndarray, ...]:
    """q [B, 4, T, D] and caches [B, 2, 300, ...]."""
    rng = np.random.default_rng(20)
    q = rng.standard_normal((batch, 4, inputs, dims[0])) * 2
    caches = (rng.standard_normal((batch, 2, 300, dim)) for dim in dims)
    return tuple(encode(x, kind) for x in (q, *caches))


def sees(length: int, inputs: int, window: int | None, block: np.ndarray | None) -> np.ndarray:
    """[T, length + T]: the inputs see each other by `block`, or causally."""
    mask = np.ones((inputs, length + inputs), bool)
    mask[:, length:] = np.tri(inputs, dtype=bool) if block is None else block
    if window is not None:
        ages = length + np.arange(inputs)[:, None] - np.arange(length + inputs)
        mask &= ages < window
    return mask


def sdpa(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    lengths: list[int],
    scale: float,
    schedule: int = 0,
    **options: Any,
) -> np.ndarray:
    """Every batch row by MLX's kernel."""
    library = apples(mlx_kernels.sdpa_vector_name(launch.KIND_OF[q.dtype], q.shape[3], v.shape[3]))
    rows = []
    for b, length in enumerate(lengths):
        given = dict(options)
        window, block = given.pop("window", None), given.pop("mask", None)
        if window is None and block is None:
            given.setdefault("causal", True)
        else:
            mask = sees(length, q.shape[2], window, block)
            given |= {"causal": False, "mask": np.repeat(mask[None], q.shape[1], 0)}
        rows.append(
            mlx_kernels.sdpa_vector(
                *(library, q[b], k[b], v[b], length + q.shape[2], scale),
                schedule=schedule,
                **given,
            )
        )
    return np.stack(rows)


@pytest.mark.parametrize(
    ("kind", "dims"),
    [("float", (64, 64)), ("half", (128, 128)), ("bfloat", (192, 128)), ("float", (96, 96))],
    ids=str,
)
@pytest.mark.parametrize("inputs", [1, 3, 9])
def test_attention_is_that_of_mlx(kind: str, dims: tuple[int, int], inputs: int) -> None:
    """At the edges of groups of keys and of chunks, on every schedule."""
    given = attention_inputs(kind, dims, inputs)
    scale = dims[0] ** -0.5
    for lengths in ([0, 31], [32, 255], [256, 300 - inputs]):
        ours = on_every_schedule(functools.partial(launch.verify_attention, *given, lengths, scale))
        mlx = decode(sdpa(*given, lengths, scale, schedule=inputs % 3))
        assert close(decode(ours), mlx, tolerance(kind))
        wrong_scale = decode(launch.verify_attention(*given, lengths, scale * 1.2))
        other_row = decode(launch.verify_attention(*given, lengths[::-1], scale))
        assert not close(wrong_scale, mlx, 2 * tolerance(kind))
        assert not close(other_row, mlx, 2 * tolerance(kind))
        if kind == "float":  # one key is less than the rounding of the others
            early = [max(0, length - 1) for length in lengths]
            a_key_less = decode(launch.verify_attention(*given, early, scale))
            assert not close(a_key_less, mlx, 2 * tolerance(kind))


ATTENTION_OPTIONS: dict[str, dict[str, Any]] = {
    "unrestricted": {"causal": False},
    "window": {"window": 33},
    "mask": {"mask": np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)},
    "mask and window": {"mask": np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1]], bool), "window": 2},
    "sinks": {"sinks": np.array([0.5, -3.0, 4.0, 1.0], np.float32)},
}


@pytest.mark.parametrize("options", ATTENTION_OPTIONS)
@pytest.mark.parametrize("kind", ["float", "half"])
def test_options_of_attention_are_those_of_mlx(kind: str, options: str) -> None:
    given, lengths = attention_inputs(kind, (64, 64), 3), [40, 256]
    chosen = ATTENTION_OPTIONS[options]
    ours = decode(launch.verify_attention(*given, lengths, 0.125, **chosen))
    in_kind = dict(chosen)
    if "sinks" in chosen:
        in_kind["sinks"] = encode(chosen["sinks"], kind)
    mlx = decode(sdpa(*given, lengths, 0.125, **in_kind))
    assert close(ours, mlx, tolerance(kind))
    plain = decode(launch.verify_attention(*given, lengths, 0.125))
    assert not close(plain, mlx, 4 * tolerance(kind))


QUANTISED = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bits", "group"), QUANTISED, ids=str)
def test_quantised_products_are_those_of_mlx(kind: str, bits: int, group: int) -> None:
    """MLX's product of a vector, which adds in fp32, at the widths of ours."""
    given = product(kind, kind, (bits, group), (17,), outputs=37)._replace(bias=None)
    x, weight, scales, biases = (a for a in given[:4] if a is not None)
    library = apples(mlx_kernels.affine_name("affine_qmv", kind, group, bits))
    mlx = decode(mlx_kernels.affine_product(library, "affine_qmv", x, weight, scales, biases, bits))
    for rows in (1, 8, 9, 17):
        got = decode(given.rows(0, rows).run(schedule=rows % 3))
        assert close(got, mlx[:rows], tolerance(kind))
    assert close(decode(on_every_schedule(given.run)), mlx, tolerance(kind))
    faults = {
        "a scale": given._replace(scales=encode(decode(scales) * 1.1, kind)),
        "an offset": given._replace(biases=encode(decode(biases) * 1.1, kind)),
        "groups change places": given._replace(scales=np.ascontiguousarray(scales[:, ::-1])),
        "outputs change places": given._replace(weight=np.roll(weight, 1, axis=0)),
    }
    for what, wrong in faults.items():
        assert not close(decode(wrong.run()), mlx, 4 * tolerance(kind)), what


@pytest.mark.parametrize("kernel", ["affine_qmv_fast", "affine_qmm_t", "affine_qmm_t_aligned"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_products_of_mlx_agree_too(kernel: str, kind: str) -> None:
    """Its fast product of a vector, and that of a matrix, which rounds the weight to the dtype."""
    rng = np.random.default_rng(21)
    outputs = 32 if "aligned" in kernel or "fast" in kernel else 37
    x = encode(rng.standard_normal((5, 512)), kind)
    weight = rng.integers(0, 2**32, (outputs, 64), np.uint32)
    scales = encode(rng.uniform(0.5, 1.5, (outputs, 8)) / 16, kind)
    biases = encode(rng.uniform(-0.7, -0.3, (outputs, 8)), kind)
    operands = (x, weight, scales, biases)
    library = apples(mlx_kernels.affine_name(kernel, kind, 64, 4))
    mlx = decode(mlx_kernels.affine_product(library, kernel, *operands, 4))
    ours = decode(launch.verify_matmul(*operands))
    assert close(ours, mlx, tolerance(kind))
    swapped = decode(launch.verify_matmul(x, weight, biases, scales))
    assert not close(swapped, mlx, 4 * tolerance(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_gathered_products_are_those_of_mlx(kind: str) -> None:
    given = product(kind, kind, (4, 64), (6,), outputs=37, experts=3)._replace(bias=None)
    x, weight, scales, biases = (a for a in given[:4] if a is not None)
    experts = np.array([[2, 0, 0], [1, 2, 1], [0, 0, 1], [2, 2, 2], [0, 1, 2], [1, 0, 2]], np.int32)
    rows = np.repeat(np.arange(6), 3)
    library = apples(mlx_kernels.affine_name("affine_gather_qmv", kind, 64, 4))
    mlx = mlx_kernels.affine_gather_qmv(
        library, x, weight, scales, biases, rows, experts.reshape(-1), 4
    )
    expected = decode(mlx).reshape(6, 3, 37)
    given = given._replace(x=x[:, None], indices=experts)
    assert close(decode(on_every_schedule(given.run)), expected, tolerance(kind))
    wrong = decode(given._replace(indices=(experts + 1) % 3).run())
    assert not close(wrong, expected, 4 * tolerance(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_dense_products_are_those_of_mlx(kind: str) -> None:
    given = product(kind, kind, None, (9,), outputs=37)._replace(bias=None)
    library = apples(mlx_kernels.gemv_name(kind))
    mlx = decode(np.stack([mlx_kernels.gemv(library, given.weight, x) for x in given.x]))
    assert close(decode(on_every_schedule(given.run)), mlx, tolerance(kind))
    wrong = decode(given._replace(weight=np.roll(given.weight, 1, axis=1)).run())
    assert not close(wrong, mlx, 4 * tolerance(kind))


@pytest.mark.parametrize("kernel", ["seq_gated_delta", "gated_delta_fused_chunk"])
@pytest.mark.parametrize("kind", ["float", "bfloat"])
@pytest.mark.parametrize("inputs", [1, 9])
def test_the_gated_delta_rule_is_that_of_mlx(kind: str, kernel: str, inputs: int) -> None:
    """MLX's recurrence, and its kernel of chunks, whose sums go by way of logarithms of gates."""
    rng = np.random.default_rng(22)
    key_heads, value_heads, dim = 16, 32, 128
    q, k = rng.standard_normal((2, 1, inputs, key_heads, dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((1, inputs, value_heads, dim))
    g, beta = (rng.uniform(low, 1, (1, inputs, value_heads)) for low in (0.5, 0.1))
    q, k, v, g, beta = (encode(x, kind) for x in (q, k, v, g, beta))
    state = rng.standard_normal((1, value_heads, dim, dim)).astype(np.float32)
    library = apples(mlx_kernels.gated_delta_name(kernel, kind, key_heads, value_heads))
    y, after = mlx_kernels.gated_delta(library, kernel, q, k, v, g, beta, state)

    given = Inputs(q, k, v, decode(g), decode(beta))
    in_state = 2e-6
    if kind == "bfloat":  # v - S k is rounded before it is multiplied, and y once more
        in_state = ULP["bfloat"]

    def agrees(inputs: Inputs, times: float = 1) -> bool:
        got = launch.gated_delta(state, inputs, commits=True, schedule=2)
        assert got.y is not None and got.state is not None
        return close(decode(got.y), decode(y), times * (in_state + tolerance(kind))) and close(
            got.state, after, times * in_state
        )

    assert agrees(given)
    heads = np.ascontiguousarray(k[:, :, ::-1])
    for wrong in (given._replace(g=given.g * 1.1), given._replace(k=heads)):
        assert not agrees(wrong, 2)


def test_the_metallib() -> None:
    found = metallib.kernels()
    assert len(found) > 17000
    assert found["sdpa_vector_float_64_64"].metal == "3.1"  # compiled for macOS 14
    assert metallib.bitcode("sdpa_vector_float_64_64")[:4] == b"\xde\xc0\x17\x0b"
    near = re.escape("some that contain it: sdpa_vector_float_64_64")
    with pytest.raises(BenchError, match=near):
        metallib.bitcode("sdpa_vector_float_64")


def test_without_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(macos, "MLX", tmp_path)
    metallib._container.cache_clear()
    with pytest.raises(BenchError, match="for macOS is missing: run"):
        oracle.oracle("sdpa_vector_float_64_64")
    metallib._container.cache_clear()


def test_the_emulator_has_every_builtin_that_mlx_uses() -> None:
    listed = run(NM, "-g", "--defined-only", *emulator_objects())
    defined = set(re.findall(r" (air\.\S+)$", listed, re.M))
    matrices = {name for name in air.inventory() if "simdgroup_matrix" in name}
    assert air.inventory() - matrices <= defined
    assert all(f"@{name}(" in oracle._matrix_function(f"@{name}") for name in matrices)
