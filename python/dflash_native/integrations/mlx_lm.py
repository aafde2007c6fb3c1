"""Hybrid models whose caches mlx-lm can trim, so that its own speculative decoding runs on them.

    model = TrimmableModel(loaded)
    stream_generate(model, tokenizer, prompt, draft_model=draft)  # mlx-lm's

Stock mlx-lm refuses a recurrent state, which cannot be cut like a KV cache. Here each call is a
verify on trial: `trim` says how much of it stays, and the next call commits that from the tape.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..cache import AttentionCache, Cache
from ..targets import Target


class _Call(NamedTuple):
    """An earlier call that a trim may still reach."""

    restore: Callable[[], None]
    """Takes the cache back to just after it, its inputs on trial."""
    kept: int
    """Of its inputs, those that were not trimmed."""


class TrimmableCache:
    """One request's cache for the whole stack of layers, in the protocol of mlx-lm's caches.

    `TrimmableModel.make_cache` makes it. Until a trim has decided, each call of one input holds
    the recurrent states from before it, at most `max_trim` sets of them; from the first call after
    a trim, what stood before the trim is final. `copy.deepcopy` gives an independent cache of
    which the last call can be trimmed. What mlx-lm's `save_prompt_cache` writes of it cannot be
    loaded again: `load_prompt_cache` knows mlx-lm's own classes alone.
    """

    def __init__(self, cache: Cache, max_trim: int) -> None:
        self._cache = cache
        self._max_trim = max_trim
        self._kept = 0
        """Of the last call's inputs on trial, those that were not trimmed."""
        self._earlier: list[_Call] = []
        self._decided = False
        """Whether there was a trim since the last call."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TrimmableCache:
        copied = TrimmableCache(copy.deepcopy(self._cache, memo), self._max_trim)
        copied._kept, copied._decided = self._kept, self._decided
        return copied

    @property
    def offset(self) -> int:
        """Inputs held, those on trial included."""
        return self._cache.lengths[0] + self._kept

    @property
    def trimmable(self) -> int:
        """Inputs that `trim` can still take away."""
        return self._kept + sum(call.kept for call in self._earlier)

    @property
    def state(self) -> list[mx.array]:
        """Every array held, for `mx.eval` or to keep. It cannot be set."""
        for layer in self._cache.layers:
            if isinstance(layer, AttentionCache):
                layer.hand_out()
        return self._cache.arrays()

    @property
    def nbytes(self) -> int:
        """Bytes of `state`: what earlier calls hold for a trim comes on top."""
        return self._cache.nbytes

    def size(self) -> int:
        """Inputs held, as `offset`."""
        return self.offset

    def empty(self) -> bool:
        """Whether no input is held."""
        return self.offset == 0

    def is_trimmable(self) -> bool:
        """True: how far, says `trimmable`."""
        return True

    def trim(self, n: int) -> int:
        """Take away the newest `n` inputs and return `n`; 0 says that all of them stay.

        Raises ValueError unless `n` is 0 … `trimmable`; the cache is then as it was.
        """
        n = operator.index(n)
        if not 0 <= n <= self.trimmable:
            raise ValueError(
                f"[trim] expected 0 … {self.trimmable} inputs, those of the last calls that are "
                f"not final, but got {n}: give TrimmableModel a max_trim of the most drafts."
            )
        left = n
        while left > self._kept:
            left -= self._kept
            restore, self._kept = self._earlier.pop()
            restore()
        self._kept -= left
        self._decided = True
        return n

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> NoReturn:
        """Raises ValueError: mlx-lm calls it for `kv_bits`."""
        raise ValueError(
            "[TrimmableCache] expected no kv_bits: a quantised KV cache is not supported."
        )

    def _run(self, target: Target, tokens: mx.array) -> mx.array:
        """Commit what is on trial and run `tokens [1, T]` after it: `[1, T, H]`."""
        take_back = self._cache.snapshot()
        on_trial = self._cache.uncommitted is not None
        keeps_trial = tokens.shape[1] <= self._max_trim + 1
        try:
            if on_trial:
                self._cache.commit([self._kept])
            hidden, _ = target.forward(tokens, self._cache, commit=not keeps_trial)
        except BaseException:
            take_back()
            raise
        kept, earlier = 0, []
        if keeps_trial:
            kept = tokens.shape[1]
            if on_trial and not self._decided:
                earlier = [*self._earlier, _Call(take_back, self._kept)]
        while earlier and kept + sum(call.kept for call in earlier[1:]) >= self._max_trim:
            del earlier[0]
        self._kept, self._earlier, self._decided = kept, earlier, False
        return hidden


class TrimmableModel:
    """A loaded model in the shape in which mlx-lm calls its own, with caches that can be trimmed.

    mlx-lm's `generate`, `stream_generate`, `generate_step` and `speculative_generate_step` take it
    as `model`, and as `draft_model` too. The model is read, never changed.

    Args:
        model: of a family in `dflash_native.targets.FAMILIES`, or a `Target` over one. A bare model
            becomes `Target(model, prefill="exact")`: bits then depend on the tokens alone, and
            speculative and plain decoding by this object agree in all of them. mlx-lm reads prompts
            in chunks of 512 in the one and 2048 in the other, so a target that reads them "fast"
            on a GPU agrees only with the same `prefill_step_size`.
        max_trim: the most inputs that a trim will take away, at least mlx-lm's num_draft_tokens. A
            call of more than `max_trim` + 1 inputs is taken for a part of a prompt, and is final.

    mlx-lm itself drops `max_kv_size`, as for every model that makes its own caches: the cache is
    never cut. Raises ValueError where `Target` does, and for a negative `max_trim`.
    """

    def __init__(self, model: Module | Target, *, max_trim: int = 8) -> None:
        if max_trim < 0:
            raise ValueError(
                f"[TrimmableModel] expected max_trim of at least 0 but got {max_trim}."
            )
        self.target = model if isinstance(model, Target) else Target(model, prefill="exact")
        self.max_trim = max_trim

    @property
    def layers(self) -> list[Target]:
        """One entry, the whole stack: mlx-lm expects as many caches as layers."""
        return [self.target]

    def make_cache(self) -> list[TrimmableCache]:
        """An empty cache, in a list as mlx-lm wants it."""
        return [TrimmableCache(self.target.make_cache(1), self.max_trim)]

    def __call__(self, inputs: mx.array, cache: list[TrimmableCache] | None = None) -> mx.array:
        """Logits `[1, T, V]` of int `inputs [1, T]` after those that `cache` holds, lazily.

        The inputs join `cache`; without one nothing is kept. Raises ValueError for more rows than
        one, TypeError for a cache that `make_cache` did not make; the cache is then as it was.
        """
        if inputs.ndim != 2 or inputs.shape[0] != 1:
            raise ValueError(
                f"[TrimmableModel] expected inputs [1, T], one request, but got {inputs.shape}."
            )
        if cache is None:
            cache = self.make_cache()
        if len(cache) != 1 or not isinstance(cache[0], TrimmableCache):
            kinds = ", ".join(type(entry).__name__ for entry in cache)
            raise TypeError(
                f"[TrimmableModel] expected the one cache of make_cache but got [{kinds}]."
            )
        return self.target.logits(cache[0]._run(self.target, inputs))
