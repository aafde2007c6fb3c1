"""`python -m bench kernels`: every operation against its reference, its limits and its rivals."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from .cases import (
    BASELINE_TOLERANCE,
    OPERATIONS,
    Case,
    Inputs,
    Point,
    Variant,
    WrongResult,
)
from .machine import better, limits
from .shapes import SHAPES, config_of
from .timing import Call, Progress, interleave, percentiles, ratios, rotation, seconds

FULL = {
    "shape": "qwen3.5-4b",
    "rows": [1, 4, 16],
    "batch": [1],
    "context": [512, 8192],
    "dtypes": ["bfloat16"],
    "bits": [16, 4],
    "repeats": 20,
    "seconds": 10.0,
}
QUICK = {**FULL, "shape": "tiny", "rows": [4], "context": [64], "repeats": 3, "seconds": 1.0}
LONGEST = 0.25
"""Seconds that one variant's queue may take in a round: a slow one queues fewer calls."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--rows", type=int, nargs="+", help="T of a call")
    parser.add_argument("--batch", type=int, nargs="+")
    parser.add_argument("--context", type=int, nargs="+", help="committed keys, of attention")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--bits", type=int, nargs="+", choices=[16, 8, 4], help="of weights")
    parser.add_argument("--repeats", type=int, help="rounds that are timed")
    parser.add_argument("--seconds", type=float, help="most for a case, three rounds in any case")
    parser.add_argument("--ours", action="store_true", help="leave the baselines out")


def points(name: str, options: argparse.Namespace) -> Iterator[Point]:
    """Where an operation is timed: what it does not depend on is not varied."""
    varies = OPERATIONS[name].varies
    config = SimpleNamespace(**config_of(options.shape))
    contexts = options.context if "context" in varies else options.context[:1]
    bits = options.bits if "bits" in varies else [16]
    grid = itertools.product(options.rows, options.batch, contexts, options.dtypes, bits)
    for rows, batch, context, dtype, size in grid:
        yield Point(config, rows, batch, context, dtype, size)


def queued(variant: Variant, sets: list[Inputs], hands_on: bool) -> Call:
    """Calls of a variant, each with its own inputs."""

    def call(count: int) -> list[mx.array]:
        found: list[mx.array] = []
        for at in range(count):
            results = variant.function(*sets[at])
            if hands_on:
                sets[at] = (results[0], *sets[at][1:])
            found.extend(results)
        return found

    return call


def own_memory(variant: Variant, inputs: Inputs) -> Inputs:
    """The inputs once more, elsewhere in memory: copied, or as the variant prepares them."""
    if variant.prepare is not None:
        return variant.prepare(inputs)
    return tuple(x + 0 if isinstance(x, mx.array) else x for x in inputs)


def measure(case: Case, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each variant, ours first. Raises WrongResult before anything is timed."""
    inputs = case.make()
    mx.eval(inputs)
    errors = case.check(inputs)
    count = rotation(sum(x.nbytes for x in inputs if isinstance(x, mx.array)))
    count = min(count, 16) if options.quick else count
    calls: dict[str, Call] = {}
    rows: dict[str, dict[str, Any]] = {}
    for variant in case.variants[: 1 if options.ours else None]:
        error = errors[variant.name]
        row: dict[str, Any] = {"variant": variant.name, "error": None}
        rows[variant.name] = row
        if isinstance(error, str):
            row["why"] = error
        elif error > BASELINE_TOLERANCE:
            row["why"] = f"its results are {error:.1e} away from the reference's"
        else:
            row["error"] = error
            sets = [own_memory(variant, inputs) for _ in range(count)]
            mx.eval([x for each in sets for x in each if isinstance(x, mx.array)])
            calls[variant.name] = queued(variant, sets, case.hands_on)
    queue = {
        name: max(1, min(count, int(LONGEST / max(seconds(call, 1), 1e-7))))
        for name, call in calls.items()
    }
    times = interleave(calls, options.repeats, queue, options.seconds)
    alone = interleave(calls, min(5, options.repeats), 1, options.seconds / 2)
    for name, row in rows.items():
        if name in times:
            row |= figures(case, times[name], alone[name])
            row |= {"queue": queue[name], "times_ours": ratios(times[name], times["ours"])}
        yield row


def figures(case: Case, times: list[float], alone: list[float]) -> dict[str, Any]:
    """Of a variant: microseconds of a call among many, the cost of one alone, rates."""
    low, middle, high = percentiles(times)
    single = percentiles(alone)[1]
    return {
        "us": middle * 1e6,
        "us_low": low * 1e6,
        "us_high": high * 1e6,
        "alone_us": single * 1e6,
        "overhead_us": (single - middle) * 1e6,
        "bytes": case.bytes,
        "gb_s": case.bytes / middle / 1e9,
        "flops": case.flops,
        "gflop_s": case.flops / middle / 1e9,
    }


def shares(row: dict[str, Any], best: dict[str, Any]) -> dict[str, Any]:
    """What of the machine's limits a row reaches; `of_limit` is of the one that binds."""
    peak = best["matmul_gflop_s"][row["dtype"]]
    by_memory, by_arithmetic = row["gb_s"] / best["copy_gb_s"], row["gflop_s"] / peak
    return {
        "of_copy": by_memory,
        "of_peak": by_arithmetic,
        "of_limit": max(by_memory, by_arithmetic),
        "bound": "memory" if by_memory >= by_arithmetic else "arithmetic",
    }


def run(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The limits of the machine and a row for each variant of each case."""
    mx.random.seed(0)
    progress("limits of the machine")
    best = limits(options.dtypes, options.quick)
    results, failures = [], []
    for name in options.operations:
        for point in points(name, options):
            for case in OPERATIONS[name].cases(point):
                at = {
                    "operation": case.operation,
                    "shape": case.shape,
                    "rows": point.rows,
                    "batch": point.batch,
                    "dtype": point.dtype,
                    "bits": point.bits if "bits" in OPERATIONS[name].varies else None,
                    "context": point.context if "context" in OPERATIONS[name].varies else None,
                }
                progress(f"{case.operation} {case.shape} T {point.rows} {point.dtype}")
                try:
                    results += [{**at, **row} for row in measure(case, options)]
                except WrongResult as wrong:
                    failures.append(str(wrong))
                    results.append({**at, "variant": "ours", "error": None, "why": str(wrong)})
                mx.clear_cache()
    progress("limits of the machine, again")
    best = better(best, limits(options.dtypes, options.quick))
    results = [row | (shares(row, best) if "us" in row else {}) for row in results]
    return {"limits": best, "results": results, "failures": failures}


def text(document: dict[str, Any]) -> Iterator[str]:
    """The table."""
    best = document["limits"]
    peaks = ", ".join(f"{k} {v:.0f}" for k, v in best["matmul_gflop_s"].items())
    yield (
        f"copy {best['copy_gb_s']:.1f} GB/s; matmul, GFLOP/s: {peaks}; a launch "
        f"{best['launch_us']:.1f} us among many, {best['evaluation_us']:.1f} us alone"
    )
    yield (
        f"{'operation':27} {'shape':32} {'T':>3} {'B':>2} {'ctx':>6} {'bits':>4} {'variant':10} "
        f"{'us':>9} {'(10..90 %)':>19} {'alone':>8} {'GB/s':>7} {'GFLOP/s':>8} {'limit':>6} "
        f"{'x ours':>7}"
    )
    for row in document["results"]:
        dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[row["dtype"]]
        bits = row["bits"] if row["bits"] in (4, 8) else dtype
        start = (
            f"{row['operation']:27} {row['shape']:32} {row['rows']:3d} {row['batch']:2d} "
            f"{row['context'] or '':>6} {bits:>4} {row['variant']:10}"
        )
        if "us" not in row:
            yield f"{start} {row['why']}"
            continue
        spread = f"({row['us_low']:.1f}..{row['us_high']:.1f})"
        yield (
            f"{start} {row['us']:9.1f} {spread:>19} {row['alone_us']:8.1f} {row['gb_s']:7.2f} "
            f"{row['gflop_s']:8.1f} {row['of_limit']:6.1%} {row['times_ours'][1]:7.2f}"
        )
