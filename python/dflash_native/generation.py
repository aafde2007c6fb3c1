"""Text generation in mlx-lm's shape: `generate` and `stream_generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ._arguments import integer, token_ids
from .drafters import AutoregressiveDrafter
from .drafters.protocol import Drafter
from .sampling import LogitsProcessor, Sampling, check_processors
from .session import Round, Session, Stats
from .stopping import StopRules, TextStream
from .targets import Prefill, Target

_KV_CACHE = "a quantised KV cache is not supported"
REFUSED: dict[str, tuple[object, str]] = {
    "sampler": (None, "it would draw from MLX's own generator; pass sampling=Sampling(...)"),
    "prompt_cache": (None, "mlx-lm's caches hold no tape; pass session= to go on with a chat"),
    "max_kv_size": (None, "a rotating cache cannot be rolled back"),
    "kv_bits": (None, _KV_CACHE),
    "kv_group_size": (64, _KV_CACHE),
    "quantized_kv_start": (5000, _KV_CACHE),
    "input_embeddings": (None, "the drafter needs token ids"),
    "stream": (None, "a session runs on the default stream; use `with mx.stream(...)` around it"),
}
"""mlx-lm's other arguments: the default, which changes nothing, and why any other is refused."""


@dataclass
class GenerationResponse:
    """One emitted token. The fields up to `finish_reason` are mlx-lm's."""

    text: str
    """The text that this token sets free; it can be empty."""
    token: int
    logprobs: mx.array
    """`[V]`, fp32, lazy: the log probabilities after penalties and processors and before filters
    and temperature, as in mlx-lm."""
    from_draft: bool
    """Whether the drafter proposed it."""
    prompt_tokens: int
    prompt_tps: float
    """Prompt tokens a second."""
    generation_tokens: int
    """Emitted so far."""
    generation_tps: float
    """Tokens a second since the prompt was read."""
    peak_memory: float
    """GB, of the process so far."""
    finish_reason: str | None = None
    """"stop" (end token or stop string) or "length", on the last response."""
    round: int = 0
    """Of this session, counted from 1."""
    position: int = 0
    """In its round, counted from 0."""
    drafted: int = 0
    """Drafts of this round."""
    accepted: int = 0
    """Of them, those that agreed with the target."""
    stats: Stats | None = None
    """Sums over the session so far."""
    exact: bool = True
    """Whether decoding ran by operations whose bits do not depend on the width of a call.
    Otherwise MLX's own ran, and a draft can flip a token that is a near tie."""

    def top_logprobs(self, count: int) -> list[tuple[int, float]]:
        """The `count` most probable tokens with their log probabilities, best first.

        The lower id goes first where two are equal. Raises ValueError unless `count` is 0 … V,
        TypeError unless it is an integer.
        """
        count = integer("top_logprobs", "a count", count, 0, self.logprobs.size)
        order = mx.argsort(-self.logprobs)[:count]
        return list(zip(order.tolist(), self.logprobs[order].tolist(), strict=True))  # type: ignore


def stream_generate(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = 256,
    drafter: Drafter | None = None,
    *,
    block_size: int | Literal["auto"] | None = None,
    sampling: Sampling | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    exact: bool | None = None,
    prefill: Prefill | None = None,
    stop: str | Sequence[str] = (),
    session: Session | None = None,
    prefill_step_size: int | None = None,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    draft_model: Drafter | Module | None = None,
    num_draft_tokens: int | None = None,
    **others: Any,
) -> Iterator[GenerationResponse]:
    """Yields a response for each token, as mlx-lm's `stream_generate` does.

    Args:
        model: a model that mlx-lm loaded, or a `Target` over one, which keeps what it packs for the
            CPU from call to call.
        tokenizer: its tokenizer; every end token that it knows stops the text.
        prompt: a text, or token ids.
        max_tokens: most tokens to emit; -1 for no limit.
        drafter: proposes blocks; None decodes plainly through the same operations.
        block_size: inputs of a verify, or "auto", the default, which chooses them each round, plain
            steps included, by costs that are measured once a machine (see `Session`).
        sampling: how tokens are chosen (default: greedily, or as the session does).
        logits_processors: mlx-lm's; called after those of `sampling`.
        exact, prefill: as for `Target` (default: True and "fast"). A `Target`, or a session's, has
            its own, and anything else is refused beside it.
        stop: one or more texts that end the generation; they are not shown.
        session: an open session to go on with (a chat's next turn). It stays open, at the last
            token that was delivered; otherwise a session is made and closed.
        prefill_step_size, prompt_progress_callback: as in mlx-lm (2048 inputs a step).
        draft_model, num_draft_tokens: mlx-lm's names for `drafter` and `block_size - 1`. A model
            that mlx-lm loaded becomes an `AutoregressiveDrafter` of as many tokens.

    Whatever ends the loop (an end token, a stop string, the budget, an exception or a `close()` of
    this generator), the session ends just before the last delivered token, which is pending.

    Raises ValueError for an argument of mlx-lm's that is refused (`REFUSED` says why) and for a
    value out of range, TypeError for an unknown argument and for a value of another kind.
    """
    _check_others(others)
    tokenizer = _wrapped(tokenizer)
    if num_draft_tokens is not None:
        num_draft_tokens = integer("generate", "num_draft_tokens", num_draft_tokens, 1)
    if draft_model is not None:
        if drafter is not None:
            raise ValueError("[generate] expected drafter or draft_model but got both.")
        if isinstance(draft_model, Module):
            drafter = AutoregressiveDrafter(draft_model, num_draft_tokens or 4)
        elif isinstance(draft_model, Drafter):
            drafter = draft_model
        else:
            raise ValueError(
                "[generate] expected draft_model to be a model or a dflash_native drafter but got "
                f"{type(draft_model).__name__}."
            )
    if num_draft_tokens is not None:
        if block_size is not None:
            raise ValueError("[generate] expected block_size or num_draft_tokens but got both.")
        if drafter is None and session is None:
            raise ValueError("[generate] expected a drafter with num_draft_tokens but got none.")
        block_size = num_draft_tokens + 1
    if session is not None:
        if not (drafter is None and block_size is None and prefill_step_size is None):
            raise ValueError(
                "[generate] expected the session to bring its own drafter, block_size and "
                "prefill_step_size."
            )
        if model is not session.target and model is not session.target.model:
            raise ValueError("[generate] expected the model of the session but got another one.")
    given = session.target if session is not None else model
    if isinstance(given, Target):
        _check_settings(given, exact, prefill)
        target = given
    else:
        target = Target(
            model,
            exact=True if exact is None else exact,
            prefill="fast" if prefill is None else prefill,
        )
    stops = _stop_texts(stop)
    rules = StopRules(tokenizer.eos_token_ids, TextStream(tokenizer.detokenizer, stops), max_tokens)
    ids = _prompt_ids(tokenizer, prompt, target.vocab_size)
    if logits_processors is not None:
        check_processors("generate", logits_processors)
    own = session is None
    if session is not None:
        if sampling is not None:
            session.sampling = sampling
    else:
        session = Session(
            target,
            drafter,
            block_size="auto" if block_size is None else block_size,
            sampling=sampling,
            prefill_step_size=2048 if prefill_step_size is None else prefill_step_size,
        )
    return _stream(session, own, ids, rules, prompt_progress_callback, logits_processors or ())


def _stream(
    session: Session,
    own: bool,
    ids: list[int],
    rules: StopRules,
    progress: Callable[[int, int], None] | None,
    processors: Sequence[LogitsProcessor],
) -> Iterator[GenerationResponse]:
    """The loop itself: a generator, so that everything above is checked at the call.

    `processors` are of this text alone: a session goes on without them.
    """
    if processors:
        sampling = session.sampling
        asked = sampling or Sampling()
        both = [*asked.logits_processors, *processors]
        session.sampling = replace(asked, logits_processors=both)
    delivered = emitted = 0
    try:
        start = time.perf_counter()
        session.prefill(ids, progress)
        prompt_tps = len(ids) / (time.perf_counter() - start)
        start = time.perf_counter()
        reason = None
        while reason is None:
            delivered = 0
            result = session.round(rules.left)
            emitted = len(result.tokens)
            logprobs = _logprobs(result)
            for position, token in enumerate(result.tokens):
                delivered = position + 1
                text, reason = rules.feed(token)
                yield GenerationResponse(
                    text=text,
                    token=token,
                    logprobs=logprobs[position],
                    from_draft=position < result.accepted,
                    prompt_tokens=len(ids),
                    prompt_tps=prompt_tps,
                    generation_tokens=rules.count,
                    generation_tps=rules.count / (time.perf_counter() - start),
                    peak_memory=mx.get_peak_memory() / 1e9,
                    finish_reason=reason,
                    round=session.stats.rounds,
                    position=position,
                    drafted=len(result.drafts),
                    accepted=result.accepted,
                    stats=session.stats,
                    exact=session.target.exact,
                )
                if reason is not None:
                    break
    finally:
        if 0 < delivered < emitted:
            session.rewind(delivered)
        if processors:
            session.sampling = sampling
        if own:
            session.close()


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    verbose: bool = False,
    **kwargs: Any,
) -> str:
    """The whole text; arguments as for `stream_generate`.

    With `verbose` it is printed as it comes.
    """
    text = ""
    response = None
    for response in stream_generate(model, tokenizer, prompt, **kwargs):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response is not None:
        stats = response.stats
        print(f"\n{'=' * 10}")
        print(f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec")
        print(
            f"Generation: {response.generation_tokens} tokens, "
            f"{response.generation_tps:.3f} tokens-per-sec"
        )
        if stats is not None and stats.drafted:
            print(
                f"Rounds: {stats.rounds}, {stats.tokens_per_round:.2f} tokens a round, "
                f"{stats.acceptance:.1%} of the drafts accepted"
            )
    return text


def _check_others(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name not in REFUSED:
            raise TypeError(f"[generate] got an unexpected keyword argument {name!r}.")
        default, reason = REFUSED[name]
        if value is not None and value != default:
            raise ValueError(f"[generate] {name} is not supported: {reason}.")


def _check_settings(target: Target, exact: bool | None, prefill: Prefill | None) -> None:
    for name, own, asked in (
        ("exact", target.exact, exact),
        ("prefill", target.prefill, prefill),
    ):
        if asked not in (None, own):
            raise ValueError(
                f"[generate] expected the target's own {name}={own!r} but got {name}={asked!r}."
            )


def _wrapped(tokenizer: Any) -> TokenizerWrapper:
    return tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)


def _prompt_ids(
    tokenizer: TokenizerWrapper, prompt: str | Sequence[int] | mx.array, vocab_size: int
) -> list[int]:
    if not isinstance(prompt, str):
        return token_ids("generate", prompt, vocab_size)
    bos = tokenizer.bos_token
    special = bos is None or not prompt.startswith(bos)
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=special)
    return token_ids("generate", ids, vocab_size)


def _stop_texts(stop: str | Sequence[str]) -> list[str]:
    if not isinstance(stop, str | Sequence):
        raise TypeError(f"[generate] expected stop texts but got {stop!r}.")
    texts = [stop] if isinstance(stop, str) else list(stop)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"[generate] expected stop texts but got {text!r}.")
        if not text:
            raise ValueError("[generate] expected stop texts but got an empty one.")
    return texts


def _logprobs(result: Round) -> mx.array:
    logits = result.logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
