"""`python -m bench memory`: peaks by phase, a long text, a long chat."""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash_native import Session, Target, load_demo
from dflash_native.cache import AttentionCache
from dflash_native.drafters import DFlashDrafter
from dflash_native.drafters.dflash import DFlashSession
from dflash_native.drafters.protocol import TargetLike

from .shapes import SHAPES, make_drafter, make_model
from .timing import Progress

FULL = {"prompt": 2048, "tokens": 20_000, "turns": 30, "turn_tokens": 64, "samples": 20}
QUICK = {"prompt": 64, "tokens": 400, "turns": 6, "turn_tokens": 12, "samples": 8}
SLACK = 1.25
"""Of the caches, for what one round replaces in them."""
SPARE = 2e6
"""Bytes that may come and go besides: indices, lengths, what the allocator rounds up."""


class WatchedDrafter(DFlashDrafter):
    """A drafter that knows its last session, and does not keep it alive."""

    last: Callable[[], DFlashSession | None] = staticmethod(lambda: None)

    def begin(self, target: TargetLike) -> DFlashSession:
        session = super().begin(target)
        self.last = weakref.ref(session)
        return session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, help="random weights; the demo pair without")
    parser.add_argument("--bits", type=int, choices=[16, 8, 4], default=16)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--layers", type=int, help="cut a shape to so many")
    parser.add_argument("--prompt", type=int, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, help="of the long text")
    parser.add_argument("--turns", type=int, help="of the chat")
    parser.add_argument("--turn-tokens", type=int, help="asked and answered in a turn, each")
    parser.add_argument("--samples", type=int, help="of the long text")


def used() -> dict[str, int]:
    """Bytes that MLX holds, bytes it keeps for reuse, and arrays that Python can reach."""
    gc.collect()
    return {
        "active": mx.get_active_memory(),
        "cached": mx.get_cache_memory(),
        "arrays": sum(isinstance(each, mx.array) for each in gc.get_objects()),
    }


def resident() -> int:
    """The most bytes of memory that the process has had, as the system counts them."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class Phases:
    """Peaks of MLX's memory, phase by phase."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        mx.reset_peak_memory()

    def end(self, phase: str) -> None:
        """The phase is over."""
        mx.synchronize()
        row = {"phase": phase, "peak": mx.get_peak_memory(), **used(), "resident": resident()}
        self.rows.append(row)
        mx.reset_peak_memory()


def held(session: Session, drafter: WatchedDrafter) -> dict[str, int]:
    """Bytes of the session's caches: keys and values, the recurrent layers', the draft's."""
    draft = drafter.last()
    assert draft is not None
    found = {"keys_values": 0, "recurrent": 0, "draft": 0}
    for layer in session.cache.layers:
        name = "keys_values" if isinstance(layer, AttentionCache) else "recurrent"
        found[name] += sum(array.nbytes for array in layer.arrays())
    found["draft"] = sum(array.nbytes for array in draft.arrays())
    return found


def last_round(target: Target, drafter: DFlashDrafter) -> int:
    """Bytes of logits and taps that a session keeps of its last round."""
    row = 4 * target.vocab_size + 4 * len(drafter.tap_layers) * target.hidden_size
    return 2 * (drafter.max_drafts + 1) * row


def long_text(
    target: Target, drafter: WatchedDrafter, options: argparse.Namespace, progress: Progress
) -> tuple[list[dict[str, int]], list[str]]:
    """Samples along one text, and what is wrong with them: arrays or memory that grow."""
    samples: list[dict[str, int]] = []
    every = max(1, options.tokens // options.samples)
    with Session(target, drafter) as session:
        session.prefill([(7 * i + 1) % (target.vocab_size - 1) for i in range(32)])
        start = len(session.tokens)
        while (count := len(session.tokens) - start) < options.tokens:
            session.round(min(options.tokens - count, drafter.max_drafts + 1))
            if len(session.tokens) - start >= (len(samples) + 1) * every:
                size = held(session, drafter)
                samples.append({"tokens": len(session.tokens) - start, **used(), **size})
                progress(f"{samples[-1]['tokens']} of {options.tokens} tokens")
    return samples, grown(samples)


def grown(samples: list[dict[str, int]]) -> list[str]:
    """What grew from the second sample on, beside the caches themselves."""
    if len(samples) < 3:
        return []
    found = []
    first, last = samples[1], samples[-1]
    if last["arrays"] > first["arrays"] + 16:
        found.append(f"arrays grew from {first['arrays']} to {last['arrays']}")
    caches = ("keys_values", "recurrent", "draft")
    rest = [sample["active"] - sum(sample[name] for name in caches) for sample in (first, last)]
    if rest[1] > rest[0] + (SLACK - 1) * sum(last[name] for name in caches) + SPARE:
        found.append(f"memory beside the caches grew from {rest[0]} to {rest[1]} bytes")
    return found


def chat(
    target: Target, drafter: WatchedDrafter, options: argparse.Namespace, held_besides: int
) -> tuple[list[dict[str, int]], list[str]]:
    """A row for each turn of one session, and the turns that hold more than they may.

    `held_besides`: bytes of the weights, and of what the process held before.
    """
    rows, wrong = [], []
    with Session(target, drafter) as session:
        for turn in range(1, options.turns + 1):
            asked = range(turn, turn + options.turn_tokens)
            session.prefill([(11 * i) % (target.vocab_size - 1) for i in asked])
            end = len(session.tokens) + options.turn_tokens
            while len(session.tokens) < end:
                session.round(end - len(session.tokens))
            row = {"turn": turn, "tokens": len(session.tokens), **used(), **held(session, drafter)}
            caches = row["keys_values"] + row["recurrent"] + row["draft"]
            row["bound"] = int(held_besides + SLACK * caches + last_round(target, drafter) + SPARE)
            if row["active"] > row["bound"]:
                wrong.append(f"turn {turn} holds {row['active']} bytes of at most {row['bound']}")
            rows.append(row)
    return rows, wrong


def run(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Phases, the long text, the chat."""
    before = used()["active"]
    phases, dtype = Phases(), getattr(mx, options.dtype)
    progress("loading")
    if options.shape is None:
        model, _, drafter = load_demo(dtype)
    else:
        model = make_model(options.shape, options.bits, dtype, options.layers)
        drafter = make_drafter(options.shape, dtype, options.layers)
    drafter = WatchedDrafter(drafter.config, drafter.model)
    phases.end("load")
    target = Target(model)
    prompt = [(7 * i + 1) % (target.vocab_size - 1) for i in range(options.prompt)]
    warm = Session(target, drafter)
    warm.prefill(prompt[:8])
    warm.round()
    warm.close()
    phases.end("first round (weights are packed on a CPU)")
    for name, draft in (("plain", None), ("with DFlash", drafter)):
        progress(name)
        session = Session(target, draft)
        session.prefill(prompt)
        phases.end(f"prompt, {name}")
        for _ in range(16):
            session.round()
        phases.end(f"decoding, {name}")
        session.close()
        del session
        phases.end(f"closed, {name}")
    parts = tree_flatten(model.parameters()) + tree_flatten(drafter.model.parameters())
    weights = sum(value.nbytes for _, value in parts)
    packed = target.packed_nbytes + drafter.packed_nbytes
    samples, wrong = long_text(target, drafter, options, progress)
    phases.end("the long text")
    progress(f"a chat of {options.turns} turns")
    turns, over = chat(target, drafter, options, before + weights + packed)
    phases.end("the chat")
    return {
        "weights": weights,
        "packed": packed,
        "phases": phases.rows,
        "long_text": samples,
        "chat": turns,
        "failures": wrong + over,
    }


def text(document: dict[str, Any]) -> Iterator[str]:
    """Tables of phases, the long text and the chat; MB are 10^6 bytes."""
    yield (
        f"{document['settings']['shape'] or 'the demo pair'} in {document['settings']['dtype']}: "
        f"weights {document['weights'] / 1e6:.1f} MB, packed for the CPU "
        f"{document['packed'] / 1e6:.1f} MB"
    )
    yield f"{'phase':42} {'peak MB':>8} {'active':>8} {'kept':>8} {'arrays':>6} {'resident':>8}"
    for row in document["phases"]:
        yield (
            f"{row['phase']:42} {row['peak'] / 1e6:8.1f} {row['active'] / 1e6:8.1f} "
            f"{row['cached'] / 1e6:8.1f} {row['arrays']:6d} {row['resident'] / 1e6:8.1f}"
        )
    for name, key in (("long_text", "tokens"), ("chat", "turn")):
        yield (
            f"{name.replace('_', ' ') + ', ' + key:18} {'active MB':>9} {'KV':>8} {'recurrent':>9} "
            f"{'draft':>7} {'arrays':>6} {'bound MB':>8}"
        )
        for row in document[name]:
            bound = f"{row['bound'] / 1e6:.1f}" if "bound" in row else ""
            yield (
                f"{row[key]:18d} {row['active'] / 1e6:9.1f} {row['keys_values'] / 1e6:8.2f} "
                f"{row['recurrent'] / 1e6:9.2f} {row['draft'] / 1e6:7.2f} {row['arrays']:6d} "
                f"{bound:>8}"
            )
