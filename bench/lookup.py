"""`python -m bench lookup`: the index, its searches, and repetitive JSON on the demo pair.

The index: a prompt of so many tokens told in one call, then a round at a time (one search, five new
tokens). Three texts: ids drawn as words are (Zipf), one token only, which is the worst case of a
search, and the JSON below. Milliseconds and microseconds are medians with the 10th and 90th
percentile. Decoding: every drafter on every prompt in turn, with a check that the tokens are those
of plain decoding; the speed counts from the first round on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from dflash_native import (
    CombinedDrafter,
    Drafter,
    LookupDrafter,
    Session,
    Target,
    load_demo,
)

from .timing import percentiles


def records(count: int) -> str:
    """A list of flat objects."""
    rows = (
        {"id": i, "name": f"item_{i}", "price": 10 * i + 5, "tags": ["new", "sale"]}
        for i in range(count)
    )
    return "[\n" + "".join(f"{json.dumps(row)},\n" for row in rows)


def events(count: int) -> str:
    """A log: one object a line, long keys, few values."""
    return "".join(
        json.dumps({"timestamp": 1700 + i, "level": "info", "message": "request", "status": 200})
        + "\n"
        for i in range(count)
    )


def nested(count: int) -> str:
    """Indented objects within objects."""
    users = {
        f"user_{i}": {"active": i % 2 == 0, "roles": ["read", "write"], "limits": {"day": 100}}
        for i in range(count)
    }
    return json.dumps(users, indent=2).rstrip("}\n ") + "}\n  },\n"


PROMPTS: dict[str, Callable[[int], str]] = {"records": records, "events": events, "nested": nested}


def index(tokens: list[int], repeats: int) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """Milliseconds to read a prompt; microseconds of a search and of a round's new tokens."""
    read, search, append = [], [], []
    for _ in range(repeats):
        session = LookupDrafter().begin(None)
        start = time.perf_counter()
        session.observe(tokens)
        read.append((time.perf_counter() - start) * 1e3)
    for round_ in range(200):
        start = time.perf_counter()
        session.propose(mx.array([[0]]), session.index.size - 1, 15)
        search.append((time.perf_counter() - start) * 1e6)
        start = time.perf_counter()
        session.observe(tokens[5 * round_ : 5 * round_ + 5])
        append.append((time.perf_counter() - start) * 1e6)
    yield "index of the prompt, ms", percentiles(read)
    yield "search, us", percentiles(search)
    yield "five new tokens, us", percentiles(append)


def decode(max_tokens: int, repeats: int) -> None:
    model, tokenizer, dflash = load_demo()
    target = Target(model)
    drafters: dict[str, Drafter | None] = {
        "plain": None,
        "lookup": LookupDrafter(),
        "DFlash": dflash,
        "combined": CombinedDrafter(LookupDrafter(), dflash),
    }
    print(f"\n{'prompt':8} {'drafter':9} {'tok/s':>7} {'(10..90 %)':>15} {'tok/round':>9} accepted")
    for name, make in PROMPTS.items():
        ids = tokenizer.encode(make(6))
        speeds: dict[str, list[float]] = {drafter: [] for drafter in drafters}
        sessions: dict[str, Session] = {}
        for _ in range(repeats):
            for kind, drafter in drafters.items():
                session = sessions[kind] = Session(target, drafter)
                session.prefill(ids)
                start = time.perf_counter()
                while (left := len(ids) + max_tokens - len(session.tokens)) > 0:
                    session.round(left)
                speeds[kind].append(max_tokens / (time.perf_counter() - start))
                assert session.tokens == sessions["plain"].tokens
        for kind, session in sessions.items():
            low, middle, high = percentiles(speeds[kind])
            print(
                f"{name:8} {kind:9} {middle:7.1f} {f'({low:.1f}..{high:.1f})':>15} "
                f"{session.stats.tokens_per_round:9.2f} {session.stats.acceptance:8.2f}"
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--repeats", type=int, default=20, help="of the index")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--decode-repeats", type=int, default=3)
    parser.add_argument("--decode", action=argparse.BooleanOptionalAction, default=True)


def run(options: argparse.Namespace) -> None:
    """Prints the lines."""
    _, tokenizer, _ = load_demo()
    text = tokenizer.encode(records(100))
    zipf = np.random.default_rng(0).zipf(1.3, options.tokens) % 150_000
    texts = {
        "zipf": zipf.tolist(),
        "one token": [7] * options.tokens,
        "json": (text * (1 + options.tokens // len(text)))[: options.tokens],
    }
    for name, tokens in texts.items():
        for what, (low, middle, high) in index(tokens, options.repeats):
            print(f"{len(tokens)} tokens, {name:9} {what:24} {middle:8.2f} ({low:.2f}..{high:.2f})")
    if options.decode:
        decode(options.max_tokens, options.decode_repeats)
