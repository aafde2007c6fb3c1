"""Where a session stands, in arrays of its own, and a fresh session that goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .cache import Cache
from .drafters.protocol import DraftSession, Resumable
from .targets import Target

_CACHE, _DRAFT = "cache.", "draft."


@dataclass(frozen=True)
class Checkpoint:
    """What a session needs to go on after `tokens`: all of it belongs to one position (C3).

    `Session.checkpoint` makes one and `Session.restore` takes it. It may be kept as long as wanted,
    restored any number of times, and saved by `mx.save_safetensors` or otherwise.
    """

    tokens: tuple[int, ...]
    """Those that the caches cover: the pending token is not among them."""

    arrays: dict[str, mx.array]
    """Evaluated. `cache.{layer}.keys` and `.values` `[1, Hkv, len(tokens), D]`, `.window`
    `[1, K-1, C]` and `.state` `[1, Hv, Dv, Dk]` fp32; `draft.…` is the drafter's own context."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


class Unfit(ValueError):
    """A checkpoint of another target or another drafter."""


def take_checkpoint(tokens: Sequence[int], cache: Cache, draft: DraftSession | None) -> Checkpoint:
    """Of a cache that covers `tokens`, and of a draft that was told and fed as many; lazily.

    Raises ValueError without tokens.
    """
    if not tokens:
        raise ValueError("[checkpoint] expected a prefill before it but no token is covered yet.")
    found = {_CACHE + name: array for name, array in cache.export().items()}
    if isinstance(draft, Resumable):
        context = draft.context(len(tokens))
        found |= {_DRAFT + name: array for name, array in context.items()}
    # A slice keeps all of its buffer alive.
    return Checkpoint(tuple(tokens), {name: mx.contiguous(a) for name, a in found.items()})


def load_checkpoint(checkpoint: Checkpoint, target: Target, draft: DraftSession | None) -> Cache:
    """A cache that holds the checkpoint's; a draft that can resumes from its context.

    Raises Unfit for arrays that do not fit, and the draft is then still fresh.
    """
    parts: dict[str, dict[str, mx.array]] = {_CACHE: {}, _DRAFT: {}}
    for name, array in checkpoint.arrays.items():
        prefix = name[: name.find(".") + 1]
        if prefix not in parts:
            raise Unfit(f"[restore] expected cache.… and draft.… but got an array {name!r}.")
        parts[prefix][name.removeprefix(prefix)] = array
    try:
        cache = target.load_cache(parts[_CACHE], len(checkpoint.tokens))
        if isinstance(draft, Resumable):
            draft.resume(parts[_DRAFT], checkpoint.tokens)
    except ValueError as error:
        raise Unfit(str(error)) from error
    return cache
