"""The front end means what Metal means: MLX's headers through it equal Apple's compilation.

Equal to the bit, under every schedule, on inputs at odd shapes. Both run on the same emulator, so
this says nothing about built-ins; it is about the language, the conversions and the rewriting.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from . import SCHEDULES, BenchError, compile, frontend, macos, mlx_kernels, oracle, tools
from .compare import same
from .launch import decode, encode
from .runner import Library
from .tools import ToolError

pytestmark = pytest.mark.usefixtures("metallib")
CASES = Path(__file__).parent / "cases"
HEADERS = Path("mlx/backend/metal/kernels")
Run = Callable[..., Any]
MATRIX_OF = {"float": "float", "half": "half", "bfloat": "bfloat16_t"}


class Case(NamedTuple):
    """One kernel of the metallib, what it is in MLX's headers, and a call of it."""

    kernel: str
    source: str
    run: Run

    def define(self) -> str:
        return "GATED_DELTA" if "gated_delta" in self.kernel else "OTHERS"


def attention(kind: str, dims: tuple[int, int], options: str) -> Case:
    heads, key_heads, inputs, keys, capacity = 6, 2, 3, 77, 80
    rng = np.random.default_rng(0)
    q = encode(rng.standard_normal((heads, inputs, dims[0])), kind)
    k, v = (encode(rng.standard_normal((key_heads, capacity, dim)), kind) for dim in dims)
    bools = rng.uniform(size=(heads, inputs, keys)) < 0.7
    chosen: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        "bool mask": {"mask": bools},
        "added mask": {"mask": encode(rng.standard_normal(bools.shape), kind)},
        "sinks": {"sinks": encode(rng.standard_normal(heads), kind)},
        "query transposed": {"query_transposed": True},
        "mask and sinks": {"mask": bools, "sinks": encode(rng.standard_normal(heads), kind)},
    }
    name = mlx_kernels.sdpa_vector_name(kind, *dims)
    scale = dims[0] ** -0.5
    run = functools.partial(
        mlx_kernels.sdpa_vector, q=q, k=k, v=v, keys=keys, scale=scale, **chosen[options]
    )
    return Case(name, f"sdpa_vector<{MATRIX_OF[kind]}, {dims[0]}, {dims[1]}>", run)


def product(kernel: str, kind: str, group: int, bits: int, rows: int, outputs: int) -> Case:
    rng = np.random.default_rng(1)
    depth = 512 if "fast" in kernel else 9 * group
    x = encode(rng.standard_normal((rows, depth)), kind)
    weight = rng.integers(0, 2**32, (outputs, depth * bits // 32), np.uint32)
    scales, biases = (encode(rng.standard_normal((outputs, depth // group)), kind) for _ in "sb")
    operands = {"x": x, "weight": weight, "scales": scales, "biases": biases, "bits": bits}
    run: Run = functools.partial(mlx_kernels.affine_product, kernel=kernel, **operands)
    rest = "false, false, false, 4"
    if "qmm" in kernel:
        rest = f"{str(kernel.endswith('_aligned')).lower()}, false"
    function = kernel.removesuffix("_aligned")
    source = f"{function}<{MATRIX_OF[kind]}, {group}, {bits}, {rest}>"
    return Case(mlx_kernels.affine_name(kernel, kind, group, bits), source, run)


def gathered(kind: str) -> Case:
    rng = np.random.default_rng(2)
    outputs, depth, experts = 19, 192, 3
    operands = {
        "x": encode(rng.standard_normal((4, depth)), kind),
        "weight": rng.integers(0, 2**32, (experts, outputs, depth // 8), np.uint32),
        "scales": encode(rng.standard_normal((experts, outputs, depth // 64)), kind),
        "biases": encode(rng.standard_normal((experts, outputs, depth // 64)), kind),
        "rows": np.array([0, 3, 1, 3]),
        "experts": np.array([2, 0, 0, 1]),
        "bits": 4,
    }
    run = functools.partial(mlx_kernels.affine_gather_qmv, **operands)
    name = mlx_kernels.affine_name("affine_gather_qmv", kind, 64, 4)
    return Case(name, f"affine_gather_qmv<{MATRIX_OF[kind]}, 64, 4>", run)


def dense(kind: str) -> Case:
    rng = np.random.default_rng(3)
    weight, x = (encode(rng.standard_normal(shape), kind) for shape in ((37, 203), 203))
    run = functools.partial(mlx_kernels.gemv, weight=weight, x=x)
    source = f"gemv<{MATRIX_OF[kind]}, 4, 1, 1, 32, 4, 4, false, false>"
    return Case(mlx_kernels.gemv_name(kind), source, run)


def delta(kernel: str, kind: str, inputs: int, save_states: bool = False) -> Case:
    heads, dim = 16, 128
    rng = np.random.default_rng(4)
    q, k, v = rng.standard_normal((3, 1, inputs, heads, dim))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = rng.uniform(0.5, 1, (2, 1, inputs, heads))
    names = ("q", "k", "v", "g", "beta")
    operands = {n: encode(x, kind) for n, x in zip(names, (q, k, v, g, beta), strict=True)}
    state = rng.standard_normal((1, heads, dim, dim)).astype(np.float32)
    run = functools.partial(
        mlx_kernels.gated_delta, kernel=kernel, state=state, save_states=save_states, **operands
    )
    chunk = "chunk" in kernel
    function = "gated_delta_fused_chunk" if chunk else "gated_delta_seq"
    source = f"{function}<{MATRIX_OF[kind]}, 128, 128, 16, 16, {8 if chunk else 1}>"
    return Case(mlx_kernels.gated_delta_name(kernel, kind, heads, heads), source, run)


def of_rows(kernel: str, kind: str, columns: int) -> Case:
    x = encode(np.random.default_rng(5).standard_normal((3, columns)) * 3, kind)
    run = functools.partial(mlx_kernels.of_rows, kernel=kernel, x=x)
    function = "softmax_single_row" if "softmax" in kernel else "logsumexp"
    if "looped" in kernel:
        function = function.removesuffix("_single_row") + "_looped"
    return Case(mlx_kernels.rows_name(kernel, kind), f"{function}<{MATRIX_OF[kind]}>", run)


FIDELITY: dict[str, Case] = {
    **{
        f"attention, {options}": attention("bfloat", (128, 128), options)
        for options in (
            *("plain", "causal", "bool mask", "added mask", "sinks"),
            *("query transposed", "mask and sinks"),
        )
    },
    "attention, float": attention("float", (64, 64), "causal"),
    "attention, half": attention("half", (192, 128), "causal"),
    "qmv, float": product("affine_qmv", "float", 32, 8, 2, 19),
    "qmv, half": product("affine_qmv", "half", 128, 4, 2, 19),
    "qmv of 1 bit, bfloat": product("affine_qmv", "bfloat", 64, 1, 2, 19),
    "qmv fast, bfloat": product("affine_qmv_fast", "bfloat", 64, 4, 1, 24),
    "qmm, float": product("affine_qmm_t", "float", 64, 8, 5, 19),
    "qmm, half": product("affine_qmm_t", "half", 32, 4, 5, 19),
    "qmm aligned, bfloat": product("affine_qmm_t_aligned", "bfloat", 64, 4, 37, 32),
    "gather qmv, bfloat": gathered("bfloat"),
    "gemv, float": dense("float"),
    "gemv, half": dense("half"),
    "gemv, bfloat": dense("bfloat"),
    "gated delta, float": delta("seq_gated_delta", "float", 3),
    "gated delta, float, states saved": delta("seq_gated_delta", "float", 2, True),
    "gated delta, bfloat": delta("seq_gated_delta", "bfloat", 3),
    "gated delta in chunks, float": delta("gated_delta_fused_chunk", "float", 9),
    "softmax, bfloat": of_rows("block_softmax", "bfloat", 1000),
    "softmax looped, half": of_rows("looped_softmax", "half", 4099),
    "logsumexp, float": of_rows("block_logsumexp", "float", 1000),
    "logsumexp looped, bfloat": of_rows("looped_logsumexp", "bfloat", 4099),
}


def compiled(cases: Iterable[Case], *changed: Path, contract: str = "on") -> Library:
    """Their kernels by our front end; headers in the folders `changed` go before MLX's."""
    instances = {case.kernel: case.source for case in cases}
    (define,) = {case.define() for case in cases}
    only = [f"^{name}$" for name in instances]
    include = [*changed, macos.MLX / "mlx" / "include"]
    source = CASES / "mlx.metal"
    return compile(source, include, [define], instances, only, contract, relax=True)


@functools.cache
def ours(define: str) -> Library:
    return compiled([case for case in FIDELITY.values() if case.define() == define])


@functools.cache
def apples() -> Library:
    return oracle.oracle(*sorted({case.kernel for case in FIDELITY.values()}))


def results(library: Library, case: Case) -> list[np.ndarray]:
    """What the kernel writes, under every schedule."""
    found: list[np.ndarray] = []
    for schedule in SCHEDULES:
        written = case.run(library, schedule=schedule)
        found += written if isinstance(written, tuple) else [written]
    return found


def equal(library: Library, case: Case) -> bool:
    """Whether it writes what Apple's compilation writes; a fault is something else."""
    expected = results(apples(), case)
    try:
        return all(same(x, y) for x, y in zip(results(library, case), expected, strict=True))
    except ToolError:
        raise
    except BenchError:
        return False


@pytest.mark.parametrize("name", FIDELITY)
def test_headers_of_mlx_equal_apples_compilation(name: str) -> None:
    case = FIDELITY[name]
    assert equal(ours(case.define()), case)
    for x in results(apples(), case):
        values = decode(x)
        assert np.isfinite(values).all() and len(np.unique(values)) > 2


# what is changed in a header -> the case that has to differ, the header, its text, another one
HEADER_CHANGES: dict[str, tuple[str, str, str, str]] = {
    "a key is scored by the first half of it": (
        *("attention, float", "sdpa_vector.h"),
        *(
            "j < qk_per_thread; j++) {\n        score",
            "j < qk_per_thread / 2; j++) {\n        score",
        ),
    ),
    "a key too many": (
        *("attention, causal", "sdpa_vector.h"),
        *("i <= (N - int(tpg.y)", "i <= (N + 1 - int(tpg.y)"),
    ),
    "a scale that is rounded": (
        *("qmv, float", "quantized.h"),
        *("return scale * accum + sum * bias;", "return U(half(scale)) * accum + sum * bias;"),
    ),
    "terms in another order": (
        *("gated delta, float", "gated_delta_update.h"),
        *(
            "kv_mem += state[i] * k_[s_idx];",
            "kv_mem = state[i] * k_[s_idx] + kv_mem * 1.0000001f;",
        ),
    ),
    "an exponential of base 2": (
        *("logsumexp, float", "logsumexp.h"),
        *("fast::exp(ld[i] - maxval)", "fast::exp2((ld[i] - maxval) * 1.4426950f)"),
    ),
}


@pytest.mark.parametrize("what", HEADER_CHANGES)
def test_a_changed_header_differs(what: str, tmp_path: Path) -> None:
    name, header, old, new = HEADER_CHANGES[what]
    case = FIDELITY[name]
    text = (macos.MLX / "mlx" / "include" / HEADERS / header).read_text()
    assert old in text
    (tmp_path / HEADERS).mkdir(parents=True)
    (tmp_path / HEADERS / header).write_text(text.replace(old, new))
    assert not equal(compiled([case], tmp_path), case)


# what is changed in the shim -> the case that has to differ, the file, its text, another one
SHIM_CHANGES: dict[str, tuple[str, str, str, str]] = {
    "neighbours in a matrix change places": (
        *("qmm, float", "simd.h"),
        *("d.t.x = (D)fd[0];", "d.t.x = (D)fd[1];"),
    ),
    "fast functions are other ones": (
        *("softmax, bfloat", "maths.h"),
        *("MSL_F1(P, exp) ", 'float exp(float x) AIR("exp2.f32"); '),
    ),
    "a shuffle the other way": (
        *("gemv, half", "simd.h"),
        *(
            "MSL_SG2(simd_shuffle_down, T, S)",
            'T simd_shuffle_down(T, ushort) AIR("simd_shuffle_up." S);',
        ),
    ),
}


@pytest.fixture
def other_front_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shim that the front end uses instead, with a cache of its own."""
    monkeypatch.setattr(tools, "CACHE", tools.CACHE)
    tools.use_cache(tmp_path / "cache")
    monkeypatch.setattr(frontend, "SHIM", tmp_path / "shim")
    shutil.copytree(tools.SHIM, tmp_path / "shim")
    return tmp_path / "shim"


@pytest.mark.parametrize("what", SHIM_CHANGES)
def test_a_changed_shim_differs(what: str, other_front_end: Path) -> None:
    name, file, old, new = SHIM_CHANGES[what]
    case = FIDELITY[name]
    text = (other_front_end / file).read_text()
    assert old in text
    (other_front_end / file).write_text(text.replace(old, new))
    assert not equal(compiled([case]), case)


def test_other_rounding_differs(other_front_end: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of bfloat that do not round after every operation."""
    case = FIDELITY["qmv of 1 bit, bfloat"]
    flag = "-fbfloat16-excess-precision="
    flags = [x.replace(flag + "none", flag + "standard") for x in frontend.CL_FLAGS]
    assert flags != frontend.CL_FLAGS
    monkeypatch.setattr(frontend, "CL_FLAGS", flags)
    assert not equal(compiled([case]), case)


def test_other_contraction_differs() -> None:
    case = FIDELITY["attention, float"]
    assert not equal(compiled([case], contract="off"), case)
