"""One verify on its way to the host: what is read of it, and how its drafts are judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from .sampling import Sampler


@dataclass
class Verify:
    """What the host will read of a verify, and what a commit of its inputs needs."""

    position: int
    drafted: int
    read: mx.array
    drawn: mx.array
    logits: mx.array
    taps: mx.array | None
    reason: str = "fixed"
    """Why it has this width."""
    plain_steps: int = 0
    """So many rounds from this one on are plain, whatever they bring."""
    take_back: Callable[[], None] | None = None
    """In plain decoding, once the next step is queued: undoes this one, unless it was read."""


def accept(
    logits: mx.array,
    drafts: mx.array | None,
    probabilities: mx.array | None,
    sampler: Sampler | None,
    position: int,
) -> tuple[mx.array, mx.array]:
    """How many drafts stand, int32 `[1]`, and the token in the place of each and after the last.

    `logits [n + 1, V]`, processed, for the positions `position … position + n`; `drafts [1, n]`,
    None for none, and the `probabilities [n, V]` that they were drawn from, if they were. The
    tokens are int32 `[n + 1]`.
    """
    if drafts is not None and probabilities is not None and sampler is not None:
        agreed, drawn = sampler.judge(logits, drafts[0], probabilities, position)
    else:
        if sampler is None:
            drawn = mx.argmax(logits, axis=-1).astype(mx.int32)
        else:
            drawn = sampler.draw(logits, position)
        if drafts is None:
            return mx.array([0], dtype=mx.int32), drawn
        agreed = drawn[:-1] == drafts[0]
    return mx.cumprod(agreed.astype(mx.int32)).sum(keepdims=True), drawn
