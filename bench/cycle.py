"""`python -m bench cycle`: what a round costs, part by part, by context and width."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx

from dflash_native import Cache, Target
from dflash_native.drafters import DFlashDrafter

from . import forwards
from .machine import limits
from .rounds import Rounds, check
from .shapes import SHAPES, config_of, make_drafter, make_model
from .timing import Progress, percentiles, seconds

FULL = {
    "shape": "qwen3.5-4b",
    "bits": 16,
    "dtype": "bfloat16",
    "context": [512, 2048, 8192, 32768],
    "widths": [1, 2, 3, 4, 6, 8, 12, 16, 24, 32],
    "repeats": 12,
    "seconds": 30.0,
}
QUICK = {**FULL, "shape": "tiny", "context": [64], "widths": [1, 2, 4], "repeats": 3}
FRESH = 16384
"""Contexts up to this one are set up anew for each repeat; a longer one grows by its rounds."""
CHANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""That a draft is accepted if those before it are, in the expected curves."""
PARTS = ("draft", "verify", "host", "rollback", "replay")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--bits", type=int, choices=[16, 8, 4], help="16: not quantised")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--context", type=int, nargs="+", help="committed inputs, up to 131072")
    parser.add_argument("--widths", type=int, nargs="+", help="inputs of a verify")
    parser.add_argument("--layers", type=int, help="cut the target to so many")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--seconds", type=float, help="most for each context's forwards")
    parser.add_argument(
        "--forwards",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="of the target alone",
    )


def measure_rounds(
    target: Target, drafters: dict[int, DFlashDrafter], source: Cache, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each width: the round, its parts and the plain step, widths taken in turn."""
    context = source.lengths[0]
    widths = [width for width in options.widths if width > 1]
    none: dict[int, list[float]] = {width: [] for width in widths}
    every: dict[int, list[float]] = {width: [] for width in widths}
    parts: dict[int, list[dict[str, float]]] = {width: [] for width in widths}
    plain: list[float] = []
    step = forwards.ours(target, mx.array([[1]], dtype=mx.int32), source)
    rounds: dict[int, Rounds] = {}
    for repeat in range(options.repeats + 1):  # the first pays for what is made on first use
        if repeat == 0 or context <= FRESH:
            rounds = {block: Rounds(target, each, source) for block, each in drafters.items()}
            for each in rounds.values():
                each.fill_draft()
        plain.append(seconds(step, forwards.QUEUE))
        for width in widths:
            by = rounds[block_of(width, drafters)]
            none[width].append(by.timed(width, 0))
            every[width].append(by.timed(width, width - 1))
            parts[width].append(by.parts(width, 0))
    found = []
    for width in widths:
        low, middle, high = percentiles(none[width][1:])
        row = {
            "context": context,
            "width": width,
            "draft_block": block_of(width, drafters),
            "plain_ms": percentiles(plain[1:])[1] * 1e3,
            "round_ms": middle * 1e3,
            "round_ms_low": low * 1e3,
            "round_ms_high": high * 1e3,
            "round_ms_all_accepted": percentiles(every[width][1:])[1] * 1e3,
        }
        row["plain_steps"] = row["round_ms"] / row["plain_ms"]
        for part in PARTS:
            row[f"{part}_ms"] = percentiles([each[part] for each in parts[width][1:]])[1] * 1e3
        found.append(row)
    return found


def block_of(width: int, drafters: dict[int, DFlashDrafter]) -> int:
    """The smallest block that drafts enough for a verify of `width`."""
    return min(block for block in drafters if block >= width)


def expected(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Speed-ups over plain steps if drafts were accepted as forced: no text was generated.

    The time of a round with some drafts accepted lies between those with none and all of them.
    """
    none, every, width = row["round_ms"], row["round_ms_all_accepted"], row["width"]
    for accepted in range(width):
        share = accepted / (width - 1)
        ms = none + share * (every - none)
        yield {
            "context": row["context"],
            "width": width,
            "accepted": accepted,
            "speedup": (accepted + 1) * row["plain_ms"] / ms,
        }


def at_chance(row: dict[str, Any], chance: float) -> float:
    """The speed-up where each draft is accepted with this chance if those before it are."""
    tokens = sum(chance**i for i in range(row["width"]))
    return tokens * row["plain_ms"] / row["round_ms"]


def run(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Forwards, rounds and expected speed-ups at each context."""
    mx.random.seed(0)
    options.widths = sorted({1, *options.widths})
    dtype = getattr(mx, options.dtype)
    best = limits([options.dtype], options.quick)
    progress(f"a random model of {options.shape}")
    model = make_model(options.shape, options.bits, dtype, options.layers)
    own = make_drafter(
        options.shape, mx.float32 if options.dtype == "float16" else dtype, options.layers
    )
    most, largest = max(options.widths), own.config.block_size
    drafters = {largest: own}
    if most > largest:
        drafters[most] = DFlashDrafter(replace(own.config, block_size=most), own.model)
    targets = {"exact": Target(model), "stock": Target(model, exact=False)}
    progress("rounds by hand against a session's")
    check(targets["exact"], own, min(most, largest))
    found: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("forwards", "one_more_row", "rounds", "expected", "chances")
    }
    for context in options.context:
        spare = 3 * (options.repeats + 2) * sum(options.widths) if context > FRESH else 8 * most
        source = forwards.filled(targets["exact"], context, context + spare + 2 * most)
        if options.forwards:
            progress(f"forwards after {context} inputs")
            rows, slopes = forwards.measure(
                targets, source, options.widths, options.repeats, options.seconds, best["copy_gb_s"]
            )
            found["forwards"] += rows
            found["one_more_row"] += slopes
        progress(f"rounds after {context} inputs")
        rows = measure_rounds(targets["exact"], drafters, source, options)
        found["rounds"] += rows
        for row in rows:
            found["expected"] += expected(row)
            found["chances"] += [
                {
                    "context": context,
                    "width": row["width"],
                    "chance": chance,
                    "speedup": at_chance(row, chance),
                }
                for chance in CHANCES
            ]
        del source
        gc.collect()
        mx.clear_cache()
    return {
        "limits": best,
        "source": SHAPES[options.shape].source,
        "layers": config_of(options.shape, options.layers)["num_hidden_layers"],
        "layers_published": config_of(options.shape)["num_hidden_layers"],
        "peak_mbytes": mx.get_peak_memory() / 1e6,
        **found,
    }


def text(document: dict[str, Any]) -> Iterator[str]:
    """Tables of forwards and rounds; the best expected speed-ups."""
    settings = document["settings"]
    yield (
        f"{settings['shape']} ({document['source']}), {document['layers']} of "
        f"{document['layers_published']} layers, random weights, {settings['bits']} bits, "
        f"{settings['dtype']}; at most {document['peak_mbytes']:.0f} MB of memory"
    )
    if document["forwards"]:
        yield (
            f"{'context':>7} {'way':7} {'T':>3} {'ms':>9} {'(10..90 %)':>19} {'x plain':>8} "
            f"{'x mlx-lm':>8} {'tok/s':>8} {'GB/s':>8} {'of copy':>7}"
        )
    for row in document["forwards"]:
        spread = f"({row['ms_low']:.3f}..{row['ms_high']:.3f})"
        lm = f"{row['of_mlx_lm'][1]:.3f}" if row["of_mlx_lm"] else ""
        yield (
            f"{row['context']:7d} {row['way']:7} {row['rows']:3d} {row['ms']:9.3f} {spread:>19} "
            f"{row['of_plain'][1]:8.3f} {lm:>8} {row['tok_s']:8.1f} {row['gb_s']:8.2f} "
            f"{row['of_copy']:7.1%}"
        )
    for row in document["one_more_row"]:
        if row["one_more_row_percent"]:
            low, middle, high = row["one_more_row_percent"]
            yield (
                f"one more row, {row['way']}, after {row['context']}: {middle:.2f} % of a plain "
                f"step ({low:.2f}..{high:.2f})"
            )
    yield "Rounds, ms; draft and verify hold the host's share, verify the rollback"
    yield (
        f"{'context':>7} {'width':>5} {'plain':>8} {'round':>8} {'(10..90 %)':>17} {'steps':>6} "
        f"{'draft':>7} {'verify':>7} {'host':>6} {'rollback':>8} {'replay':>7}"
    )
    for row in document["rounds"]:
        spread = f"({row['round_ms_low']:.2f}..{row['round_ms_high']:.2f})"
        yield (
            f"{row['context']:7d} {row['width']:5d} {row['plain_ms']:8.3f} {row['round_ms']:8.3f} "
            f"{spread:>17} {row['plain_steps']:6.2f} {row['draft_ms']:7.3f} "
            f"{row['verify_ms']:7.3f} {row['host_ms']:6.3f} {row['rollback_ms']:8.3f} "
            f"{row['replay_ms']:7.3f}"
        )
    yield "Expected, not measured on text: speed-up where a draft is accepted with this chance"
    yield f"{'context':>7} {'width':>5} " + " ".join(f"{chance:6.2f}" for chance in CHANCES)
    for row in document["rounds"]:
        curve = " ".join(f"{at_chance(row, chance):6.2f}" for chance in CHANCES)
        yield f"{row['context']:7d} {row['width']:5d} {curve}"
