"""Plain decoding and DFlash on the same prompts: what was emitted, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from ..drafters.protocol import Drafter
from ..session import Session, Stats
from ..stopping import StopRules, TextStream
from ..targets import Target

Show = Callable[[str, bool], None]
"""Called for each token with its text and whether the drafter proposed it."""


@dataclass(frozen=True)
class Decoded:
    """One prompt's continuation."""

    tokens: list[int]
    seconds: float
    """In rounds alone: neither loading nor reading the prompt is counted."""
    stats: Stats


@dataclass(frozen=True)
class Comparison:
    """One prompt, decoded plainly and with drafts."""

    name: str
    prompt: list[int]
    plain: Decoded
    dflash: Decoded

    @property
    def difference(self) -> int | None:
        """The first token at which the two differ, or None where they are identical."""
        plain, dflash = self.plain.tokens, self.dflash.tokens
        if plain == dflash:
            return None
        pairs = enumerate(zip(plain, dflash, strict=False))
        shorter = min(len(plain), len(dflash))
        return next((at for at, (left, right) in pairs if left != right), shorter)


def decode(
    target: Target,
    tokenizer: Any,
    prompt: list[int],
    max_tokens: int,
    drafter: Drafter | None = None,
    *,
    block_size: int | None = None,
    show: Show | None = None,
) -> Decoded:
    """Continue `prompt` until an end token or the budget. Raises ValueError as `Session` does."""
    rules = StopRules(tokenizer.eos_token_ids, TextStream(tokenizer.detokenizer), max_tokens)
    tokens: list[int] = []
    seconds = 0.0
    with Session(target, drafter, block_size=block_size) as session:
        session.prefill(prompt)
        reason = None
        while reason is None:
            start = time.perf_counter()
            result = session.round(rules.left)
            seconds += time.perf_counter() - start
            kept = 0
            for token in result.tokens:
                kept += 1
                text, reason = rules.feed(token)
                if show is not None:
                    show(text, kept <= result.accepted)
                if reason is not None:
                    break
            session.rewind(kept)
            tokens += result.tokens[:kept]
    return Decoded(tokens, seconds, session.stats)


def warm_up(
    target: Target, prompt: list[int], drafter: Drafter, *, block_size: int | None = None
) -> None:
    """Two rounds of each kind after a few tokens, so that no measurement has to compile kernels."""
    for proposes in (None, drafter):
        size = None if proposes is None else block_size
        with Session(target, proposes, block_size=size) as session:
            session.prefill(prompt[:16])
            session.round()
            session.round()


def summarise(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The sums over all prompts, under the names of `dflash-native demo --json`."""
    tokens = sum(len(c.dflash.tokens) for c in comparisons)
    rounds = sum(c.dflash.stats.rounds for c in comparisons)
    drafted = sum(c.dflash.stats.drafted for c in comparisons)
    accepted = sum(c.dflash.stats.accepted for c in comparisons)
    plain = _rate([c.plain for c in comparisons])
    dflash = _rate([c.dflash for c in comparisons])
    return {
        "prompts": len(comparisons),
        "identical": sum(c.difference is None for c in comparisons),
        "tokens": tokens,
        "rounds": rounds,
        "tokens_per_round": tokens / rounds,
        "plain_tok_s": plain,
        "dflash_tok_s": dflash,
        "speedup": dflash / plain,
        "round_in_plain_steps": tokens / rounds * plain / dflash,
        "acceptance": accepted / drafted if drafted else 0.0,
        "acceptance_by_position": acceptance_by_position([c.dflash.stats for c in comparisons]),
    }


def acceptance_by_position(stats: Sequence[Stats]) -> list[float]:
    """Accepted over drafted at position 1, 2, … of a block, over all sessions."""
    positions = max((len(s.drafted_at) for s in stats), default=0)
    totals = [[0, 0] for _ in range(positions)]
    for s in stats:
        for at, counts in enumerate(zip(s.accepted_at, s.drafted_at, strict=True)):
            totals[at] = [total + count for total, count in zip(totals[at], counts, strict=True)]
    return [accepted / drafted for accepted, drafted in totals]


def logit_gap(target: Target, comparison: Comparison) -> float | None:
    """By how much plain decoding preferred its token where the two first differ.

    None where they do not differ, or where one merely ends earlier.
    """
    at = comparison.difference
    plain, dflash = comparison.plain.tokens, comparison.dflash.tokens
    if at is None or at >= min(len(plain), len(dflash)):
        return None
    with Session(target) as session:
        session.prefill([*comparison.prompt, *plain[:at]])
        logits = session.round(1).logits[0].astype(mx.float32)
        return cast(float, (logits[plain[at]] - logits[dflash[at]]).item())


def matmul_cost(target: Target, rows: int) -> float:
    """How many times longer the LM head takes for `rows` rows than for one; best of ten."""

    def best(count: int) -> float:
        hidden = mx.ones((1, count, target.hidden_size), dtype=target.dtype)
        times = []
        for _ in range(11):
            start = time.perf_counter()
            mx.eval(target.logits(hidden))
            times.append(time.perf_counter() - start)
        return min(times[1:])

    return best(rows) / best(1)


def _rate(runs: Sequence[Decoded]) -> float:
    return sum(len(run.tokens) for run in runs) / sum(run.seconds for run in runs)
