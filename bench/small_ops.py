"""Times the small operations of a layer against MLX's and mlx-lm's own, in one run.

    python bench/small_ops.py [--rows 1 16] [--repeats 20] [--queue 64] [--json]

Sizes of Qwen3.5-4B, bf16 activations. Each line is checked before it is timed. Variants are
interleaved round by round; a figure is the median of the rounds, the spread their 10th to 90th
percentile. A round queues `--queue` independent calls, each with its own inputs, in one evaluation.
Bytes are the fewest that the operation must move; such sizes fit in a cache, as they do in a model,
so GB/s is mostly the price of a launch. `faster` is the time of MLX's own over this line's, round
by round. On a GPU rms_norm, swiglu and rope are MLX's own kernels, on CUDA
kv_write is, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.gated_delta import compute_g
from timing import Call, header, interleave, percentiles, print_header, ratios

from dflash_native import ops

SIDES = ("ours", "mlx")
HIDDEN, INTERMEDIATE, HEADS, KEY_HEADS, DIM, ROTATED = 2560, 9216, 16, 4, 256, 64
CHANNELS, TAPS, VALUE_HEADS, CAPACITY = 8192, 4, 32, 1280


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape).astype(mx.bfloat16)


weight, norm_weight = normal(CHANNELS, TAPS, 1), normal(HIDDEN)
A_log, dt_bias = mx.random.normal((VALUE_HEADS,)), mx.random.normal((VALUE_HEADS,))
at = mx.array([1024], dtype=mx.int32)


def stock_conv(x: mx.array, window: mx.array) -> mx.array:
    return nn.silu(mx.conv1d(mx.concatenate([window, x], axis=1), weight, groups=CHANNELS))


def stock_gates(a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
    return compute_g(A_log, a, dt_bias), mx.sigmoid(b)


OPERATIONS: dict[str, tuple[Callable, Callable, Callable]] = {
    "causal_conv1d_verify": (
        lambda T: (normal(1, T, CHANNELS), normal(1, TAPS - 1, CHANNELS)),
        lambda x, window: ops.causal_conv1d_verify(x, weight, window),
        stock_conv,
    ),
    "gated_delta_gates": (
        lambda T: (normal(1, T, VALUE_HEADS), normal(1, T, VALUE_HEADS)),
        lambda a, b: ops.gated_delta_gates(a, b, A_log, dt_bias),
        stock_gates,
    ),
    "rms_norm": (
        lambda T: (normal(1, T, HIDDEN),),
        lambda x: ops.rms_norm(x, norm_weight, 1e-6),
        lambda x: mx.fast.rms_norm(x, norm_weight, 1e-6),
    ),
    "swiglu": (
        lambda T: (normal(1, T, INTERMEDIATE), normal(1, T, INTERMEDIATE)),
        ops.swiglu,
        swiglu,
    ),
    "rope": (
        lambda T: (normal(1, HEADS, T, DIM),),
        lambda x: ops.rope(x, at, ROTATED, base=1e7),
        lambda x: mx.fast.rope(x, ROTATED, traditional=False, base=1e7, scale=1.0, offset=at),
    ),
}
"""Inputs for T rows, ours and MLX's own. kv_write is apart: it writes into an input."""


def flat(result: mx.array | tuple[mx.array, ...]) -> list[mx.array]:
    return list(result) if isinstance(result, tuple) else [result]


def functions(name: str, T: int, queue: int) -> tuple[dict[str, Call], int]:
    """Ours and MLX's own, and the bytes of a call."""
    make, *both = OPERATIONS[name]
    inputs = [make(T) for _ in range(queue)]
    mx.eval(inputs)
    found, expected = (flat(function(*inputs[0])) for function in both)
    for ours, theirs in zip(found, expected, strict=True):
        ours, theirs = ours.astype(mx.float32), theirs.astype(mx.float32)
        assert (mx.linalg.norm(ours - theirs) / mx.linalg.norm(theirs)).item() < 1e-2

    def calling(function: Callable) -> Call:
        return lambda count: [x for i in inputs[:count] for x in flat(function(*i))]

    weights = {"causal_conv1d_verify": [weight], "rms_norm": [norm_weight]}.get(name, [])
    size = sum(x.nbytes for x in (*inputs[0], *weights, *found))
    return {side: calling(function) for side, function in zip(SIDES, both, strict=True)}, size


def cache_writes(T: int, queue: int) -> tuple[dict[str, Call], int]:
    """As `functions`, for kv_write against MLX's slice_update: each into a cache that it keeps."""
    new = normal(1, KEY_HEADS, T, DIM)
    caches = {
        side: [mx.zeros((1, KEY_HEADS, CAPACITY, DIM), mx.bfloat16) for _ in range(queue)]
        for side in SIDES
    }
    mx.eval(new, caches)

    def ours(count: int) -> list[mx.array]:
        held = caches["ours"]
        for i in range(count):
            held[i] = ops.kv_write(held[i], new, at)
        return held[:count]

    def theirs(count: int) -> list[mx.array]:
        held = caches["mlx"]
        for i in range(count):
            held[i] = mx.slice_update(held[i], new, at, axes=(2,))
        return held[:count]

    assert mx.array_equal(ours(1)[0], theirs(1)[0]).item()
    return {"ours": ours, "mlx": theirs}, 2 * new.nbytes


def measure(name: str, T: int, repeats: int, queue: int) -> list[dict[str, object]]:
    """One line for ours and one for MLX's own."""
    if name == "kv_write":
        variants, size = cache_writes(T, queue)
    else:
        variants, size = functions(name, T, queue)
    times = interleave(variants, repeats, queue)
    lines = []
    for side, taken in times.items():
        low, middle, high = percentiles(taken)
        lines.append(
            {
                "operation": name,
                "side": side,
                "rows": T,
                "us": middle * 1e6,
                "us_low": low * 1e6,
                "us_high": high * 1e6,
                "kbytes": size / 1e3,
                "gb_s": size / middle / 1e9,
                "faster": ratios(times["mlx"], taken),
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*OPERATIONS, "kv_write"]
    parser.add_argument("--operations", choices=names, nargs="+", default=names)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=20, help="rounds that are timed")
    parser.add_argument("--queue", type=int, default=64, help="calls of one evaluation")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    mx.random.seed(0)
    lines = [
        line
        for name in options.operations
        for T in options.rows
        for line in measure(name, T, options.repeats, options.queue)
    ]
    if options.json:
        json.dump({**header(), "results": lines}, sys.stdout, indent=1)
        print()
        return
    print_header()
    print(
        f"{'operation':21} {'':4} {'T':>3} {'us':>8} {'(10..90 %)':>17} {'KB':>7} {'GB/s':>6} "
        f"{'faster':>7} {'(10..90 %)':>14}"
    )
    for line in lines:
        low, ratio, high = line["faster"]
        print(
            f"{line['operation']:21} {line['side']:4} {line['rows']:3d} {line['us']:8.2f} "
            f"{'({:.2f}..{:.2f})'.format(line['us_low'], line['us_high']):>17} "
            f"{line['kbytes']:7.1f} {line['gb_s']:6.2f} {ratio:7.2f} "
            f"{f'({low:.2f}..{high:.2f})':>14}"
        )


if __name__ == "__main__":
    main()
