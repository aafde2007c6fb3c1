"""`python -m bench policy`: the width of a verify on recorded acceptance, and end to end.

Without an option it replays bench/acceptance.json at several costs: no clock is involved.
`--end-to-end` runs plain decoding and block_size="auto" in turn, `--record` records anew.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import mlx.core as mx

from dflash_native import LookupDrafter, Session, Target, load_demo
from dflash_native.costs import cached_or_measured
from dflash_native.demo import prompts
from dflash_native.policy import Costs, replay

from .prompts import TEXTS

TRACES = Path(__file__).parent / "acceptance.json"
COSTS = {
    "demo pair, CPU": {1: 1, 2: 1.95, 3: 1.89, 4: 1.78, 6: 1.85, 8: 2.17, 12: 2.53, 16: 3.15},
    "flat": {1: 1, 2: 1.25, 4: 1.25, 8: 1.26, 16: 1.3},
    "gentle": {1: 1, 2: 1.15, 3: 1.2, 4: 1.25, 6: 1.35, 8: 1.45, 12: 1.7, 16: 1.95},
    "24 % a row": {1: 1, 2: 1.44, 3: 1.68, 4: 1.92, 6: 2.4, 8: 2.9, 12: 3.9, 16: 4.8},
}
"""A round by width in plain steps: measured (bench/results), and what others' kernels cost."""


def record(tokens: int = 320) -> dict[str, list[str]]:
    """For every position of the greedy texts, how many drafts would be accepted there, in hex."""
    model, tokenizer, drafter = load_demo(mx.float32)
    target = Target(model)

    def trace(text: str) -> str:
        session, found = Session(target, drafter), ""
        session.prefill(list(tokenizer.encode(text)))
        while len(found) < tokens:
            result = session.round()
            found += f"{result.accepted:x}"
            session.rewind(1)
            if session.tokens[-1] in tokenizer.eos_token_ids:
                break
        return found

    texts = {"code": [prompt.text for prompt in prompts()[:8]], **TEXTS}
    return {name: [trace(text) for text in group] for name, group in texts.items()}


def traces() -> dict[str, list[list[int]]]:
    """What was recorded, and a text on which nothing is accepted."""
    found = json.loads(TRACES.read_text())
    sets = {name: [[int(c, 16) for c in trace] for trace in group] for name, group in found.items()}
    return {**sets, "adversarial": [[0] * 320] * 4}


def compare() -> None:
    """A line for each set and each row of costs."""
    for name, row in COSTS.items():
        costs = Costs({0: row})
        print(f"{name}: {row}")
        print("  set          best fixed   policy / best   policy / plain")
        for group, found in traces().items():
            fixed = {w: sum(replay(t, costs, 16, w) for t in found) for w in row}
            best = min(fixed, key=fixed.__getitem__)
            ours = sum(replay(t, costs, 16) for t in found)
            print(f"  {group:<12} {best:>10} {ours / fixed[best]:>15.3f} {ours / fixed[1]:>16.3f}")


class Wrong:
    """A drafter whose drafts are never accepted, at the cost of the real one."""

    def __init__(self, drafter):
        self.drafter = drafter
        self.tap_layers, self.context_rows = drafter.tap_layers, drafter.context_rows
        self.max_drafts, self.model = drafter.max_drafts, drafter.model

    def begin(self, target):
        session = self.drafter.begin(target)
        propose = session.propose
        session.propose = lambda *given: (propose(*given) + 1) % target.vocab_size
        return session


class Silent(LookupDrafter):
    """A lookup that searches every time it is asked and never finds anything."""

    def begin(self, target):
        session = super().begin(target)
        propose = session.propose
        session.propose = lambda *given: propose(*given)[:, :0]
        return session


def end_to_end(pairs: int, tokens: int) -> None:
    """Ratios of time, plain decoding and the policy in turn; plain against plain is the spread."""
    model, tokenizer, drafter = load_demo(mx.float32)
    target = Target(model)
    costs = cached_or_measured(target, drafter)
    texts = {"code": prompts()[0].text, **{name: group[0] for name, group in TEXTS.items()}}

    def run(text: str, proposes) -> tuple[float, list[int], dict[str, int]]:
        size = "auto" if proposes is not None else None
        session = Session(target, proposes, block_size=size, costs=costs)
        session.prefill(list(tokenizer.encode(text)))
        end = len(session.tokens) + tokens
        start = time.perf_counter()
        while len(session.tokens) < end:
            session.round(end - len(session.tokens))
        return time.perf_counter() - start, session.tokens, session.stats.choices

    cases = [(name, text, drafter) for name, text in texts.items()]
    cases.append(("adversarial", texts["prose"], Wrong(drafter)))
    cases.append(("silent", texts["prose"], Silent()))
    print(f"{tokens} tokens, {pairs} pairs; time over that of plain decoding, median (10..90 %)")
    for name, text, proposes in cases:
        ratios, spread = [], []
        for _ in range(pairs):
            a, tokens_a, _ = run(text, None)
            b, tokens_b, choices = run(text, proposes)
            again, _, _ = run(text, None)
            assert tokens_a == tokens_b
            ratios.append(2 * b / (a + again))
            spread.append(again / a)
        print(f"  {name:<12} {quantiles(ratios)}   plain again {quantiles(spread)}   {choices}")


def quantiles(values: list[float]) -> str:
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return f"{median(ordered):.3f} ({low:.3f}..{high:.3f})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", action="store_true", help="with the demo pair, anew")
    parser.add_argument("--end-to-end", action="store_true")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=256)


def run(options: argparse.Namespace) -> None:
    """Prints the tables."""
    if options.record:
        TRACES.write_text(json.dumps(record(), indent=1) + "\n")
    if options.end_to_end:
        end_to_end(options.pairs, options.tokens)
    else:
        compare()
