"""What runs here, on which kernels, and whether it computes what it should."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from . import ops, reference
from ._native import extension
from .tape import Tape

OPERATIONS: tuple[str, ...] = tuple(
    name
    for name in ops.__all__
    if name not in ("PackedWeight", "Tape", "pack_matmul", "verify_matmuls")
)
"""Every operation of `dflash_native.ops`; `pack_matmul` is checked by products."""

TOLERANCES = {
    mx.float32: 1e-5,  # sums of 64 products in another order
    mx.float16: 2.0**-9,  # one rounding to 11 bits, which may fall to either side
    mx.bfloat16: 2.0**-6,  # the same with 8 bits
}
"""The largest difference from the reference, over its largest value, by the dtype of a result."""

_ROWWISE = ("add_rms_norm", "rms_norm", "rms_norm_gated", "rope", "sigmoid_gate", "swiglu")
_MOVES = ("conv_window", "kv_write")
_PACKAGES = ("dflash-native", "mlx", "mlx-lm", "numpy", "transformers", "typer", "rich")
_VARIABLES = ("DFLASH_NATIVE_ISA", "DFLASH_NATIVE_NUM_THREADS", "DFLASH_NATIVE_TILES")


_Recurrence = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]


@dataclass(frozen=True)
class Check:
    """One comparison of the self-test."""

    operation: str
    """Of `dflash_native.ops`, or what several of them promise together."""
    dtype: str
    """Of the activations."""
    error: float | None
    """Largest difference over the largest expected value; None where there is no such number."""
    tolerance: float
    """The largest error that passes; 0 asks for the same bits."""
    detail: str = ""
    """Why `error` is None."""

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the tolerance."""
        return self.error is not None and self.error <= self.tolerance


def backend() -> str:
    """Where MLX's default stream runs: "cpu", "metal" or "cuda"."""
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def device_name() -> str:
    """The name that MLX gives to the default device."""
    return str(mx.device_info(mx.default_device()).get("device_name", "unknown"))


def loaded_libraries(stem: str) -> list[str]:
    """Paths of the shared libraries in this process whose file name starts with `stem`.

    Read from the process itself (`/proc/self/maps` on Linux, dyld's image list on macOS). More than
    one libmlx means that two copies of MLX share the process.
    """
    images = _dyld_images() if sys.platform == "darwin" else _mapped_files()
    return sorted({path for path in images if Path(path).name.startswith(stem)})


def versions() -> dict[str, str]:
    """Installed versions of Python, the system and the packages that matter here."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    return found


def kernels() -> dict[str, str]:
    """For each operation, and for a model's products and attention, what runs it on the default
    device.
    """
    where = backend()
    shaders = f"shader source {extension.shader_hash()}"
    if where == "cpu":
        isa, threads = extension.cpu_isa(), extension.cpu_threads()
        general = f"native C++, {isa}, up to {threads} thread{'s' * (threads > 1)}"
        found = dict.fromkeys(OPERATIONS, general)
        found |= dict.fromkeys(_MOVES, "native C++, memory copies on one thread")
    elif where == "metal":
        source = extension.metal_kernel_source()
        general = (
            f"Metal, metallib {source}"
            if source.endswith(".metallib")
            else f"Metal, {shaders}, {source}"
        )
        found = dict.fromkeys(OPERATIONS, general)
    else:
        found = dict.fromkeys(OPERATIONS, f"CUDA, {shaders} compiled by NVRTC on first use")
        found["kv_write"] = "CUDA, MLX's slice_update"
    if where != "cpu":
        found |= dict.fromkeys(_ROWWISE, f"MLX's own kernels ({where})")
    prompts = "" if where == "cpu" else "for prompts and "
    stock = f"{prompts}with exact=False MLX's"
    return found | {
        "attention": f"verify_attention; {stock} scaled_dot_product_attention",
        "matmul": f"verify_matmul; {stock} matmul and quantized_matmul",
    }


def packed_weights() -> tuple[int, int]:
    """Bytes of the demo pair's weights, and of those that a round packs for the CPU beside them."""
    from .hub import load_demo
    from .session import Session
    from .targets import Target

    flatten = cast(Callable[[Any], list[tuple[str, mx.array]]], tree_flatten)
    model, _, drafter = load_demo(None)
    target = Target(model)
    with Session(target, drafter) as session:
        session.prefill([1, 2])
        session.round()
    trees = (model.parameters(), drafter.model.parameters())
    weights = sum(array.nbytes for tree in trees for _, array in flatten(tree))
    return weights, target.packed_nbytes + drafter.packed_nbytes


def build_info() -> dict[str, Any]:
    """Which backend, which kernels and which libmlx: what `dflash_native.__build__` holds.

    Keys: backend, device, libmlx (the file this process has loaded, or "not found"), extension,
    built_for_mlx, built_with_nanobind, shader_hash, kernels (by operation), environment (of our
    variables, those that are set) and versions. Raises ValueError where one of those variables has
    a value that this machine cannot honour.
    """
    return {
        "backend": backend(),
        "device": device_name(),
        "libmlx": ", ".join(loaded_libraries("libmlx.")) or "not found",
        "extension": str(extension.__file__),
        "built_for_mlx": extension.MLX_VERSION,
        "built_with_nanobind": extension.NANOBIND_VERSION,
        "shader_hash": extension.shader_hash(),
        "kernels": kernels(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "versions": versions(),
    }


def self_test() -> Iterator[Check]:
    """Compare every operation with its reference on small random inputs, in three dtypes.

    Runs on the default device. Two more checks for each dtype ask for equal bits: "rollback", that
    a block's outputs and its tape, replayed to every length, are those of single steps; "width",
    that the products of seven rows are those of one, from packed weights, too, on the CPU. Nothing
    is raised: an operation that fails is a `Check` that did not pass.
    """
    for dtype in TOLERANCES:
        sample = _Sample(dtype)
        name = str(dtype).removeprefix("mlx.core.")
        for operation in OPERATIONS:
            yield _guarded(operation, name, partial(_compare, operation, sample))
        yield _guarded("rollback", name, partial(_rollback, sample))
        yield _guarded("width", name, partial(_width, sample))


class _Sample:
    """Random inputs of every operation: B 2, T 7, Hk 2, Hv 4, Dk 64, Dv 24, C 40, K 4; products
    from 64 to 40, with 3 experts."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self._keys = iter(mx.random.split(mx.random.key(7), 32))
        self.inputs = 7
        q, k = (self._normal(2, 7, 2, 64) for _ in range(2))
        q, k = (x * mx.rsqrt((x * x).sum(-1, keepdims=True)) for x in (q, k))
        v = self._normal(2, 7, 4, 24)
        self.q, self.k, self.v = (x.astype(dtype) for x in (q, k, v))
        self.a, self.b = (self._normal(2, 7, 4).astype(dtype) for _ in range(2))
        self.A_log, self.dt_bias = self._normal(4), self._normal(4)
        self.g, self.beta = reference.gated_delta_gates(self.a, self.b, self.A_log, self.dt_bias)
        self.state = self._normal(2, 4, 24, 64)
        self.tape = Tape(self.g, self.k, self._normal(2, 7, 4, 24))
        self.keep = mx.array([2, 5], dtype=mx.int32)
        self.x = self._normal(2, 7, 40).astype(dtype)
        self.window = self._normal(2, 3, 40).astype(dtype)
        self.weight = self._normal(40, 4).astype(dtype)
        self.cache = self._normal(2, 3, 16, 32).astype(dtype)
        self.new = self._normal(2, 3, 7, 32).astype(dtype)
        self.lengths = mx.array([9, 4], dtype=mx.int32)
        self.queries = self._normal(2, 6, 7, 32).astype(dtype)
        self.scales = self._normal(40).astype(dtype)
        self.rows = self._normal(7, 64).astype(dtype)
        self.experts = self._normal(3, 40, 64).astype(dtype)
        self.affine = mx.quantize(self.experts[0])
        self.bias = self._normal(40).astype(dtype)
        self.indices = mx.array([[0, 2], [1, 1], [2, 0], [0, 1], [2, 2], [1, 0], [0, 0]])

    def _normal(self, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(self._keys))

    @property
    def recurrence(self) -> _Recurrence:
        return self.q, self.k, self.v, self.g, self.beta


def _verify(m: Any, s: _Sample) -> tuple[mx.array, ...]:
    y, tape, checkpoint = m.gated_delta_verify(*s.recurrence, s.state, s.tape, s.keep)
    return y, tape.delta, checkpoint


def _products(m: Any, s: _Sample) -> tuple[mx.array, ...]:
    dense = m.verify_matmul(s.rows, s.experts[0], bias=s.bias)
    return dense, m.verify_matmul(s.rows, *s.affine, bias=s.bias)


_CALLS: dict[str, Callable[[Any, _Sample], Sequence[mx.array]]] = {
    "add_rms_norm": lambda m, s: m.add_rms_norm(s.x, s.x[::-1], s.scales, 1e-6),
    "causal_conv1d_verify": lambda m, s: [m.causal_conv1d_verify(s.x, s.weight, s.window)],
    "conv_window": lambda m, s: [m.conv_window(s.window, s.x, s.keep)],
    "gated_delta_gates": lambda m, s: m.gated_delta_gates(s.a, s.b, s.A_log, s.dt_bias),
    "gated_delta_replay": lambda m, s: [m.gated_delta_replay(s.state, s.tape, s.keep)],
    "gated_delta_step": lambda m, s: m.gated_delta_step(*s.recurrence, s.state),
    "gated_delta_verify": _verify,
    "kv_write": lambda m, s: [m.kv_write(s.cache, s.new, s.lengths)],
    "rms_norm": lambda m, s: [m.rms_norm(s.x, s.scales, 1e-6)],
    "rms_norm_gated": lambda m, s: [m.rms_norm_gated(s.x, s.x[::-1], s.scales, 1e-6)],
    "rope": lambda m, s: [m.rope(s.queries, s.lengths, 24, base=10000.0)],
    "sigmoid_gate": lambda m, s: [m.sigmoid_gate(s.x, s.x[::-1])],
    "swiglu": lambda m, s: [m.swiglu(s.x, s.x[::-1])],
    "verify_attention": lambda m, s: [
        m.verify_attention(s.queries, s.cache, s.cache, s.lengths, 32**-0.5)
    ],
    "verify_gather_matmul": lambda m, s: [
        m.verify_gather_matmul(s.rows[:, None], s.experts, s.indices)
    ],
    "verify_matmul": _products,
}
"""One call of each operation, for `ops` and `reference` alike."""


def _compare(operation: str, sample: _Sample) -> tuple[float, float]:
    """The error and the tolerance of the result that comes nearest to failing."""
    call = _CALLS[operation]
    pairs = zip(call(ops, sample), call(reference, sample), strict=True)
    found = []
    for got, expected in pairs:
        tolerance = 0.0 if operation in _MOVES else TOLERANCES[expected.dtype]
        found.append((_error(got, expected), tolerance))
    return max(found, key=lambda pair: pair[0] / (pair[1] or 1e-30))


def _rollback(sample: _Sample) -> tuple[float, float]:
    """A tape replayed to each length against the states, and outputs, of single steps."""
    state, worst = sample.state, 0.0
    block, tape, _ = ops.gated_delta_verify(*sample.recurrence, state)
    for count in range(sample.inputs + 1):
        worst = max(worst, _error(ops.gated_delta_replay(sample.state, tape, [count] * 2), state))
        if count < sample.inputs:
            at = slice(count, count + 1)
            q, k, v, g, beta = (x[:, at] for x in sample.recurrence)
            y, state = ops.gated_delta_step(q, k, v, g, beta, state)
            worst = max(worst, _error(block[:, at], y))
    return worst, 0.0


def _width(sample: _Sample) -> tuple[float, float]:
    """Products of all rows, from packed weights where the CPU runs, against those of one."""
    worst = 0.0
    for weight in (sample.experts[0],), sample.affine:
        alone = [ops.verify_matmul(row[None], *weight) for row in sample.rows]
        together = [ops.verify_matmul(sample.rows, *weight)]
        if backend() == "cpu":
            together.append(ops.verify_matmul(sample.rows, ops.pack_matmul(*weight)))
        worst = max(worst, *(_error(each, mx.concatenate(alone)) for each in together))
    return worst, 0.0


def _error(got: mx.array, expected: mx.array) -> float:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise ValueError(
            f"expected {expected.shape} {expected.dtype} but got {got.shape} {got.dtype}"
        )
    got, expected = got.astype(mx.float32), expected.astype(mx.float32)
    if not mx.all(mx.isfinite(got)).item():
        raise ValueError("the result is not finite")
    return cast(float, (mx.abs(got - expected).max() / mx.abs(expected).max()).item())


def _guarded(operation: str, dtype: str, run: Callable[[], tuple[float, float]]) -> Check:
    try:
        error, tolerance = run()
    except Exception as problem:  # a kernel that does not compile raises whatever its compiler does
        lines = str(problem).strip().splitlines() or [type(problem).__name__]
        return Check(operation, dtype, None, 0.0, lines[0])
    return Check(operation, dtype, error, tolerance)


def _mapped_files() -> list[str]:
    """Files mapped into this process, on Linux; none where there is no /proc."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    fields = (line.split(maxsplit=5) for line in lines)
    return [parts[5].removesuffix(" (deleted)") for parts in fields if len(parts) == 6]


def _dyld_images() -> list[str]:
    """Images that dyld has loaded into this process, on macOS."""
    dyld = ctypes.CDLL(None)
    dyld._dyld_image_count.restype = ctypes.c_uint32
    dyld._dyld_get_image_name.restype = ctypes.c_char_p
    dyld._dyld_get_image_name.argtypes = [ctypes.c_uint32]
    names = (dyld._dyld_get_image_name(at) for at in range(dyld._dyld_image_count()))
    return [os.fsdecode(name) for name in names if name]
