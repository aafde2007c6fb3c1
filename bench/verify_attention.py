"""Times verify_attention against MLX's attention and a plain read of the keys and values.

    python bench/verify_attention.py [--keys 8192 ...] [--rows 1 16] [--repeats 20] [--json]

16 query heads over 4 key heads, D 128, bf16 unless told otherwise. Each call has its own cache: so
many that they fill the last-level cache four times. Variants are interleaved round by round; a
figure is the median of the rounds, the spread their 10th to 90th percentile. `GB/s` counts keys and
values once. `of floor` is this line's GB/s over the floor's: on a CPU the floor is a read of the
same bytes on the same threads, on a GPU a copy that moves as many. `x one row` compares with one
row of the same operation.
"""

from __future__ import annotations

import argparse
import json
import sys

import mlx.core as mx
from timing import header, interleave, percentiles, print_header, ratios, read_or_copy, rotation

from dflash_native import ops, reference


def measure(keys: int, options: argparse.Namespace) -> list[dict[str, object]]:
    """One line for each variant over `keys` committed keys."""
    heads, key_heads, dim = options.heads, options.key_heads, options.dim
    dtype = getattr(mx, options.dtype)
    most = max(options.rows)
    capacity = -(-(keys + most) // 256) * 256
    bytes_read = 2 * key_heads * keys * dim * dtype.size
    queue = rotation(bytes_read, 2)
    caches = [
        [mx.random.normal((1, key_heads, capacity, dim)).astype(dtype) for _ in range(2)]
        for _ in range(queue)
    ]
    lengths = mx.array([keys], dtype=mx.int32)
    mx.eval(caches, lengths)
    scale = dim**-0.5
    variants = {}
    for rows in options.rows:
        q = mx.random.normal((1, heads, rows, dim)).astype(dtype)
        seen = [[x[:, :, : keys + rows] for x in cache] for cache in caches]
        mx.eval(q)
        if keys <= 8192:
            found = ops.verify_attention(q, *caches[0], lengths, scale).astype(mx.float32)
            expected = reference.verify_attention(q, *caches[0], lengths, scale).astype(mx.float32)
            assert (mx.linalg.norm(found - expected) / mx.linalg.norm(expected)).item() < 1e-2

        def ours(count, q=q):
            return [ops.verify_attention(q, *c, lengths, scale) for c in caches[:count]]

        def stock(count, q=q, rows=rows, seen=seen):
            mask = "causal" if rows > 1 else None
            attend = mx.fast.scaled_dot_product_attention
            return [attend(q, *c, scale=scale, mask=mask) for c in seen[:count]]

        variants[f"verify_attention {rows}"] = ours
        variants[f"mlx sdpa {rows}"] = stock
    variants["floor"] = read_or_copy(bytes_read, queue)
    times = interleave(variants, options.repeats, queue)
    first = times[f"verify_attention {options.rows[0]}"]
    lines = []
    for name, taken in times.items():
        low, middle, high = percentiles(taken)
        lines.append(
            {
                "operation": name,
                "keys": keys,
                "ms": middle * 1e3,
                "ms_low": low * 1e3,
                "ms_high": high * 1e3,
                "mbytes": bytes_read / 1e6,
                "gb_s": bytes_read / middle / 1e9,
                "of_floor": ratios(times["floor"], taken)[1],
                "of_one_row": ratios(taken, first),
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, nargs="+", default=[8192])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    mx.random.seed(0)
    lines = [line for keys in options.keys for line in measure(keys, options)]
    if options.json:
        json.dump({**header(), "results": lines}, sys.stdout, indent=1)
        print()
        return
    print_header()
    print(
        f"{'operation':24} {'keys':>7} {'ms':>8} {'(10..90 %)':>17} {'MB':>7} {'GB/s':>7} "
        f"{'of floor':>8} {'x one row':>9} {'(10..90 %)':>13}"
    )
    for line in lines:
        low, ratio, high = line["of_one_row"]
        print(
            f"{line['operation']:24} {line['keys']:7d} {line['ms']:8.3f} "
            f"{'({:.3f}..{:.3f})'.format(line['ms_low'], line['ms_high']):>17} "
            f"{line['mbytes']:7.1f} {line['gb_s']:7.1f} {line['of_floor']:8.2f} "
            f"{ratio:9.2f} {f'({low:.2f}..{high:.2f})':>13}"
        )


if __name__ == "__main__":
    main()
