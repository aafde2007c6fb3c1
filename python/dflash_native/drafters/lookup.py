"""Drafts without a model: what followed the same tokens earlier in the prompt or the output."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..sampling import Sampler
from .protocol import TargetLike

_TAIL = 2048
"""Newest tokens that are searched as they are; more of them are sorted into a segment."""
_CANDIDATES = 4096
"""Most places of the newest n-gram that are compared, the latest ones."""
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_POSITION = np.uint64(0xFFFFFFFF)
"""The half of an index entry that holds the position; the other half is the n-gram's hash."""


class LookupDrafter:
    """Proposes what followed the longest, of equals the latest, earlier match of the newest tokens.

    Args:
        max_drafts: most tokens of a proposal.
        shortest: tokens that must agree for a match, the width of the index.
        longest: tokens from which on matches count as equally long.

    A proposal is as long as the text allows: it ends where the match's own text ends, which is the
    newest token, unless the match reaches over that whole distance. Then the text repeats itself
    and so does the proposal.

    Each session watches the first token of its guesses. A wrong one halves the length of the next
    proposals, down to none; a right one halves the count of wrong ones. While it proposes nothing
    it goes on to guess in silence, so a pause costs no verify and ends where the text can be
    foreseen again.

    Needs nothing of the target. Raises ValueError for numbers that do not fit.
    """

    tap_layers: tuple[int, ...] = ()
    context_rows: int | None = 0

    def __init__(self, max_drafts: int = 15, *, shortest: int = 2, longest: int = 32) -> None:
        self.max_drafts = operator.index(max_drafts)
        self.shortest, self.longest = operator.index(shortest), operator.index(longest)
        if self.max_drafts < 1:
            raise ValueError(
                f"[LookupDrafter] expected max_drafts of at least 1 but got {max_drafts}"
            )
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                "[LookupDrafter] expected 1 <= shortest <= longest "
                f"but got shortest={shortest} and longest={longest}"
            )

    def begin(self, target: TargetLike) -> LookupSession:
        """A fresh session for one request."""
        return LookupSession(self)


class LookupSession:
    """One request's text and its index. All of it lives on the host."""

    def __init__(self, drafter: LookupDrafter) -> None:
        self.finite: mx.array | None = None
        self.match = 0
        """Tokens that agreed in the last match, 0 where there was none."""
        self.index = NgramIndex(drafter.shortest, drafter.longest)
        self._max_drafts = drafter.max_drafts
        self._guess: int | None = None
        """For the token after the newest one, proposed or not."""
        self._misses = 0

    def observe(self, tokens: Sequence[int]) -> None:
        """Append to the text, and see whether the last guess was right."""
        if not tokens:
            return
        if self._guess is not None:
            right = self._guess == tokens[0]
            silent = self._max_drafts.bit_length()
            self._misses = self._misses // 2 if right else min(self._misses + 1, silent)
            self._guess = None
        self.index.append(tokens)

    def extend(self, taps: mx.array, position: int) -> None:
        """It takes no taps."""

    def propose(
        self, pending: mx.array, position: int, count: int, sampler: Sampler | None = None
    ) -> mx.array:
        """Drafts int32 `[1, n]`, n in 0 … `count`: the tokens after the match (see the drafter).

        Raises ValueError unless `position` is that of the newest token.
        """
        if position != self.index.size - 1:
            raise ValueError(
                f"[propose] expected position {self.index.size - 1} but got {position}"
            )
        drafts, self.match = self.index.continuation(count)
        self._guess = drafts[0] if drafts else None
        return mx.array([drafts[: self._max_drafts >> self._misses]], dtype=mx.int32)

    def arrays(self) -> list[mx.array]:
        """None: nothing is on the device."""
        return []


class NgramIndex:
    """A growing text and where each of its n-grams stands.

    An index entry is an n-gram's hash above the position of its last token. Entries are sorted a
    segment at a time, and no entry is ever sorted twice: a prompt is one segment, an output one for
    each 2,048 tokens, and the newest tokens are none yet and are searched as they are.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.size = 0
        """Tokens of the text."""
        self._shortest, self._longest = shortest, longest
        self._text = np.zeros(_TAIL, np.int32)
        self._segments: list[NDArray[np.uint64]] = []
        self._sorted = shortest - 1
        """Last positions of n-grams before this one are in a segment."""

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end."""
        size = self.size + len(tokens)
        if size > len(self._text):
            text = np.zeros(max(size, 2 * len(self._text)), np.int32)
            text[: self.size] = self._text[: self.size]
            self._text = text
        self._text[self.size : size] = tokens
        self.size = size
        if size - self._sorted > _TAIL:
            self._segments.append(np.sort(self._entries(self._sorted, size)))
            self._sorted = size

    def continuation(self, count: int) -> tuple[list[int], int]:
        """At most `count` tokens that should follow, and how many tokens of the match agree."""
        ends = self._candidates()
        length = 0
        while length < self._longest:
            reach = ends[ends >= length]
            agree = reach[self._text[reach - length] == self._text[self.size - 1 - length]]
            if not agree.size:
                break
            ends, length = agree, length + 1
        if length < self._shortest:
            return [], 0
        after = self._text[int(ends[-1]) + 1 : self.size]
        if length >= after.size:
            after = np.resize(after, count)  # again and again
        return after[:count].tolist(), length

    def _entries(self, start: int, stop: int) -> NDArray[np.uint64]:
        """Of the n-grams whose last positions are `start … stop - 1`."""
        hashes = np.zeros(stop - start, np.uint64)
        for back in range(self._shortest):
            hashes = (hashes ^ self._text[start - back : stop - back].astype(np.uint64)) * _PRIME
        return (hashes & ~_POSITION) | np.arange(start, stop, dtype=np.uint64)

    def _candidates(self) -> NDArray[np.int64]:
        """Where the newest n-gram may stand earlier, in ascending order."""
        last = self.size - 1
        if last < self._shortest:
            return np.zeros(0, np.int64)
        entry = self._entries(last, last + 1) & ~_POSITION
        bounds = np.concatenate([entry, entry | _POSITION])
        found = []
        for segment in self._segments:
            low, high = segment.searchsorted(bounds)
            found.append(
                (segment[max(low, high - _CANDIDATES) : high] & _POSITION).astype(np.int64)
            )
        tail = self._text[self._sorted : last] == self._text[last]
        found.append(np.flatnonzero(tail) + self._sorted)
        ends = np.concatenate(found)[-_CANDIDATES:]
        return ends[ends < last]
