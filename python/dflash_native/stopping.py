"""When a generation ends, and the text it may show until then."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

from ._arguments import integer

Reason = Literal["stop", "length"]


class TextStream:
    """Turns tokens into text segments, holding back what may become a stop string.

    Args:
        detokenizer: a fresh streaming detokenizer of mlx-lm (`tokenizer.detokenizer`); it holds
            back the bytes of an unfinished character.
        stop: texts that end the generation; they and what follows are never shown.
    """

    def __init__(self, detokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """The text that `token` sets free, and whether a stop string is now complete."""
        self._detokenizer.add_token(token)
        return self._release(self._detokenizer.last_segment, final=False)

    def finish(self) -> tuple[str, bool]:
        """The text still held, and whether a stop string was completed by it."""
        self._detokenizer.finalize()
        return self._release(self._detokenizer.last_segment, final=True)

    def _release(self, segment: str, *, final: bool) -> tuple[str, bool]:
        text = self._held + segment
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class StopRules:
    """The rules in their order: an end token, a stop string, the budget; the first position wins.

    Args:
        eos_token_ids: every id that ends the text.
        text: the stream that knows the stop strings.
        max_tokens: the budget, at least 1, or -1 for none.
    """

    def __init__(self, eos_token_ids: Collection[int], text: TextStream, max_tokens: int) -> None:
        max_tokens = integer("generate", "max_tokens", max_tokens)
        if max_tokens == 0 or max_tokens < -1:
            raise ValueError(
                f"[generate] expected max_tokens of at least 1 (-1: no limit) but got {max_tokens}."
            )
        self._eos = frozenset(eos_token_ids)
        self._text = text
        self._max_tokens = max_tokens
        self.count = 0
        """Tokens seen."""

    @property
    def left(self) -> int | None:
        """Tokens that the budget still allows, or None."""
        return None if self._max_tokens < 0 else self._max_tokens - self.count

    def feed(self, token: int) -> tuple[str, Reason | None]:
        """The text to show for `token`, and why it is the last one, if it is.

        An end token counts as a token and has no text.
        """
        self.count += 1
        reason: Reason | None = None
        text = ""
        if token in self._eos:
            reason = "stop"
        else:
            text, stopped = self._text.push(token)
            if stopped:
                return text, "stop"
            if self.left == 0:
                reason = "length"
        if reason is not None:
            rest, stopped = self._text.finish()
            text += rest
            reason = "stop" if stopped else reason
        return text, reason
