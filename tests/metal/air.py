"""Which built-in of Apple's compiler ("air.*") a call in a shader is."""

from __future__ import annotations

import functools
import re

from .frontend import split_top
from .tools import BENCH

# MLX's kernels use these, but they compile to plain instructions: there is no symbol to look up
INLINE = set("as_type isnan isinf isfinite signbit copysign select divide any all".split())
INLINE |= {"make_uniform", "is_uniform"}
DIAGONAL_MATRIX = r"simdgroup_matrix<\w+, 8, 8>'?.* 'void \((__private )?\w+\)"

SUFFIX = {"float": "f32", "half": "f16", "bfloat": "bf16", "__bf16": "bf16", "bool": "i1"}
for _kind, _bits in (("char", 8), ("short", 16), ("int", 32), ("long", 64)):
    SUFFIX[_kind] = f"s.i{_bits}"
    SUFFIX[f"u{_kind}"] = SUFFIX[f"unsigned {_kind}"] = f"u.i{_bits}"
SPACES = {"__global": ("global", "p1"), "__local": ("local", "p3")}


@functools.cache
def inventory() -> frozenset[str]:
    """Names of the built-ins that Apple's compiler emitted for MLX's kernels."""
    rows = (BENCH / "builtins.txt").read_text().splitlines()
    return frozenset(row for row in rows if row.startswith("air."))


def _suffix(kind: str) -> str:
    """'float4' -> 'v4f32', 'uint' -> 'u.i32'."""
    m = re.match(r"(\w+?)([234])$", kind)
    if m and m.group(1) in SUFFIX:
        return re.sub(r"(\w+)$", rf"v{m.group(2)}\1", SUFFIX[m.group(1)])
    return SUFFIX.get(kind, kind.replace(" ", "_"))


def symbol(name: str, signature: str) -> str:
    """The air.* name of a function of the shim that is not declared under it."""
    parameters = signature.partition(" (")[2].rsplit(")", 1)[0]
    kinds = [
        re.sub(r"\b(__private|const|volatile)\b|[*&]", "", p).strip() for p in split_top(parameters)
    ]
    first = _suffix(kinds[0]) if kinds else ""
    found = re.findall(r"simdgroup_matrix<([\w: ]+), 8, 8>", signature)
    matrices = ["v64" + _suffix(x.split("::")[-1]) for x in found]
    space = next((SPACES[s] for s in SPACES if s in signature), ("thread", "p0"))
    matrix = "air.simdgroup_matrix_8x8"
    if name == "threadgroup_barrier":
        return "air.wg.barrier"
    if name == "simdgroup_barrier":
        return "air.simdgroup.barrier"
    if name.startswith("atomic_fetch_"):
        kind = re.search(r"(?:atomic<|_Atomic\()([\w ]+)[>)]", signature)
        operation = name.split("_")[2]
        return f"air.atomic.{space[0]}.{operation}.{_suffix(kind.group(1)) if kind else '?'}"
    if name.startswith("atomic_"):
        return f"air.{name}"
    if name == "simdgroup_multiply":
        d, a, b = matrices
        return f"{matrix}_multiply_accumulate.{d}.{a}.{b}.{d}"
    if name == "simdgroup_multiply_accumulate":
        return f"{matrix}_multiply_accumulate.{'.'.join(matrices)}"
    if name in ("simdgroup_load", "simdgroup_store"):
        element = matrices[0].removeprefix("v64")
        return f"{matrix}_{name.split('_')[1]}.{matrices[0]}.{space[1]}{element}"
    if name == "make_filled_simdgroup_matrix":
        return f"{matrix}_init_filled.{matrices[0]}.{first}"
    if name in ("max", "min", "abs") and re.search(r"f(32|16)$", first):
        return f"air.f{name}.{first}"
    if name == "simd_ballot":
        return "air.simd_ballot.i64"
    return f"air.{name}.{first}" if first else f"air.{name}"
