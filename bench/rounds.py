"""A round of drafting and verifying, built by hand of the parts that `Session` uses.

By hand, so that it can be stopped between its parts, started at any context without a prompt to
read, and told how many drafts to accept. `check` holds it to the session's tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from dflash_native import Cache, Session, Target
from dflash_native.drafters import DFlashDrafter

from .forwards import copied

CHUNK = 1024
"""Rows of taps that the draft reads at once."""


class Rounds:
    """Rounds of one target and draft after `source`'s context."""

    def __init__(self, target: Target, drafter: DFlashDrafter, source: Cache) -> None:
        self.target, self.drafter = target, drafter
        self.cache = copied(target, source)
        self.draft = drafter.begin(target)
        self.pending = mx.array([[1]], dtype=mx.int32)

    def fill_draft(self) -> None:
        """Give the draft random taps of the context, so far as it can see it."""
        end, reach = self.cache.lengths[0], self.drafter.context_rows
        columns = len(self.drafter.tap_layers) * self.target.hidden_size
        start = 0 if reach is None else max(0, end - reach)
        for first in range(start, end, CHUNK):
            rows = min(CHUNK, end - first)
            taps = mx.random.normal((1, rows, columns)).astype(self.target.dtype)
            self.draft.extend(taps, first)
            mx.eval(self.draft.arrays())

    def prefill(self, tokens: list[int]) -> None:
        """Read a prompt as a session does; the last token stays pending."""
        fed = mx.array([tokens[:-1]], dtype=mx.int32)
        _, taps = self.target.forward(
            fed, self.cache, commit=True, tap_layers=self.drafter.tap_layers
        )
        self.draft.extend(taps, 0)
        self.pending = mx.array([[tokens[-1]]], dtype=mx.int32)
        mx.eval(self.cache.arrays(), self.draft.arrays())

    def round(
        self,
        width: int,
        accepted: int | None = None,
        after: Callable[[str, Any], None] | None = None,
    ) -> list[int]:
        """One round of `width` inputs; its tokens.

        `accepted` drafts are taken whether they agree or not. `after(part, array)` is called where
        "built draft", "draft", "built verify", "verify" and "committed" are done, with what an
        evaluation of that part has to reach.
        """
        tell = after or (lambda part, array: None)
        position = self.cache.lengths[0]
        drafts = self.draft.propose(self.pending, position, width - 1)
        tell("built draft", None)
        mx.async_eval(drafts)
        tell("draft", drafts)
        block = mx.concatenate([self.pending, drafts], axis=1)
        hidden, taps = self.target.forward(
            block, self.cache, commit=False, tap_layers=self.drafter.tap_layers
        )
        drawn = mx.argmax(self.target.logits(hidden)[0], axis=-1).astype(mx.int32)
        agreed = mx.cumprod((drawn[:-1] == drafts[0]).astype(mx.int32)).sum(keepdims=True)
        read = mx.concatenate([agreed, drafts[0], drawn])
        tell("built verify", None)
        count, *rest = read.tolist()
        tell("verify", read)
        count = count if accepted is None else accepted
        tokens = [*rest[:count], rest[width - 1 + count]]
        self.cache.commit([len(tokens)])
        self.draft.extend(taps[:, : len(tokens)], position)
        self.pending = mx.array([[tokens[-1]]], dtype=mx.int32)
        tell("committed", None)
        return tokens

    def timed(self, width: int, accepted: int) -> float:
        """Seconds of a round, from an idle device on."""
        mx.synchronize()
        start = time.perf_counter()
        self.round(width, accepted)
        return time.perf_counter() - start

    def parts(self, width: int, accepted: int) -> dict[str, float]:
        """Seconds of a round's parts, the device idle between them.

        "draft" and "verify" from the first call to the result; "host", which is in them, what
        Python and C++ take to build their graphs and to commit. "rollback" is what the replay of
        the last round, folded into a verify, adds to it (the verify of a second round, whose tape
        was replayed before, is subtracted), "replay" that replay by itself.
        """
        first, again = self._stopped(width, accepted), 0.0
        mx.synchronize()
        start = time.perf_counter()
        self.cache.flush()
        mx.eval(self.cache.arrays())
        again = time.perf_counter() - start
        second = self._stopped(width, accepted)
        return {**first, "rollback": first["verify"] - second["verify"], "replay": again}

    def _stopped(self, width: int, accepted: int) -> dict[str, float]:
        at: dict[str, float] = {}

        def after(part: str, array: mx.array | None) -> None:
            if array is not None:
                mx.eval(array)
                mx.synchronize()
            at[part] = time.perf_counter()

        mx.eval(self.cache.arrays(), self.draft.arrays())
        mx.synchronize()
        start = time.perf_counter()
        self.round(width, accepted, after)
        built = at["built draft"] - start + at["built verify"] - at["draft"]
        return {
            "draft": at["draft"] - start,
            "verify": at["verify"] - at["draft"],
            "host": built + at["committed"] - at["verify"],
        }


def check(target: Target, drafter: DFlashDrafter, width: int, rounds: int = 6) -> None:
    """Rounds by hand, whole and stopped, against a session's. Raises AssertionError."""
    prompt = [(7 * i + 1) % (target.vocab_size - 1) for i in range(24)]
    session = Session(target, drafter, block_size=width)
    session.prefill(prompt)
    whole, stopped = (Rounds(target, drafter, target.make_cache()) for _ in range(2))
    for each in (whole, stopped):
        each.prefill(prompt)

    def stop(part: str, array: mx.array | None) -> None:
        if array is not None:
            mx.eval(array)
            mx.synchronize()

    for _ in range(rounds):
        expected = session.round().tokens
        for name, found in (
            ("whole", whole.round(width)),
            ("stopped", stopped.round(width, None, stop)),
        ):
            if found != expected:
                raise AssertionError(
                    f"[rounds] expected a {name} round of {expected} but got {found}."
                )
