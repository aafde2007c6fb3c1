"""Requests to choices: limits are checked here, before anything is queued."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
from mlx_lm.sample_utils import make_frequency_penalty, make_presence_penalty

from ..sampling import LogitsProcessor, Sampling
from .errors import ApiError
from .jobs import Choice
from .prompts import Prompt, Prompts
from .schema import ChatRequest, CompletionRequest, GenerationRequest
from .settings import Settings

MOST_CHOICES = 16
"""Of one request: prompts times n."""
_WHOLE_TEXT = 2**31 - 1  # the most that MLX takes


class Planner:
    """Knows the model's limits and its tokenizer.

    Raises ApiError for requests that cannot be met as they stand. Not for two threads at once.
    """

    def __init__(self, settings: Settings, tokenizer: object, vocab_size: int) -> None:
        self._settings = settings
        self._prompts = Prompts(tokenizer, settings.max_context)
        self._vocab_size = vocab_size

    def chat(self, request: ChatRequest) -> list[Choice]:
        """The choices of `POST /v1/chat/completions`."""
        if request.top_logprobs is not None and not request.logprobs:
            raise _invalid("top_logprobs", "expected logprobs=true with it")
        both = (request.max_completion_tokens, request.max_tokens)
        if None not in both and both[0] != both[1]:
            raise _invalid("max_tokens", "expected the same as max_completion_tokens or neither")
        prompt = self._prompts.of_chat(request)
        offered = request.tools if request.tool_choice == "auto" else []
        tools = [tool.model_dump(exclude_none=True) for tool in offered]
        return [
            Choice(
                index=index,
                prompt=prompt,
                sampling=self._sampling(request, prompt, index),
                max_tokens=self._max_tokens(both[0] or both[1], prompt, "messages"),
                stop=_stops(request),
                top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
                tools=tuple(tools),
                one_call=bool(tools) and not request.parallel_tool_calls,
            )
            for index in range(request.n)
        ]

    def completion(self, request: CompletionRequest) -> list[Choice]:
        """The choices of `POST /v1/completions`: n for the first prompt, n for the next, ..."""
        given = request.prompt
        texts: list[str | list[int]] = []
        if isinstance(given, str) or not given or isinstance(given[0], int):
            texts.append(given)  # type: ignore[arg-type]  # one text, or the ids of one
        else:
            texts += given
        if len(texts) * request.n > MOST_CHOICES:
            raise _invalid(
                "prompt",
                f"expected at most {MOST_CHOICES} prompts times n but got "
                f"{len(texts)} times {request.n}",
            )
        prompts = [self._prompts.of_text(text) for text in texts]
        return [
            Choice(
                index=index,
                prompt=prompts[index // request.n],
                sampling=self._sampling(request, prompts[index // request.n], index),
                max_tokens=self._max_tokens(
                    request.max_tokens, prompts[index // request.n], "prompt"
                ),
                stop=_stops(request),
                top_logprobs=request.logprobs,
                chat=False,
            )
            for index in range(len(prompts) * request.n)
        ]

    def _max_tokens(self, asked: int | None, prompt: Prompt, name: str) -> int:
        """What was asked for, as far as the context allows it."""
        settings = self._settings
        length = len(prompt.tokens)
        room = settings.max_context - length
        if room < 1:
            raise ApiError(
                400,
                f"expected a prompt below {settings.max_context} tokens, the context of this "
                f"server, but got {length}",
                param=name,
                code="context_length_exceeded",
            )
        limit = settings.max_tokens
        if asked is not None and limit is not None and asked > limit:
            raise _invalid("max_tokens", f"expected at most {limit} but got {asked}")
        return min(asked or limit or room, room)

    def _sampling(self, request: GenerationRequest, prompt: Prompt, index: int) -> Sampling:
        temperature = request.temperature
        if request.top_k >= self._vocab_size:
            raise _invalid("top_k", f"expected below {self._vocab_size} but got {request.top_k}")
        penalty = request.repetition_penalty
        try:
            return Sampling(
                temperature=self._settings.temperature if temperature is None else temperature,
                top_p=request.top_p,
                min_p=request.min_p,
                top_k=request.top_k,
                repetition_penalty=None if penalty == 1 else penalty,
                repetition_context_size=request.repetition_context_size,
                logit_bias=self._logit_bias(request),
                logits_processors=_penalties(request, len(prompt.tokens)),
                # Each choice has noise of its own, which depends on the seed all the same.
                seed=None if request.seed is None else request.seed + index,
            )
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_value") from None

    def _logit_bias(self, request: GenerationRequest) -> dict[int, float] | None:
        bias = {}
        for name, value in request.logit_bias.items():
            sound = name.isascii() and name.isdigit() and len(name) < 10
            if not sound or int(name) >= self._vocab_size:
                raise _invalid(
                    "logit_bias",
                    f"expected token ids in 0 … {self._vocab_size - 1} but got {name[:40]!r}",
                )
            bias[int(name)] = value
        return bias or None


def _penalties(request: GenerationRequest, prompt_length: int) -> list[LogitsProcessor]:
    """OpenAI's two: of what was generated so far, all of it, and not of the prompt."""
    penalties = []
    if request.presence_penalty:
        penalties.append(make_presence_penalty(request.presence_penalty, _WHOLE_TEXT))
    if request.frequency_penalty:
        penalties.append(make_frequency_penalty(request.frequency_penalty, _WHOLE_TEXT))
    return [partial(_of_the_answer, penalty, prompt_length) for penalty in penalties]


def _of_the_answer(
    penalty: LogitsProcessor, prompt_length: int, tokens: mx.array, logits: mx.array
) -> mx.array:
    return penalty(tokens[prompt_length:], logits)


def _stops(request: GenerationRequest) -> tuple[str, ...]:
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def _invalid(name: str, sentence: str) -> ApiError:
    return ApiError(400, f"[{name}] {sentence}", param=name, code="invalid_value")
