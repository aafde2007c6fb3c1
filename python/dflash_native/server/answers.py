"""Pieces and totals of a job in OpenAI's shapes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from .jobs import Job, Piece, TokenLogprob

_LEAST = -9999.0
"""OpenAI's number for a probability of zero, since JSON has no infinity."""
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


class Answer:
    """One response: its id, its time, and the form of its endpoint.

    `reasoning_content` is the field that Open WebUI, Continue and OpenCode read; `reasoning` holds
    the same for clients that know it by that name, as mlx-lm has it.
    """

    def __init__(self, tokenizer: Any, model: str, *, chat: bool, marks: bool = False) -> None:
        self._tokenizer, self._chat, self._marks = tokenizer, chat, marks
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._offsets: dict[int, int] = {}
        """Characters of the logprobs' tokens so far, by choice: completions tell them."""

    @property
    def id(self) -> str:
        """Of the response."""
        return str(self._head["id"])

    def opening(self, choice: int) -> dict[str, Any] | None:
        """A chat's first chunk; completions have none."""
        if not self._chat:
            return None
        return self._chunk(choice, {"role": "assistant", "content": ""})

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """A round's chunk; the last one of a choice has its finish_reason."""
        logprobs = self._logprobs(piece.choice, piece.logprobs) if piece.logprobs else None
        delta = self._message(piece) if self._chat else {}
        found = self._chunk(piece.choice, delta, piece.content, piece.reason, logprobs)
        if self._marks:
            found["speculation"] = {
                "drafted": piece.drafted,
                "accepted": piece.accepted,
                "tokens": [{"text": text, "draft": draft} for text, draft in piece.marked],
            }
        return found

    def closing(self, job: Job) -> dict[str, Any]:
        """The chunk with the usage, which has no choices."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [], "usage": usage(job)}

    def whole(self, pieces: Sequence[Piece], job: Job) -> dict[str, Any]:
        """The response that is not streamed."""
        choices = []
        for index in range(len(job.choices)):
            mine = [piece for piece in pieces if piece.choice == index]
            all_of = Piece(
                index,
                content="".join(piece.content for piece in mine),
                reasoning="".join(piece.reasoning for piece in mine),
                tool_calls=[call for piece in mine for call in piece.tool_calls],
                logprobs=[each for piece in mine for each in piece.logprobs],
            )
            wanted = job.choices[index].top_logprobs is not None
            choice: dict[str, Any] = {
                "index": index,
                "finish_reason": mine[-1].reason,
                "logprobs": self._logprobs(index, all_of.logprobs) if wanted else None,
            }
            if self._chat:
                calls = [
                    {name: value for name, value in call.items() if name != "index"}
                    for call in all_of.tool_calls
                ]
                message = {"role": "assistant", "content": None, **self._message(all_of)}
                if calls:
                    message["tool_calls"] = calls
                elif message["content"] is None:
                    message["content"] = ""
                choice["message"] = message
            else:
                choice["text"] = all_of.content
            choices.append(choice)
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage(job)}

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        text: str = "",
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        body = {"delta": delta} if self._chat else {"text": text}
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        shape = {"index": choice, **body, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "object": kind, "choices": [shape]}

    def _message(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {}
        if piece.content:
            message["content"] = piece.content
        if piece.reasoning:
            message["reasoning_content"] = message["reasoning"] = piece.reasoning
        if piece.tool_calls:
            message["tool_calls"] = piece.tool_calls
        return message

    def _logprobs(self, choice: int, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self._chat:
            return {"content": [self._entry(each) for each in found], "refusal": None}
        tokens = [self._text(each.token) for each in found]
        start = self._offsets.get(choice, 0)
        offsets = [start + sum(map(len, tokens[:i])) for i in range(len(tokens) + 1)]
        self._offsets[choice] = offsets.pop()
        return {
            "tokens": tokens,
            "token_logprobs": [max(each.logprob, _LEAST) for each in found],
            "top_logprobs": [
                {self._text(token): max(value, _LEAST) for token, value in reversed(each.top)}
                for each in found
            ],
            "text_offset": offsets,
        }

    def _entry(self, found: TokenLogprob) -> dict[str, Any]:
        entry = self._token(found.token, found.logprob)
        return {**entry, "top_logprobs": [self._token(*each) for each in found.top]}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": self._bytes(token, text)}

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def _bytes(self, token: int, text: str) -> list[int] | None:
        """Of a byte-level vocabulary also where a token is a part of a character."""
        if "\ufffd" not in text:
            return list(text.encode())
        stored = self._tokenizer.convert_ids_to_tokens(token)
        found = [_BYTE_OF.get(character) for character in stored or ""]
        return None if None in found else [byte for byte in found if byte is not None]


def usage(job: Job) -> dict[str, Any]:
    """Tokens read and delivered, and what speculation did for them."""
    stats = job.stats
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    rounds, tokens = sum(s.rounds for s in stats), sum(s.tokens for s in stats)
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": job.completion_tokens,
        "total_tokens": job.prompt_tokens + job.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
        "speculation": {
            "rounds": rounds,
            "tokens_per_round": round(tokens / rounds, 3) if rounds else 0.0,
            "drafted": drafted,
            "accepted": accepted,
            "acceptance": round(accepted / drafted, 4) if drafted else 0.0,
            "drafted_at": _sums([s.drafted_at for s in stats]),
            "accepted_at": _sums([s.accepted_at for s in stats]),
            "exact": job.exact,
        },
    }


def _sums(lists: Sequence[Sequence[int]]) -> list[int]:
    longest = max(map(len, lists), default=0)
    return [sum(each[i] for each in lists if i < len(each)) for i in range(longest)]
