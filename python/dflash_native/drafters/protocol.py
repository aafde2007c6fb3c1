"""What a drafter is to the loop: two small protocols, one for the weights and one for a request.

A round calls `observe`, then `propose`; the target's verdict shows in the tokens of the next
`observe`. Whatever a drafter proposes changes how many tokens a round emits, never which. The
docs/decoding.md has a drafter of one's own in thirty lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import mlx.core as mx

from ..sampling import Sampler


class TargetLike(Protocol):
    """The part of a target that a drafter uses. `dflash_native.targets.Target` has it."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    dtype: mx.Dtype

    def embed(self, tokens: mx.array) -> mx.array:
        """`tokens [B, T]` int to `[B, T, H]`, with the target's own embedding scale."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """`hidden [B, T, H]` (after a final norm) to `[B, T, V]`: the LM head or the tied table."""
        ...


@dataclass(frozen=True)
class Proposal:
    """Drafts that were drawn at random: accepted by the ratio of target to proposal."""

    tokens: mx.array
    """int32 `[1, n]`."""

    probabilities: mx.array
    """fp32 `[n, V]`: what each token was drawn from."""


@runtime_checkable
class DraftSession(Protocol):
    """A drafter's state for one request. Every call is lazy: nothing here waits for the device."""

    @property
    def finite(self) -> mx.array | None:
        """Bool [], lazy: whether the first proposal's logits were all finite. None before it, and
        where there are no logits.
        """
        ...

    def observe(self, tokens: Sequence[int]) -> None:
        """Told before each proposal: the tokens that were committed since, the pending one last.

        They are final. None at all where the last round was taken back after an error: the next
        proposal is then for the same position again.
        """
        ...

    def extend(self, taps: mx.array, position: int) -> None:
        """Append committed context. Not called where `tap_layers` is empty.

        `taps [1, n, len(tap_layers) * H]` belong to the positions `position … position + n - 1`,
        which follow what came before. Where `context_rows` is set, a call (also the first) may
        skip positions that the next proposal cannot see: older context is then dropped.
        """
        ...

    def propose(
        self, pending: mx.array, position: int, count: int, sampler: Sampler | None = None
    ) -> mx.array | Proposal:
        """Draft tokens for the positions from `position + 1` on: int32 `[1, n]`, n in 0 … `count`.

        The round verifies 1 + n inputs, so a drafter that knows little asks for little: with n = 0
        it is a plain step.

        `pending [1, 1]` int is the committed token at `position`, which is in no context yet.
        `sampler` is what the target draws with, None where it takes the argmax. However tokens were
        chosen, the answer is a point: a draft is accepted where the target draws the same token. Or
        it is a `Proposal`, for tokens that were drawn from probabilities with noise of a `use` of
        their own.
        """
        ...

    def arrays(self) -> list[mx.array]:
        """Everything that a caller evaluates to cut the lazy graph."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """What a `DraftSession` may have besides, so that checkpoints hold its context.

    Without it a restored session's draft is a fresh one: its first `observe` brings every token,
    and its first `extend` the positions after the checkpoint.
    """

    def context(self, length: int) -> dict[str, mx.array]:
        """What it keeps of the first `length` committed tokens, lazily, dead rows left out.

        Called after an `observe` of all tokens and an `extend` up to `length`. The arrays may share
        memory with this session: the caller copies them. Empty where there is nothing to keep.
        """
        ...

    def resume(self, context: Mapping[str, mx.array], tokens: Sequence[int]) -> None:
        """On a fresh session: go on after `tokens`, which count as observed and extended.

        `context` is what `context(len(tokens))` gave; it stays as it is. Raises ValueError for
        anything that is not this drafter's, and the session is then still fresh.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """A drafter's weights and what it needs from the target."""

    tap_layers: tuple[int, ...]
    """0-based target layers whose outputs it reads, in the order of their columns."""

    context_rows: int | None
    """The most committed rows, newest first, that it can use. None: all of them. 0 without taps."""

    max_drafts: int
    """The most tokens one `propose` gives."""

    def begin(self, target: TargetLike) -> DraftSession:
        """A fresh session for one request. Raises ValueError where draft and target do not fit."""
        ...
