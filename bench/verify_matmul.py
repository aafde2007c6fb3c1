"""Times verify_matmul against MLX's product and a plain read of the weights, in one run.

    python bench/verify_matmul.py [--shapes 2560x2560 ...] [--rows 1 16] [--repeats 20] [--json]

K x N, dense bf16 and 4 bits in groups of 64, bf16 activations. Each call has its own weights: so
many that they fill the last-level cache four times. Variants are interleaved round by round; a
figure is the median of the rounds, the spread their 10th to 90th percentile. `GB/s` counts the
weights once. `x floor` is this line's time over the floor's: on a CPU a read of the same bytes on
the same threads, on a GPU a copy that moves as many. `x one row` compares with one row of the same
operation. On a CPU our weights are packed.
"""

from __future__ import annotations

import argparse
import json
import sys

import mlx.core as mx
from timing import (
    header,
    interleave,
    on_cpu,
    percentiles,
    print_header,
    ratios,
    read_or_copy,
    rotation,
)

from dflash_native import ops, reference


def measure(inputs: int, outputs: int, bits: int, options: argparse.Namespace) -> list[dict]:
    """One line for each variant of one weight; bits 16 is dense."""
    size = inputs * outputs * bits // 8
    if bits == 4:
        size += 2 * outputs * (inputs // 64) * 2
    queue = rotation(size)
    weights = []
    for _ in range(queue):
        w = (mx.random.normal((outputs, inputs)) * inputs**-0.5).astype(mx.bfloat16)
        parts = [w] if bits == 16 else list(mx.quantize(w, 64, 4))
        mx.eval(parts)
        weights.append(parts)
    packed = [[ops.pack_matmul(*w, group_size=64, bits=4)] if on_cpu else w for w in weights]
    variants = {}
    for rows in options.rows:
        x = mx.random.normal((rows, inputs)).astype(mx.bfloat16)
        mx.eval(x)

        def ours(count, x=x):
            return [ops.verify_matmul(x, *w, group_size=64, bits=4) for w in packed[:count]]

        def stock(count, x=x):
            if bits == 16:
                return [x @ w.T for (w,) in weights[:count]]
            return [mx.quantized_matmul(x, *w, group_size=64, bits=4) for w in weights[:count]]

        some = [part[:64] for part in weights[0]]
        expected = reference.verify_matmul(x, *some).astype(mx.float32)
        found = ours(1)[0][:, :64].astype(mx.float32)
        assert (mx.linalg.norm(found - expected) / mx.linalg.norm(expected)).item() < 1e-2
        variants[f"verify_matmul {rows}"] = ours
        if not (options.ours or (on_cpu and rows * size > 5e8)):  # minutes of it
            variants[f"mlx {rows}"] = stock
    variants["floor"] = read_or_copy(size, queue)
    times = interleave(variants, options.repeats, queue)
    first = times[f"verify_matmul {options.rows[0]}"]
    lines = []
    for name, taken in times.items():
        low, middle, high = percentiles(taken)
        lines.append(
            {
                "operation": name,
                "shape": f"{inputs}x{outputs}",
                "bits": bits,
                "ms": middle * 1e3,
                "ms_low": low * 1e3,
                "ms_high": high * 1e3,
                "mbytes": size / 1e6,
                "gb_s": size / middle / 1e9,
                "of_floor": ratios(taken, times["floor"])[1],
                "of_one_row": ratios(taken, first),
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["2560x2560", "2560x9216", "2560x248320"])
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--ours", action="store_true", help="leave MLX's product out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    mx.random.seed(0)
    lines = []
    for shape in options.shapes:
        inputs, outputs = map(int, shape.split("x"))
        for bits in options.bits:
            lines += measure(inputs, outputs, bits, options)
    if options.json:
        json.dump({**header(), "results": lines}, sys.stdout, indent=1)
        print()
        return
    print_header()
    print(
        f"{'operation':18} {'shape':>12} {'bits':>4} {'ms':>8} {'(10..90 %)':>17} {'MB':>7} "
        f"{'GB/s':>7} {'x floor':>8} {'x one row':>9} {'(10..90 %)':>13}"
    )
    for line in lines:
        low, ratio, high = line["of_one_row"]
        print(
            f"{line['operation']:18} {line['shape']:>12} {line['bits']:4d} {line['ms']:8.3f} "
            f"{'({:.3f}..{:.3f})'.format(line['ms_low'], line['ms_high']):>17} "
            f"{line['mbytes']:7.1f} {line['gb_s']:7.1f} {line['of_floor']:8.2f} "
            f"{ratio:9.2f} {f'({low:.2f}..{high:.2f})':>13}"
        )


if __name__ == "__main__":
    main()
