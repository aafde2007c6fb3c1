"""Two drafters in one: lookup where the text repeats itself, another one elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from ..sampling import Sampler
from .lookup import LookupDrafter, LookupSession
from .protocol import Drafter, DraftSession, Proposal, Resumable, TargetLike


class CombinedDrafter:
    """Takes the proposal of `lookup` where its match is long, and that of `other` elsewhere.

    Args:
        lookup: searches in every round, and backs off by itself.
        other: any drafter; it runs in the rounds that are left to it, and its context is fed in
            every round.
        match: tokens that must agree for the lookup's proposal to be taken.

    Raises TypeError for anything else, ValueError for a `match` that no search could reach.
    """

    def __init__(self, lookup: LookupDrafter, other: Drafter, *, match: int = 4) -> None:
        if not isinstance(lookup, LookupDrafter):
            raise TypeError(
                f"[CombinedDrafter] expected a LookupDrafter first but got {type(lookup).__name__}"
            )
        if not isinstance(other, Drafter):
            raise TypeError(
                f"[CombinedDrafter] expected a drafter second but got {type(other).__name__}"
            )
        if not 1 <= match <= lookup.longest:
            raise ValueError(
                f"[CombinedDrafter] expected match in 1 … {lookup.longest} (the lookup's longest) "
                f"but got {match}"
            )
        self.lookup, self.other, self.match = lookup, other, match
        self.model = getattr(other, "model", None)
        """The other one's weights, where it has any."""
        self.tap_layers = other.tap_layers
        self.context_rows = other.context_rows
        self.max_drafts = max(lookup.max_drafts, other.max_drafts)

    def begin(self, target: TargetLike) -> CombinedSession:
        """A fresh session for one request. Raises what `other` raises for a misfit."""
        return CombinedSession(self, self.lookup.begin(target), self.other.begin(target))


class CombinedSession:
    """One request of both."""

    def __init__(self, drafter: CombinedDrafter, lookup: LookupSession, other: DraftSession):
        self.lookup_rounds = 0
        """Proposals that were the lookup's."""
        self._drafter, self._lookup, self._other = drafter, lookup, other

    @property
    def finite(self) -> mx.array | None:
        """The other one's: a lookup has no logits."""
        return self._other.finite

    def observe(self, tokens: Sequence[int]) -> None:
        """Tell both."""
        self._lookup.observe(tokens)
        self._other.observe(tokens)

    def extend(self, taps: mx.array, position: int) -> None:
        """Feed the other one's context."""
        self._other.extend(taps, position)

    def context(self, length: int) -> dict[str, mx.array]:
        """The other one's: the lookup has the tokens."""
        return self._other.context(length) if isinstance(self._other, Resumable) else {}

    def resume(self, context: Mapping[str, mx.array], tokens: Sequence[int]) -> None:
        """Both go on after `tokens`."""
        if isinstance(self._other, Resumable):
            self._other.resume(context, tokens)
        else:
            self._other.observe(tokens)
        self._lookup.observe(tokens)

    def propose(
        self, pending: mx.array, position: int, count: int, sampler: Sampler | None = None
    ) -> mx.array | Proposal:
        """The lookup's drafts after a long match, else the other one's. Int32 `[1, n]`, n up to
        `count`."""
        drafter = self._drafter
        drafts = self._lookup.propose(
            pending, position, min(count, drafter.lookup.max_drafts), sampler
        )
        if drafts.shape[1] and self._lookup.match >= drafter.match:
            self.lookup_rounds += 1
            mx.async_eval(self._other.arrays())  # no proposal reaches its context
            return drafts
        return self._other.propose(pending, position, min(count, drafter.other.max_drafts), sampler)

    def arrays(self) -> list[mx.array]:
        """The other one's: the lookup has none."""
        return self._other.arrays()
