"""`dflash-native generate`: text on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from typing import Any, cast

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ..generation import GenerationResponse, stream_generate
from ..sampling import Sampler, Sampling
from .console import INTERRUPTED, OptionError, check_block_size, err
from .loading import check_draft, demo_pair, known_draft, named_pair, own_drafter

Stream = Generator[GenerationResponse, None, None]


def run(
    *,
    prompt: str,
    model: str | None,
    draft: str | None,
    max_tokens: int,
    block_size: int | None,
    raw: bool,
    sampling: dict[str, Any],
    stop: Sequence[str],
    dtype: str | None,
    exact: bool,
    as_json: bool,
) -> None:
    """Generate and print; see `dflash-native generate --help`."""
    _check_options(model, draft, max_tokens, block_size, stop)
    with _option_errors():
        chosen = Sampling(**sampling)
    if prompt == "-":
        prompt = sys.stdin.read()
    if not prompt:
        raise OptionError("expected a prompt but got an empty one")
    target, tokenizer, drafter = (
        demo_pair(dtype or "float32", exact)
        if model is None
        else named_pair(model, draft, dtype or "stored", exact)
    )
    with _option_errors():
        Sampler(chosen, target.vocab_size)
    if drafter is not None:
        if model is None:
            drafter = own_drafter(draft, drafter)
        check_block_size(block_size, drafter.max_drafts + 1)
    with _progress() as (bar, report):
        stream = cast(
            Stream,
            stream_generate(
                target,
                tokenizer,
                _prompt_ids(tokenizer, prompt, raw),
                max_tokens,
                drafter,
                block_size=block_size,
                sampling=chosen,
                stop=stop,
                prompt_progress_callback=report,
            ),
        )
        result = _Result()
        try:
            with closing(stream):
                first = next(stream)  # reads the prompt
                bar.stop()
                result.collect(chain([first], stream), shown=not as_json)
        except KeyboardInterrupt:
            result.reason = "interrupted"
    if as_json:
        print(json.dumps(result.as_object()))
    else:
        result.print_statistics(model, plain=drafter is None)
    if result.reason == "interrupted":
        raise typer.Exit(INTERRUPTED)


class _Result:
    """What was generated so far."""

    def __init__(self) -> None:
        self.text = ""
        self.reason = "interrupted"
        self._last: GenerationResponse | None = None

    def collect(self, responses: Iterator[GenerationResponse], *, shown: bool) -> None:
        """Take in the stream and, if `shown`, print its text as it comes."""
        for response in responses:
            self._last = response
            self.text += response.text
            if shown:
                sys.stdout.write(response.text)
                sys.stdout.flush()
            if response.finish_reason is not None:
                self.reason = response.finish_reason

    def as_object(self) -> dict[str, Any]:
        """For `--json`."""
        found: dict[str, Any] = {"text": self.text, "finish_reason": self.reason}
        last = self._last
        if last is None or last.stats is None:
            return found | {"tokens": 0}
        return found | {
            "tokens": last.generation_tokens,
            "tok_s": last.generation_tps,
            "prompt_tokens": last.prompt_tokens,
            "prompt_tok_s": last.prompt_tps,
            "rounds": last.stats.rounds,
            "tokens_per_round": last.stats.tokens_per_round,
            "drafted": last.stats.drafted,
            "accepted": last.stats.accepted,
            "acceptance": last.stats.acceptance,
            "peak_memory_gb": last.peak_memory,
            "exact": last.exact,
        }

    def print_statistics(self, model: str | None, *, plain: bool) -> None:
        """On standard error, below the text."""
        console = err()
        if self.text and not self.text.endswith("\n"):
            if sys.stdout.isatty():
                print(flush=True)
            else:  # a pipe gets the text alone
                console.print()
        last = self._last
        if last is None or last.stats is None:
            console.print("interrupted before the first token")
            return
        # The last token of a prompt belongs to the first round, so one token has no speed.
        speed = f" at {last.prompt_tps:.1f} tok/s" if last.prompt_tokens > 1 else ""
        console.print(
            f"{_count(last.generation_tokens, 'token')} at {last.generation_tps:.1f} tok/s "
            f"({self.reason}), after a prompt of {_count(last.prompt_tokens, 'token')}{speed}",
            soft_wrap=True,
        )
        if plain:
            published = known_draft(model or "")
            hint = f"; its published draft: --draft {published}" if published else ""
            console.print(f"plain decoding, without --draft{hint}", soft_wrap=True)
        else:
            stats = last.stats
            console.print(
                f"{_count(stats.rounds, 'round')}, {stats.tokens_per_round:.2f} tokens a round, "
                f"{stats.accepted} of {stats.drafted} drafts accepted",
                soft_wrap=True,
            )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _check_options(
    model: str | None,
    draft: str | None,
    max_tokens: int,
    block_size: int | None,
    stop: Sequence[str],
) -> None:
    """Refuse before anything is loaded."""
    check_draft(model, draft)
    if block_size is not None and model is not None and draft is None:
        raise OptionError("expected --block-size only with a draft but got no --draft")
    check_block_size(block_size)
    if max_tokens == 0 or max_tokens < -1:
        raise OptionError(
            f"expected --max-tokens of at least 1 (-1: no limit) but got {max_tokens}"
        )
    if not all(stop):
        raise OptionError("expected a text for --stop but got an empty one")


@contextmanager
def _option_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise OptionError(str(error)) from None


def _prompt_ids(tokenizer: Any, prompt: str, raw: bool) -> list[int]:
    """The prompt as one turn of a chat where the tokenizer knows how, unless `raw`."""
    if raw or not tokenizer.has_chat_template:
        bos = tokenizer.bos_token
        special = bos is None or not prompt.startswith(bos)
        return list(tokenizer.encode(prompt, add_special_tokens=special))
    turn = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True))


@contextmanager
def _progress() -> Iterator[tuple[Progress, Any]]:
    """A bar for the prompt on standard error, where that is a terminal."""
    console = err()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("reading the prompt", total=None)
    with bar:
        yield bar, lambda done, total: bar.update(task, completed=done, total=total)
