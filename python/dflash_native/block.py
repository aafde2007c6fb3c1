"""One verify: the drafts that it judges, checked, and what the host reads of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from .drafters.protocol import DraftSession, Proposal
from .policy import Choice
from .rounds import Round
from .sampling import Sampler

_ROUNDING = 1e-3
"""By which a row of probabilities may miss 1: a large vocabulary's in fp32 misses it by less."""


@dataclass(frozen=True)
class Drafts:
    """At least one draft, in the shapes and dtypes of the protocol."""

    tokens: mx.array
    """int32 `[1, n]`, as they were given."""
    inputs: mx.array
    """The same, ids outside the vocabulary moved into it: no table is read beyond its end before
    the host has seen them and refused them."""
    probabilities: mx.array | None
    """fp32 `[n, V]`, where the target draws and these were drawn, too."""
    sound: mx.array
    """int32 `[2]`, lazy: whether the draft's first logits are finite, and whether the rows of
    `probabilities` are distributions."""


def drafts_of(
    draft: DraftSession, answer: mx.array | Proposal, count: int, vocab_size: int, draws: bool
) -> Drafts | None:
    """What `draft` proposed, None for nothing. `draws`: whether the target draws.

    Raises ValueError unless shapes and dtypes are those of `DraftSession.propose`. Values are on
    the device and not waited for: `Verify.outcome` sees them.
    """
    given = answer.tokens if isinstance(answer, Proposal) else answer
    tokens = _array("drafts", given, mx.int32, f"(1, n) with n in 0 … {count}")
    if tokens.ndim != 2 or tokens.shape[0] != 1 or tokens.shape[1] > count:
        raise _misfit("drafts", tokens, mx.int32, f"(1, n) with n in 0 … {count}")
    rows = tokens.shape[1]
    probabilities, summed = None, mx.array(True)
    if isinstance(answer, Proposal):
        wanted = f"({rows}, {vocab_size})"
        probabilities = _array("probabilities", answer.probabilities, mx.float32, wanted)
        if probabilities.shape != (rows, vocab_size):
            raise _misfit("probabilities", probabilities, mx.float32, wanted)
    if rows == 0:
        return None
    if not draws:
        probabilities = None  # whatever they were drawn from, they are points
    if probabilities is not None:
        near = mx.abs(probabilities.sum(axis=-1) - 1) < _ROUNDING
        summed = mx.all(near & (probabilities.min(axis=-1) >= 0))
    finite = mx.array(True)
    if draft.finite is not None:
        finite = _array("finite", draft.finite, mx.bool_, "()")
    sound = mx.stack([finite.reshape(()), summed]).astype(mx.int32)
    inputs = mx.clip(tokens, 0, vocab_size - 1)
    return Drafts(tokens, inputs, probabilities, sound)


def _array(name: str, given: object, dtype: mx.Dtype, shape: str) -> mx.array:
    if not isinstance(given, mx.array) or given.dtype != dtype:
        raise _misfit(name, given, dtype, shape)
    return given


def _misfit(name: str, given: object, dtype: mx.Dtype, shape: str) -> ValueError:
    kind = f"{given.dtype} {given.shape}" if isinstance(given, mx.array) else type(given).__name__
    return ValueError(
        f"[Session] expected {name} {_name(dtype)} {shape} but the drafter gave {kind}."
    )


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


@dataclass
class Verify:
    """What the host will read of a verify, and what a commit of its inputs needs."""

    position: int
    drafted: int
    read: mx.array
    """int32: `Drafts.sound`, the count of accepted drafts, the drafts, and the tokens in the place
    of each and after the last."""
    drawn: mx.array
    logits: mx.array
    taps: mx.array | None
    choice: Choice
    """Why it has this width, and how many rounds from this one on are plain, whatever they bring.
    """
    take_back: Callable[[], None] | None = None
    """In plain decoding, once the next step is queued: undoes this one, unless it was read."""

    def outcome(self, read: list[int]) -> Round:
        """The round that `read` tells. Raises ValueError for drafts that no drafter may give."""
        finite, summed, accepted, *rest = read
        drafts, drawn = rest[: self.drafted], rest[self.drafted :]
        if not finite:
            raise ValueError(
                "[Session] expected finite draft logits in the first block but got NaN or "
                "infinity: the draft's weights or its dtype are broken."
            )
        vocab_size = self.logits.shape[1]
        outside = [token for token in drafts if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(
                f"[Session] expected drafts in 0 … {vocab_size - 1} (the target's vocabulary) "
                f"but the drafter gave {outside[0]}."
            )
        if not summed:
            raise ValueError(
                "[Session] expected probabilities of at least 0 whose rows sum to 1 "
                "but the drafter gave others."
            )
        tokens = drafts[:accepted] + drawn[accepted : accepted + 1]
        return Round(tokens, drafts, accepted, self.logits[: accepted + 1])


def accept(
    logits: mx.array, drafts: Drafts | None, sampler: Sampler | None, position: int
) -> tuple[mx.array, mx.array]:
    """How many drafts stand, int32 `[1]`, and int32 `[n + 1]` the token in the place of each and
    after the last. `logits [n + 1, V]`, processed, are of the positions `position … position + n`.
    """
    if drafts is not None and drafts.probabilities is not None and sampler is not None:
        agreed, drawn = sampler.judge(logits, drafts.inputs[0], drafts.probabilities, position)
    else:
        if sampler is None:
            drawn = mx.argmax(logits, axis=-1).astype(mx.int32)
        else:
            drawn = sampler.draw(logits, position)
        if drafts is None:
            return mx.array([0], dtype=mx.int32), drawn
        agreed = drawn[:-1] == drafts.inputs[0]
    return mx.cumprod(agreed.astype(mx.int32)).sum(keepdims=True), drawn
