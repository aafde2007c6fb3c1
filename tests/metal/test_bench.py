"""The bench itself: it has to find what it says it finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from . import BenchError, check, compile

CASES = Path(__file__).parent / "cases"
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


def lines(findings: list[str]) -> set[int]:
    return {int(finding.split(":")[1]) for finding in findings}


@pytest.mark.parametrize("name", ["must_fail", "must_fail_builtins"])
def test_check_reports_every_bad_line_and_no_other(name: str) -> None:
    file = CASES / f"{name}.metal"
    rows = enumerate(file.read_text().splitlines(), 1)
    bad = {n for n, row in rows if "// BAD" in row}
    found = check(file)
    assert lines(found) == bad, found


@pytest.mark.parametrize("name", ["faults", "must_pass"])
def test_check_accepts_sound_kernels(name: str) -> None:
    assert check(CASES / f"{name}.metal") == []


def test_check_tries_every_language_version(tmp_path: Path) -> None:
    file = tmp_path / "new.metal"
    file.write_text(
        HEAD + "kernel void k(device float* a [[buffer(0)]]) {\n"
        "#if __METAL_VERSION__ >= 320\n  a[0] = nonsense;\n#endif\n  a[0] = 0.0f;\n}\n"
    )
    (found,) = check(file)
    assert "new.metal:5:" in found and "Metal version 320, 400, 410" in found


def test_check_reports_a_header_and_too_much_threadgroup_memory(tmp_path: Path) -> None:
    (tmp_path / "part.h").write_text(
        "METAL_FUNC float first(float* p) {\n  return p[0];  // \u2013\n}\n", "utf-8"
    )
    file = tmp_path / "big.metal"
    file.write_text(
        HEAD + '#include "part.h"\n'
        "kernel void k(device float* a [[buffer(0)]],"
        " uint i [[thread_position_in_grid]]) {\n"
        "  threadgroup float s[8193];\n  s[i] = 1.0f;\n  a[i] = s[i];\n}\n"
    )
    found = check(file)
    assert len(found) == 3, found
    assert any("part.h:1: pointer" in f for f in found)
    assert any("part.h:2: non-ASCII" in f for f in found)
    assert any("32772 bytes of threadgroup memory" in f for f in found)


FAULTS = {
    "missing_barrier": "NaN",
    "divergent_barrier": "deadlock",
    "divergent_simd": "divergent SIMD-group operation",
    "out_of_bounds": "write out of bounds at byte 256",
    "read_out_of_bounds": "buffer 0: access out of bounds at byte 256",
    "write_to_no_buffer": "write to a buffer that is not set",
    "uninitialised": "NaN",
    "shuffle_past_edge": "outside the SIMD group",
    "write_race": "schedules disagree",
    "sum_of_a_simdgroup": "schedules disagree",
}


@pytest.mark.parametrize("kernel", FAULTS)
def test_emulator_shows_the_fault(kernel: str) -> None:
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    library = compile(CASES / "faults.metal")
    buffers = [x, np.zeros(64, np.float32)]
    try:
        runs = [r[0] for r in library.run_schedules(kernel, buffers, [64], [64], outputs=[1])]
    except BenchError as error:
        seen = str(error)
    else:
        if any(np.isnan(r).any() for r in runs):
            seen = "NaN"
        else:
            same = all(np.array_equal(r, runs[0]) for r in runs)
            seen = "nothing" if same else "schedules disagree"
    assert FAULTS[kernel] in seen


def test_contraction_changes_bits(tmp_path: Path) -> None:
    file = tmp_path / "contract.metal"
    file.write_text(
        HEAD + "METAL_FUNC float mul(float a, float b) { return a * b; }\n"
        "kernel void k(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],"
        " uint i [[thread_position_in_grid]]) {\n"
        "  y[2 * i] = x[i] * x[i] + 1.0f / 3.0f;\n"
        "  y[2 * i + 1] = mul(x[i], x[i]) + 1.0f / 3.0f;\n}\n"
    )
    x = np.random.default_rng(0).standard_normal(256).astype(np.float32)
    results = {}
    for contract in ("off", "on", "fast"):
        y = np.zeros((256, 2), np.float32)
        compile(file, contract=contract).run("k", [x, y], [256], [64])
        results[contract] = y
    once = x.astype(np.float64) ** 2 + np.float64(np.float32(1.0) / np.float32(3.0))
    twice = x * x + np.float32(1.0) / np.float32(3.0)
    assert np.array_equal(results["off"], np.stack([twice, twice], 1))
    assert np.array_equal(results["on"], np.stack([once.astype(np.float32), twice], 1))
    assert np.array_equal(results["fast"], np.stack([once, once], 1).astype(np.float32))
