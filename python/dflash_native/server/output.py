"""Generated text to content, reasoning and tool calls, the same whether it is streamed or not."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine


@dataclass
class Parts:
    """What one piece of text came to."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """In OpenAI's shape, each complete."""


class PlainOutput:
    """Of a completion: all is content."""

    calls = 0

    def push(self, text: str) -> Parts:
        """The text as it is."""
        return Parts(content=text)

    def finish(self) -> Parts:
        """Nothing is held back."""
        return Parts()


class ChatOutput:
    """Of a chat: mlx-lm's marks of reasoning and tool calls, and the tokenizer's own tool parser.

    Text between the marks of a call that is no call (cut off, no JSON, or no tools were offered)
    is content, marks included: nothing is lost.
    """

    def __init__(
        self, tokenizer: Any, *, in_reasoning: bool, tools: Sequence[dict[str, Any]]
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools)
        machine = make_text_state_machine(tokenizer)
        initial = tokenizer.response_initial_state or "normal"
        self._state = machine.make_state("reasoning" if in_reasoning else initial)
        self._inside = self._state[0]
        self._call = ""
        self.calls = 0
        """Tool calls so far."""

    def push(self, text: str) -> Parts:
        """What `text` sets free; the beginning of a mark is held back."""
        parts = Parts()
        self._state, segments = TextStateMachine.split(self._state, text)
        for state, segment in segments:
            self._enter(state, parts)
            self._take(segment, parts)
        return parts

    def finish(self) -> Parts:
        """What was held back, a call that was cut off included."""
        parts = Parts()
        self._state, held, _ = TextStateMachine.flush(self._state)
        self._take(held, parts)
        if self._inside == "tool":
            parts.content += self._tokenizer.tool_call_start + self._call
        return parts

    def _enter(self, state: str, parts: Parts) -> None:
        if self._inside == "tool" and state != "tool":
            self._end_call(parts)
        self._inside = state

    def _take(self, segment: str, parts: Parts) -> None:
        if self._inside == "tool":
            self._call += segment
        elif self._inside == "reasoning":
            parts.reasoning += segment
        else:
            parts.content += segment

    def _end_call(self, parts: Parts) -> None:
        text, self._call = self._call, ""
        calls = _parsed(self._tokenizer, text, self._tools) if self._tools else None
        if calls is None:
            start, end = self._tokenizer.tool_call_start, self._tokenizer.tool_call_end
            parts.content += start + text + (end or "")
            return
        for call in calls:
            parts.tool_calls.append({"index": self.calls, **call})
            self.calls += 1


def _parsed(
    tokenizer: Any, text: str, tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]] | None:
    """The calls in OpenAI's shape, or None where the parser finds none."""
    try:
        found = tokenizer.tool_parser(text, tools)
    except Exception:  # parsers are one file a model, and each fails in its own way
        return None
    calls = found if isinstance(found, list) else [found]
    shaped = [_shaped(call) for call in calls]
    return None if not shaped or None in shaped else [call for call in shaped if call]


def _shaped(call: Any) -> dict[str, Any] | None:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    identity = call.get("id") or f"call_{uuid.uuid4().hex[:24]}"
    function = {"name": call["name"], "arguments": arguments}
    return {"id": str(identity), "type": "function", "function": function}
