"""One text, a unit of work at a time: a piece of its prompt, or a round."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from ..drafters.protocol import Drafter
from ..policy import Costs
from ..session import Round, Session
from ..stopping import StopRules, TextStream
from ..targets import Target
from .jobs import Choice, Job, Piece, Progress, TokenLogprob
from .metrics import Totals
from .output import ChatOutput, Parts, PlainOutput


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The models of a server and how they are run. Of the worker's thread."""

    target: Target
    tokenizer: Any
    drafter: Drafter | None
    draft_name: str | None = None
    """For the status page."""
    costs: Costs | None = None
    """Of a round by width; None with a fixed block."""
    block_size: int | None = None
    """Inputs of a verify; None chooses them each round by `costs`."""
    prefill_step_size: int = 512
    """Most prompt tokens of a unit of work."""

    def session(self, choice: Choice) -> Session:
        """A fresh one."""
        return Session(
            self.target,
            self.drafter,
            block_size="auto" if self.block_size is None else self.block_size,
            costs=self.costs,
            sampling=choice.sampling,
            prefill_step_size=self.prefill_step_size,
        )


def work(engine: Engine, job: Job, totals: Totals) -> Generator[None, None, None]:
    """All choices of a job, one after the other; yields after each unit of work.

    Closing it leaves the session at what was delivered.
    """
    for choice in job.choices:
        yield from _one(engine, job, choice, totals)


def _one(engine: Engine, job: Job, choice: Choice, totals: Totals) -> Generator[None, None, None]:
    tokens = choice.prompt.tokens
    with engine.session(choice) as session:
        job.send(Progress(0, len(tokens)))
        for end in _pieces(0, len(tokens), engine.prefill_step_size):
            fed = len(session.tokens)
            session.prefill(tokens[fed:end])
            totals.prompt_tokens += end - fed
            job.send(Progress(end, len(tokens)))
            if end < len(tokens):
                yield
        text = TextStream(_detokenizer(engine.tokenizer, choice), choice.stop)
        rules = StopRules(engine.tokenizer.eos_token_ids, text, choice.max_tokens)
        output = (
            ChatOutput(
                engine.tokenizer, in_reasoning=choice.prompt.in_reasoning, tools=choice.tools
            )
            if choice.chat
            else PlainOutput()
        )
        piece = None
        while piece is None or piece.reason is None:
            yield
            result = session.round(rules.left)
            piece = _take(result, choice, rules, output, session, engine.tokenizer.eos_token_ids)
            if job.first_token is None:
                job.first_token = time.monotonic()
            if piece.reason is not None:
                job.stats.append(session.stats)
            job.completion_tokens += len(piece.marked)
            totals.count(result, len(piece.marked))
            job.send(piece)


def _pieces(done: int, total: int, step: int) -> Iterator[int]:
    """Where the pieces of a prompt end: at multiples of `step`, and at its end."""
    yield from range(done - done % step + step, total, step)
    yield total


def _detokenizer(tokenizer: Any, choice: Choice) -> Any:
    """A fresh one. A completion goes on from its prompt: no space is cut off at its beginning."""
    detokenizer = tokenizer.detokenizer
    if not choice.chat:
        detokenizer.add_token(choice.prompt.tokens[-1])
        detokenizer.last_segment  # noqa: B018  # marks it as seen
    return detokenizer


def _take(
    result: Round,
    choice: Choice,
    rules: StopRules,
    output: ChatOutput | PlainOutput,
    session: Session,
    ends: Collection[int],
) -> Piece:
    """What a round brings; a session that stops inside it is taken back to there."""
    piece = Piece(choice.index, drafted=len(result.drafts), accepted=result.accepted)
    for position, token in enumerate(result.tokens):
        text, reason = rules.feed(token)
        parts = output.push(text)
        _add(piece, parts)
        piece.marked.append((text, position < result.accepted))
        if reason is None and choice.one_call and output.calls:
            reason = "stop"
        if reason is not None:
            _add(piece, output.finish())
            called = reason == "stop" and output.calls
            piece.reason = "tool_calls" if called else reason
            break
    session.rewind(len(piece.marked))
    if choice.top_logprobs is not None:
        piece.logprobs = _logprobs(result, len(piece.marked), choice.top_logprobs)
        if piece.reason is not None and result.tokens[len(piece.marked) - 1] in ends:
            piece.logprobs.pop()  # it has no text, and OpenAI's lists do not hold it
    return piece


def _add(piece: Piece, parts: Parts) -> None:
    piece.content += parts.content
    piece.reasoning += parts.reasoning
    piece.tool_calls += parts.tool_calls


def _logprobs(result: Round, count: int, top: int) -> list[TokenLogprob]:
    """Of the first `count` tokens; the lower id goes first where two are equal."""
    logits = result.logits[:count].astype(mx.float32)
    rows = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(rows, mx.array(result.tokens[:count])[:, None], axis=-1)
    best = mx.argsort(-rows, axis=-1)[:, :top]
    values = mx.take_along_axis(rows, best, axis=-1)
    return [
        TokenLogprob(token, value, list(zip(ids, logs, strict=True)))
        for token, value, ids, logs in zip(
            result.tokens[:count],
            cast("list[float]", chosen[:, 0].tolist()),
            cast("list[list[int]]", best.tolist()),
            cast("list[list[float]]", values.tolist()),
            strict=True,
        )
    ]
