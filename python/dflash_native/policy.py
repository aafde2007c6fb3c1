"""How many inputs a verify gets, chosen each round: wide where drafts are accepted, one where not.

The expected tokens of a round of width w are `1 + sum_{i < w} prod_{j <= i} a_j`, with `a_j` the
chance that draft j is accepted if those before it are. They are estimated from the request's own
rounds, older ones counting less; the cost of a round by width is measured once. The width with most
tokens a second wins. Plain decoding is width 1: there nothing is learnt, so drafts are tried again
from time to time, as long as all that speculation has cost this request beyond plain decoding stays
within a small share of it. A drafter that was asked and had nothing is asked again after a quarter
of its silence: until then plain steps are queued ahead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ._arguments import integer

EXCESS = 0.02
"""The share of plain decoding's time that attempts may cost a request in the long run."""
CREDIT = 2.5
"""Plain steps that attempts may cost beyond that share."""
_DECAY = 0.9
"""What a round counts less than the one after it."""
_FADE = 0.98
"""What it counts less for each token that was decoded plainly since."""
_PRIOR = 0.75
"""The chance of the first draft before anything is known, and of one that was never reached: that
of the draft before it."""
_PRIOR_TRIALS = 2.0
"""How many trials that is worth."""
_RETRY = 2
"""Plain rounds before the first attempt to draft again; doubled by each that fails."""
_LONGEST_RETRY = 32
_SILENCE = 4
"""A drafter that had nothing is asked again after one plain round for so many tokens of silence."""
_LONGEST_PAUSE = 16
"""Most of those rounds: asking costs no more than a plain step that was not queued ahead."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a round, drafting and all, by context and width; width 1 is a plain step."""

    seconds: Mapping[int, Mapping[int, float]]

    def __post_init__(self) -> None:
        for context, row in self.seconds.items():
            sound = all(w >= 1 and 1e-9 < s < 1e9 for w, s in row.items())
            if 1 not in row or context < 0 or not sound:
                raise ValueError(
                    "[Costs] expected finite positive seconds by width, width 1 among them, "
                    f"but got {dict(row)} for context {context}."
                )
        if not self.seconds:
            raise ValueError("[Costs] expected costs of at least one context but got none.")

    def at(self, context: int) -> Mapping[int, float]:
        """Of the measured context that is nearest on a logarithmic scale."""
        near = min(self.seconds, key=lambda c: abs(math.log((c + 1) / (context + 1))))
        return self.seconds[near]

    def of(self, context: int, width: int) -> float:
        """Of the smallest measured width that is enough, else of the largest."""
        row = self.at(context)
        return row[min((w for w in row if w >= width), default=max(row))]


@dataclass(frozen=True)
class Choice:
    """A width, and why."""

    width: int
    reason: str
    """"rate": its expected rate is best; "attempt": drafts are tried again; "budget": attempts have
    cost enough; "empty": asked for drafts, the drafter had none; "fixed": there was nothing to
    choose."""
    plain_steps: int = 0
    """So many rounds, this one among them, will be plain."""


class WidthPolicy:
    """The choices of one request."""

    def __init__(self, costs: Costs, largest: int) -> None:
        """`largest`: most inputs of a verify. Widths that were not measured are not chosen."""
        self._costs = costs
        self._largest = largest
        self._trials = [0.0] * (largest - 1)
        self._hits = [0.0] * (largest - 1)
        self._excess = 0.0
        """Seconds that speculation took beyond plain steps for the same tokens."""
        self._plain = 0.0
        """Seconds of plain steps for all tokens so far."""
        self._wait, self._retry = 0, _RETRY
        self._silent = False
        """Whether the drafter had nothing when it was last asked."""
        self._undrafted = 0
        """Tokens since the last draft."""

    def choose(self, context: int, limit: int | None = None) -> Choice:
        """The width of the next round, at most `limit`, which is 1 or more."""
        if limit is not None:
            limit = integer("choose", "limit", limit, 1)
        costs = self._costs.at(context)
        largest = self._largest if limit is None else min(self._largest, limit)
        widths = [w for w in sorted(costs) if w <= largest]
        if len(widths) == 1:
            return Choice(1, "fixed")
        if self._silent and self._wait > 0:
            return Choice(1, "empty", self._wait)
        rates = {w: self.expected(w) / costs[w] for w in widths}
        best = max(widths, key=rates.__getitem__)
        if best > 1:
            return self._affordable(Choice(best, "rate"), 0.0, costs[1])
        if self._wait > 0:
            return Choice(1, "rate", self._wait)
        # What one learns grows more slowly than the width.
        width = max(widths[1:], key=lambda w: (w - 1) ** 0.5 / costs[w])
        return self._affordable(Choice(width, "attempt"), costs[width] - costs[1], costs[1])

    def _affordable(self, choice: Choice, extra: float, plain: float) -> Choice:
        """The choice, or plain steps until this request can spend `extra` seconds more."""
        over = self._excess + extra - CREDIT * plain - EXCESS * self._plain
        if over <= 0:
            return choice
        return Choice(1, "budget", math.ceil(over / (EXCESS * plain)))

    def unanswered(self) -> Choice:
        """What a round becomes for which drafts were asked and none came: plain, as the ones after
        it until they are asked for again.
        """
        return Choice(1, "empty", 1 + self._pause())

    def _pause(self) -> int:
        """Plain rounds before a drafter that has just had nothing is asked again."""
        return min(self._undrafted // _SILENCE, _LONGEST_PAUSE)

    def record(self, context: int, drafted: int, accepted: int, reason: str = "") -> None:
        """What a round came to that began at `context`, and its choice's `reason`.

        One that was left `unanswered` is a failed attempt: a longer silence, a longer pause.
        """
        tokens, width = accepted + 1, drafted + 1
        plain = self._costs.at(context)[1]
        self._plain += tokens * plain
        if drafted == 0:
            if reason == "empty" and self._wait == 0:
                self._silent, self._wait = True, self._pause()
            else:
                self._wait = max(0, self._wait - 1)
            self._undrafted += tokens
            return
        self._silent = False
        spent = self._costs.of(context, width)
        self._excess = max(self._excess + spent - tokens * plain, -CREDIT * plain)
        decay = _DECAY * _FADE**self._undrafted
        for i in range(len(self._trials)):
            reached = i < drafted and i <= accepted
            if reached or self._undrafted:
                self._trials[i] = decay * self._trials[i] + reached
                self._hits[i] = decay * self._hits[i] + (i < accepted)
        if spent <= tokens * plain:
            self._wait, self._retry = 0, _RETRY
        else:
            self._wait = self._retry
            self._retry = min(2 * self._retry, _LONGEST_RETRY)
        self._undrafted = 0

    def expected(self, width: int) -> float:
        """Tokens of a round of this width."""
        tokens = chance = 1.0
        share = _PRIOR
        for i in range(width - 1):
            share = (self._hits[i] + _PRIOR_TRIALS * share) / (self._trials[i] + _PRIOR_TRIALS)
            chance *= share
            tokens += chance
        return tokens


def replay(
    acceptable: Sequence[int], costs: Costs, largest: int, width: int | None = None
) -> float:
    """Seconds that a request would have taken: by the policy, or at one fixed `width`.

    `acceptable[i]` are the drafts that would be accepted of a block drafted after i tokens. Greedy
    decoding is the same text whatever is drafted, so the choices of any policy can be followed.
    """
    policy, at, seconds = WidthPolicy(costs, largest), 0, 0.0
    while at < len(acceptable):
        left = len(acceptable) - at
        chosen = policy.choose(at, left).width if width is None else min(width, left)
        seconds += costs.of(at, chosen)
        accepted = min(acceptable[at], chosen - 1)
        policy.record(at, chosen - 1, accepted)
        at += accepted + 1
    return seconds
