"""What passes between the server's loop and the worker: a job one way, events the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..sampling import Sampling
from ..session import Stats
from .prompts import Prompt

Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class TokenLogprob:
    """Of one emitted token, after penalties and before filters."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    """The most probable tokens, best first, as many as were asked for."""


@dataclass(frozen=True)
class Progress:
    """So many tokens of a prompt were read; the first one of a job says that it was begun."""

    done: int
    total: int


@dataclass
class Piece:
    """What one round brought to one choice."""

    choice: int
    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    marked: list[tuple[str, bool]] = field(default_factory=list)
    """The text that each token set free, and whether a draft brought the token."""
    drafted: int = 0
    accepted: int = 0
    reason: Reason | None = None
    """On a choice's last piece."""


@dataclass(frozen=True)
class Done:
    """Every choice is complete."""


@dataclass(frozen=True)
class Failed:
    """There will be no more: status, sentence and code as for an `ApiError`."""

    status: int
    message: str
    code: str | None = None


Event = Progress | Piece | Done | Failed


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One text to generate."""

    index: int
    prompt: Prompt
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    """How many beside the emitted one; None for no log probabilities at all."""
    chat: bool = True
    """Whether marks of reasoning and tool calls are read."""
    tools: tuple[dict[str, Any], ...] = ()
    """Those that may be called."""
    one_call: bool = False
    """The text ends after its first tool call."""


class Job:
    """One request: its choices, and how far they have come.

    Any thread may `cancel`; all else is the worker's. `deliver` is called on the worker's thread,
    and with Done or Failed last and once, unless the job was cancelled.
    """

    def __init__(
        self, choices: Sequence[Choice], timeout: float, deliver: Callable[[Event], None]
    ) -> None:
        self.choices = list(choices)
        self.arrived = time.monotonic()
        self.deadline = self.arrived + timeout
        self.first_token: float | None = None
        """When it came, by `time.monotonic()`."""
        self.completion_tokens = 0
        self.cached_tokens = 0
        """Of the prompts, those that the prefix cache brought."""
        self.stats: list[Stats] = []
        """Of the sessions that are complete."""
        self.exact = True
        self.ended = False
        self._deliver = deliver
        self._cancelled = threading.Event()

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt once, however many choices it has."""
        lengths = {id(choice.prompt): len(choice.prompt.tokens) for choice in self.choices}
        return sum(lengths.values())

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ask the worker to leave it after the unit of work at hand."""
        self._cancelled.set()

    def send(self, event: Event) -> None:
        """Deliver an event, but nothing after the last one."""
        if self.ended or self.cancelled:
            return
        self.ended = isinstance(event, Done | Failed)
        self._deliver(event)
