"""Times gated_delta_verify against mlx-lm's path and a plain copy, in one run.

    python bench/gated_delta.py [--inputs 1 16] [--repeats 50] [--json]

For Hk 16, Hv 32, Dk = Dv = 128, bf16 activations, fp32 state. Each line is checked against
`dflash_native.reference` before it is timed. Variants are interleaved round by round; a figure is
the median of the rounds, the spread their 10th to 90th percentile. A round queues `--queue`
independent calls in one evaluation, so that launching is not what is measured; `launch` is one call
by itself.

Bytes are the fewest that the operation must move: each input read once, each output written once.
`copy` moves the same bytes: it reads and writes half of them. `faster` compares single calls:
mlx-lm's time over this line's, round by round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops
from timing import Call, header, percentiles, print_header, ratios, seconds

from dflash_native import ops, reference

B, HK, HV, DK, DV = 1, 16, 32, 128, 128
SHAPES = {"B": B, "Hk": HK, "Hv": HV, "Dk": DK, "Dv": DV, "dtype": "bfloat16"}


def make_inputs(T: int) -> tuple[list[mx.array], mx.array]:
    """q, k, v, g, beta of T inputs, and a state."""
    k, q = mx.random.normal((B, T, HK, DK)), mx.random.normal((B, T, HK, DK))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    q = q / mx.linalg.norm(q, axis=-1, keepdims=True) * DK**-0.5
    v = mx.random.normal((B, T, HV, DV))
    g, beta = mx.random.uniform(0.7, 1, (B, T, HV)), mx.random.uniform(0, 1, (B, T, HV))
    inputs = [x.astype(mx.bfloat16) for x in (q, k, v)] + [g, beta]
    state = mx.random.normal((B, HV, DV, DK)) * 0.1
    mx.eval(inputs, state)
    return inputs, state


def measure(T: int, repeats: int, queue: int) -> list[dict[str, object]]:
    """One line for each variant at T inputs."""
    sets = [make_inputs(T) for _ in range(queue)]  # rotated: more state than a cache holds
    tapes = [ops.gated_delta_verify(*inputs, state)[1] for inputs, state in sets]
    mx.eval(tapes)
    (inputs, state), tape = sets[0], tapes[0]
    expected = reference.gated_delta_verify(*inputs, state, tape, mx.array([T]))
    y, new_tape, checkpoint = ops.gated_delta_verify(*inputs, state, tape, [T])
    for ours, theirs, limit in (
        (y.astype(mx.float32), expected[0].astype(mx.float32), 6e-3),
        (new_tape.delta, expected[1].delta, 2e-6),
        (checkpoint, expected[2], 2e-6),
    ):
        assert (mx.linalg.norm(ours - theirs) / mx.linalg.norm(theirs)).item() < limit

    stock = gated_delta_kernel if mx.metal.is_available() else gated_delta_ops
    read = sum(x.nbytes for x in inputs) + state.nbytes
    written = inputs[2].nbytes + tape.delta.nbytes
    folded = tape.g.nbytes + tape.k.nbytes + tape.delta.nbytes
    keep = mx.array([T])
    mx.eval(keep)
    verify_bytes, replay_bytes = read + written, read + written + folded + state.nbytes
    blanks = [mx.random.normal((replay_bytes // 8,)) for _ in range(queue)]
    mx.eval(blanks)

    def verify(n: int) -> list[mx.array]:
        outs = [ops.gated_delta_verify(*i, s) for i, s in sets[:n]]
        return [x for y, t, _ in outs for x in (y, t.delta)]

    def verify_replay(n: int) -> list[mx.array]:
        zipped = zip(sets[:n], tapes[:n], strict=True)
        outs = [ops.gated_delta_verify(*i, s, t, keep) for (i, s), t in zipped]
        return [x for y, t, c in outs for x in (y, t.delta, c)]

    def step(n: int) -> list[mx.array]:
        return [x for i, s in sets[:n] for x in ops.gated_delta_step(*i, s)]

    def mlx_lm(n: int) -> list[mx.array]:
        return [x for i, s in sets[:n] for x in stock(*i, s)]

    def copy(n: int) -> list[mx.array]:
        return [x + 0 for x in blanks[:n]]

    variants: dict[str, tuple[Call, int]] = {
        "gated_delta_verify": (verify, verify_bytes),
        "gated_delta_verify + replay": (verify_replay, replay_bytes),
        "gated_delta_step": (step, read + inputs[2].nbytes + state.nbytes),
        f"mlx-lm {stock.__name__}": (mlx_lm, read + inputs[2].nbytes + state.nbytes),
        "copy": (copy, replay_bytes),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    launches: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(repeats + 2):
        for name, (call, _) in variants.items():
            slow = name.startswith("mlx-lm")
            count = 1 if slow else queue
            took, alone = seconds(call, count), seconds(call, 1)
            if round_ >= 2:  # two rounds to warm up
                times[name].append(took)
                launches[name].append(alone)
    lines = []
    stock_alone = launches[f"mlx-lm {stock.__name__}"]
    for name, (_, count) in variants.items():
        low, middle, high = percentiles(times[name])
        ratio_low, ratio, ratio_high = ratios(stock_alone, launches[name])
        lines.append(
            {
                "operation": name,
                "inputs": T,
                "ms": middle * 1e3,
                "ms_low": low * 1e3,
                "ms_high": high * 1e3,
                "launch_ms": statistics.median(launches[name]) * 1e3,
                "mbytes": count / 1e6,
                "gb_s": count / middle / 1e9,
                "ratio": ratio,
                "ratio_low": ratio_low,
                "ratio_high": ratio_high,
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, nargs="+", default=[1, 16], help="T of the calls")
    parser.add_argument("--repeats", type=int, default=20, help="rounds that are timed")
    parser.add_argument("--queue", type=int, default=16, help="independent calls of one evaluation")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    mx.random.seed(0)
    lines = [line for T in options.inputs for line in measure(T, options.repeats, options.queue)]
    if options.json:
        json.dump({**header(shapes=SHAPES), "results": lines}, sys.stdout, indent=1)
        print()
        return
    print_header(shapes=SHAPES)
    print(
        f"{'operation':27} {'T':>3} {'ms':>7} {'(10..90 %)':>15} {'MB':>6} {'GB/s':>6} "
        f"{'one call':>9} {'faster':>7} {'(10..90 %)':>13}"
    )
    for line in lines:
        spread = f"({line['ms_low']:.3f}..{line['ms_high']:.3f})"
        faster = f"({line['ratio_low']:.1f}..{line['ratio_high']:.1f})"
        print(
            f"{line['operation']:27} {line['inputs']:3} {line['ms']:7.3f} {spread:>15} "
            f"{line['mbytes']:6.2f} {line['gb_s']:6.1f} {line['launch_ms']:9.3f} "
            f"{line['ratio']:7.1f} {faster:>13}"
        )


if __name__ == "__main__":
    main()
