"""Faults put into the shaders of the products and of attention: their tests have to notice."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from . import BenchError, launch
from . import test_attention_shaders as attention
from . import test_matmul_shaders as matmul
from .tools import SHADERS

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
MATMUL, ATTENTION, KERNELS = "verify_matmul.h", "verify_attention.h", "verify_attention.metal"


def products() -> None:
    matmul.test_products_are_the_reference("half", "half", None)


def quantised() -> None:
    matmul.test_products_are_the_reference("float", "half", (4, 64))


def widths() -> None:
    matmul.test_rows_of_a_product_have_the_bits_of_one("float", "bfloat", None)


def gathered() -> None:
    matmul.test_gathered_rows_have_the_bits_of_their_expert("float", "bfloat", None, 1)


def values() -> None:
    attention.test_attention_is_the_reference("float", (32, 32))


def sharing() -> None:
    attention.test_how_columns_are_shared_out_changes_no_bits(17)


def options(name: str) -> Callable[[], None]:
    return lambda: attention.test_every_option_is_the_reference("float", name)


# name: file, text, what stands there instead, the test
MUTANTS: dict[str, tuple[str, str, str, Callable[[], None]]] = {
    "slices are added before all are there": (MATMUL, BARRIER, "", products),
    "slices stand on each other": (
        MATMUL,
        "shared[s * columns * outputs + place]",
        "shared[s * outputs + place]",
        products,
    ),
    "another order of slices for one row": (
        MATMUL,
        "sum = add_rn(sum, shared[s * columns * outputs + place]);",
        "sum = add_rn(sum, shared[(at.rows == 1 ? 8 - s : s) * columns * outputs + place]);",
        widths,
    ),
    "a scale of another row": (MATMUL, "scale[tile][i / 2]", "scale[tile][i % 2]", quantised),
    "scale and offset change places": (
        MATMUL,
        "fma_rn(offset[tile][i / 2], sums.x[i], sum)",
        "fma_rn(sums.x[i], sum, offset[tile][i / 2])",
        quantised,
    ),
    "a block of outputs too many": (
        MATMUL,
        "at.n0 + n >= at.outputs",
        "at.n0 + n > at.outputs",
        products,
    ),
    "an odd rest of K is dropped": (MATMUL, "start < at.depth", "start + 64 <= at.depth", products),
    "a row of x for each result": (MATMUL, "at.pair / repeat", "at.pair", gathered),
    "the bias of expert 0": (MATMUL, "bias + expert_outputs", "bias", gathered),
    "keys are read before they are there": (
        ATTENTION,
        "own_thread, shared);\n      " + BARRIER + "      fetch",
        "own_thread, shared);\n      fetch",
        sharing,
    ),
    "values replace keys that are read": (
        ATTENTION,
        BARRIER + "      put<T, Dv, threads>",
        "put<T, Dv, threads>",
        sharing,
    ),
    "values are read before they are there": (
        ATTENTION,
        "    if (staged) {\n      " + BARRIER + "    } else {",
        "    if (staged) {\n      simdgroup_barrier(mem_flags::mem_threadgroup);\n    } else {",
        sharing,
    ),
    "staged keys stand closer": (
        ATTENTION,
        "put<T, D, threads>(keys_ahead, key_stride(D)",
        "put<T, D, threads>(keys_ahead, D - 8",
        sharing,
    ),
    "dims change places": (
        ATTENTION,
        "set_row(left, 0, by_dim[2 * i]);\n        set_row(left, 1, by_dim[2 * i + 1]);",
        "set_row(left, 1, by_dim[2 * i]);\n        set_row(left, 0, by_dim[2 * i + 1]);",
        values,
    ),
    "a window of one more": (
        ATTENTION,
        "position - key >= block.window",
        "position - key > block.window",
        options("window 9"),
    ),
    "all see a key too early": (
        ATTENTION,
        "key0 >= block.end - block.window",
        "key0 >= block.end - block.window - 1",
        lambda: attention.test_every_window(52),
    ),
    "all see the block's first key": (
        ATTENTION,
        "key0 + 32 <= block.length &&",
        "key0 + 31 <= block.length &&",
        options("mask"),
    ),
    "a window begins a key late": (
        ATTENTION,
        "block.length - block.window + 1",
        "block.length - block.window + 2",
        lambda: attention.test_every_window(18),
    ),
    "a row's chunks begin a key late": (
        ATTENTION,
        "position - block.window + 1 : 0",
        "position - block.window + 2 : 0",
        lambda: attention.test_every_window(18),
    ),
    "the last chunk is left out": (
        ATTENTION,
        "last_key / DFLASH_CHUNK + 1",
        "(last_key + DFLASH_CHUNK - 1) / DFLASH_CHUNK",
        lambda: attention.test_rows_at_every_edge("float", 256),
    ),
    "stripes in descending order for one row": (
        ATTENTION,
        "shared[s * 33 + lane]);",
        "shared[(block.inputs == 1 ? DFLASH_STRIPES - s : s) * 33 + lane]);",
        lambda: attention.test_many_chunks(None, "float"),
    ),
    "the mask reaches the last committed key": (
        ATTENTION,
        "key < block.length)",
        "key < block.length - 1)",
        options("mask"),
    ),
    "values that are not finite are weighted": (
        ATTENTION,
        "bad[j] = remove_nonfinite(by_dim[j]);",
        "bad[j] = 0;",
        lambda: attention.test_other_rows_do_not_reach_a_row("mask", float("nan")),
    ),
    "infinity stays infinity": (
        ATTENTION,
        "finite_or_poison(value)",
        "value",
        lambda: attention.test_infinity_in_the_history_has_one_result("float", float("inf")),
    ),
    "another batch row's length": (KERNELS, "int(at.z) / key_heads", "0", values),
    "another head's sink": (KERNELS, "head % heads", "head / heads", options("sinks")),
    "columns of a SIMD group too few": (
        KERNELS,
        "int(at.x * simdgroups + simdgroup) * 8 * tiles",
        "int(at.x * simdgroups + simdgroup) * 8",
        sharing,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new, test = MUTANTS[name]
    shutil.copytree(SHADERS, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / file).read_text()
    assert old in text, "the shader changed: change the mutant too"
    (tmp_path / file).write_text(text.replace(old, new))
    monkeypatch.setattr(launch, "SHADERS", tmp_path)
    launch.shader.cache_clear()
    try:
        with pytest.raises((AssertionError, BenchError)):
            test()
    finally:
        launch.shader.cache_clear()
