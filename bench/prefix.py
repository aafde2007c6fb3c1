"""`python -m bench prefix`: a chat's second turn, time to its first token, warm and cold.

The first turn reads Python source and emits 64 tokens; the second one has `--tokens` in all, the
last `--new` of them new. Cold: one prefill of everything, without a cache. Warm: restore, prefill
of the rest with the stops of a server and a checkpoint at each. From disk: the same, memory empty
and the checkpoint in a file. Each ends with the first round, and the three run in turn. A ratio
says how many times as fast, within one turn of the three; ratios and milliseconds are medians with
the 10th and 90th percentile.
The first 32 tokens must be equal, and their sha256 is printed.

Then what a checkpoint costs by itself, and a prefill of the same text by Target(prefill="exact")
against "fast", in turn. On a CPU these two are the same operations.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

import dflash_native
from dflash_native import (
    AutoregressiveDrafter,
    CombinedDrafter,
    Drafter,
    LookupDrafter,
    Session,
    Target,
    load_demo,
)
from dflash_native.server.prefix_cache import PrefixCache, fingerprint

from .timing import percentiles, ratios

ANSWER = 64
ROOM = 1 << 32
NAMES = ["plain", "dflash", "lookup", "autoregressive", "lookup+dflash"]


def source_text(tokenizer: object, count: int) -> list[int]:
    """Tokens of this package's files."""
    files = sorted(Path(dflash_native.__file__).parent.glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    tokens: list[int] = tokenizer.encode(text[: 6 * count])  # type: ignore[attr-defined]
    if len(tokens) < count:
        raise SystemExit(f"the text has {len(tokens)} tokens only")
    return tokens[:count]


def read(cache: PrefixCache, session: Session, tokens: list[int]) -> int:
    """As a server does; how many tokens were known."""
    known = done = cache.restore(session, tokens)
    for stop in cache.stops(known, len(tokens)):
        session.prefill(tokens[done : stop + 1])
        done = stop + 1
        cache.add(session)
    return known


def second_turns(
    target: Target, drafter: Drafter | None, text: list[int], new: int, repeats: int
) -> tuple[dict[str, list[float]], str]:
    """Seconds to the first token by kind, and a digest of the tokens."""
    first = Session(target, drafter)
    first.prefill(text[: -ANSWER - new])
    while (left := len(text) - new - len(first.tokens)) > 0:
        first.round(left)
    tokens = first.tokens + text[-new:]
    key = fingerprint(target, drafter)
    kinds = {"cold": [], "warm": [], "from disk": []}  # type: dict[str, list[float]]

    def answer(cache: PrefixCache | None) -> tuple[float, list[int]]:
        session = Session(target, drafter)
        start = time.perf_counter()
        if cache is None:
            session.prefill(tokens)
        else:
            known = read(cache, session, tokens)
            assert known == len(first.tokens) - 1, known
        session.round()
        took = time.perf_counter() - start
        while len(session.tokens) < len(tokens) + 32:
            session.round()
        return took, session.tokens[len(tokens) :][:32]

    with tempfile.TemporaryDirectory() as folder:
        PrefixCache(key, 0, directory=Path(folder, "first")).add(first)
        for repeat in range(repeats + 1):
            warm = PrefixCache(key, ROOM)
            warm.add(first)
            copy = Path(folder, str(repeat))
            shutil.copytree(Path(folder, "first"), copy)
            caches = [None, warm, PrefixCache(key, ROOM, directory=copy)]
            found = []
            for times, cache in zip(kinds.values(), caches, strict=True):
                took, emitted = answer(cache)
                found.append(emitted)
                if repeat > 0:  # the first ones pay for what is made on first use
                    times.append(took)
            if not found[0] == found[1] == found[2]:
                raise SystemExit("warm and cold differ")
            shutil.rmtree(copy)
    return kinds, hashlib.sha256(json.dumps(found[0]).encode()).hexdigest()[:16]


def costs(target: Target, drafter: Drafter | None, text: list[int], repeats: int) -> str:
    """Milliseconds of a checkpoint's life."""
    session, took = Session(target, drafter), {"take": [], "write": [], "read": [], "restore": []}
    session.prefill(text)
    key = fingerprint(target, drafter)
    for _ in range(repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            times = [time.perf_counter()]
            checkpoint = session.checkpoint()
            times.append(time.perf_counter())
            PrefixCache(key, 0, directory=Path(folder)).add(session)
            times.append(time.perf_counter())
            PrefixCache(key, 0, directory=Path(folder)).restore(Session(target, drafter), text)
            times.append(time.perf_counter())
            restored = Session(target, drafter)
            restored.restore(checkpoint)
            mx.eval(restored.cache.arrays())
            times.append(time.perf_counter())
        for list_, start, end in zip(took.values(), times[:-1], times[1:], strict=True):
            list_.append(1e3 * (end - start))
    figures = ", ".join(f"{name} {percentiles(ms[1:])[1]:.1f}" for name, ms in took.items())
    return f"{checkpoint.nbytes / 1e6:.1f} MB of {len(checkpoint.tokens)} tokens; ms: {figures}"


def prefills(model: object, text: list[int], repeats: int) -> dict[str, list[float]]:
    """Seconds by kind of prefill, in turn."""
    targets = {kind: Target(model, prefill=kind) for kind in ("fast", "exact")}  # type: ignore[arg-type]
    took: dict[str, list[float]] = {kind: [] for kind in targets}
    for repeat in range(repeats + 1):
        for kind in list(targets)[:: 1 if repeat % 2 else -1]:
            session = Session(targets[kind])
            start = time.perf_counter()
            session.prefill(text)
            if repeat > 0:
                took[kind].append(time.perf_counter() - start)
    return took


def print_rows(rows: dict[str, list[float]], base: str, unit: Callable[[str], str]) -> None:
    for name, times in rows.items():
        low, middle, high = percentiles([1e3 * each for each in times])
        _, ratio, _ = spread = ratios(rows[base], times)
        print(
            f"{unit(name):32} {middle:9.1f} ({low:7.1f}..{high:7.1f}) "
            f"{ratio:7.2f} ({spread[0]:6.2f}..{spread[2]:6.2f})"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--drafters", nargs="+", choices=NAMES, default=NAMES)


def run(options: argparse.Namespace) -> None:
    """Prints the tables."""
    model, tokenizer, dflash = load_demo(getattr(mx, options.dtype))
    drafters: dict[str, Drafter | None] = {
        "plain": None,
        "dflash": dflash,
        "lookup": LookupDrafter(),
        "autoregressive": AutoregressiveDrafter(load_demo(None)[0]),
        "lookup+dflash": CombinedDrafter(LookupDrafter(), dflash),
    }
    target, text = Target(model), source_text(tokenizer, options.tokens)
    print(f"{'first token of the second turn':32} {'ms':>9} {'(10..90 %)':>18} {'x cold':>7}")
    for name in options.drafters:
        rows, digest = second_turns(target, drafters[name], text, options.new, options.repeats)
        print_rows(rows, "cold", lambda kind, name=name: f"{name}, {kind}")
        print(f"  32 tokens {digest}; {costs(target, drafters[name], text, options.repeats)}")
    print(f"{'prefill':32} {'ms':>9} {'(10..90 %)':>18} {'x fast':>7}")
    print_rows(prefills(model, text, options.repeats), "fast", str)
