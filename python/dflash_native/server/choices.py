"""One text, a unit of work at a time: a piece of its prompt, or a round."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator
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
from .prefix_cache import PrefixCache
from .prompts import Prompt


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
    prefix_cache: PrefixCache | None = None

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

    def recall(self, session: Session, prompt: Prompt, totals: Totals) -> int:
        """Bring a fresh session as far into the prompt as is known; how many tokens that saves."""
        if self.prefix_cache is None:
            return 0
        covered = self.prefix_cache.restore(session, prompt.tokens)
        totals.cached_tokens += covered
        totals.cache = self.prefix_cache.stats
        return covered

    def stops(self, covered: int, prompt: Prompt) -> list[int]:
        """Where the reading of a prompt should pause for a checkpoint."""
        if self.prefix_cache is None:
            return []
        return self.prefix_cache.stops(covered, len(prompt.tokens), prompt.boundaries)

    def remember(self, session: Session, totals: Totals) -> None:
        """Keep a checkpoint of where a session stands."""
        if self.prefix_cache is not None:
            self.prefix_cache.add(session)
            totals.cache = self.prefix_cache.stats


def work(engine: Engine, job: Job, totals: Totals) -> Generator[None, None, None]:
    """All choices of a job, one after the other; yields after each unit of work.

    Closing it leaves the session at what was delivered.
    """
    counted: set[int] = set()
    for choice in job.choices:
        prompt = choice.prompt
        with engine.session(choice) as session:
            cached = engine.recall(session, prompt, totals)
            if id(prompt) not in counted:  # as in `Job.prompt_tokens`
                counted.add(id(prompt))
                job.cached_tokens += cached
            try:
                yield from _read(engine, job, prompt, session, totals)
                yield from _write(engine, job, choice, session, totals)
            except GeneratorExit:  # the client has left; its chat may go on
                engine.remember(session, totals)
                raise
            engine.remember(session, totals)


def _read(
    engine: Engine, job: Job, prompt: Prompt, session: Session, totals: Totals
) -> Generator[None, None, None]:
    """The prompt, as far as the session does not have it yet."""
    tokens = prompt.tokens
    covered = len(session.tokens)
    totals.prompt_tokens += covered
    job.send(Progress(covered, len(tokens)))
    keep = engine.stops(covered, prompt)
    for end in _ends(covered, len(tokens), engine.prefill_step_size, keep):
        fed = len(session.tokens)
        session.prefill(tokens[fed : end + 1])
        totals.prompt_tokens += len(session.tokens) - fed
        if end in keep:
            engine.remember(session, totals)
        job.send(Progress(len(session.tokens), len(tokens)))
        if end < len(tokens) - 1:
            yield


def _ends(covered: int, length: int, step: int, keep: Collection[int]) -> list[int]:
    """How many tokens are covered after each piece of a prompt of `length` tokens, the last one of
    which stays pending: multiples of `step`, so that a piece is the same whatever was cached, and
    where a checkpoint is taken.
    """
    end = length - 1
    return sorted({*range(covered - covered % step + step, end, step), *keep, end})


def _write(
    engine: Engine, job: Job, choice: Choice, session: Session, totals: Totals
) -> Generator[None, None, None]:
    """The answer, round by round."""
    text = TextStream(_detokenizer(engine.tokenizer, choice), choice.stop)
    ends = engine.tokenizer.eos_token_ids
    rules = StopRules(ends, text, choice.max_tokens)
    inside = choice.prompt.in_reasoning
    output: ChatOutput | PlainOutput = PlainOutput()
    if choice.chat:
        output = ChatOutput(engine.tokenizer, in_reasoning=inside, tools=choice.tools)
    piece = None
    while piece is None or piece.reason is None:
        yield
        result = session.round(rules.left)
        piece = _take(result, choice, rules, output, session, ends)
        if job.first_token is None:
            job.first_token = time.monotonic()
        if piece.reason is not None:
            job.stats.append(session.stats)
        job.completion_tokens += len(piece.marked)
        totals.count(result, len(piece.marked))
        job.send(piece)


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
