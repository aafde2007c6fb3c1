"""`dflash-native demo`: the built-in pair, shown at work and measured against plain decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..demo import BLOCK_SIZES, Prompt
from ..demo import prompts as demo_prompts
from ..doctor import backend
from . import measure
from .console import OptionError, check_block_size, err, out
from .loading import demo_pair

if TYPE_CHECKING:
    from ..drafters import DFlashDrafter
    from ..targets import Target


class DraftMarks:
    """Prints a stream of text and marks what the drafter proposed and the target accepted.

    Green and underlined where the console has styles, in brackets in a log or a pipe.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._styled = console.color_system is not None
        try:
            "⟦⟧".encode(console.encoding)
            self._brackets = "⟦", "⟧"
        except UnicodeEncodeError:
            self._brackets = "[[", "]]"
        self._open = False

    def begin(self, prompt: Prompt) -> None:
        """Print the legend and the prompt."""
        look = "green and underlined" if self._styled else "in {} {}".format(*self._brackets)
        self._put(f"Prompt {prompt.name}, and its continuation; accepted drafts are {look}:\n\n")
        self._put(prompt.text, "dim")

    def write(self, text: str, from_draft: bool) -> None:
        """Print one token's text. Neighbouring accepted drafts share their brackets."""
        if not text:
            return
        if self._styled:
            self._put(text, "green underline" if from_draft else None)
            return
        if from_draft != self._open:
            self._put(self._brackets[self._open])
            self._open = from_draft
        self._put(text)

    def end(self) -> None:
        """Close an open bracket and the line."""
        self._put((self._brackets[1] if self._open else "") + "\n")
        self._open = False

    def _put(self, text: str, style: str | None = None) -> None:
        self._console.out(text, end="", style=style, highlight=False)
        self._console.file.flush()


def run(
    *,
    as_json: bool,
    prompts: int,
    max_tokens: int,
    block_size: int | None,
    dtype: str,
    exact: bool,
) -> None:
    """Run and print the demo; with `as_json`, one object on standard output and nothing else."""
    available = demo_prompts()
    if not 1 <= prompts <= len(available):
        raise OptionError(f"expected --prompts in 1 … {len(available)} but got {prompts}")
    if max_tokens < 1:
        raise OptionError(f"expected --max-tokens of at least 1 but got {max_tokens}")
    check_block_size(block_size)
    target, tokenizer, drafter = demo_pair(dtype, exact)
    check_block_size(block_size, drafter.max_drafts + 1)
    width = BLOCK_SIZES[backend()] if block_size is None else block_size
    pair = _Pair(target, tokenizer, drafter, max_tokens, width)
    comparisons = _compare(pair, available[:prompts], None if as_json else DraftMarks(out()))
    summary = {
        "backend": backend(),
        **measure.summarise(comparisons),
        "dtype": dtype,
        "exact": exact,
        "block_size": width,
        "max_tokens": max_tokens,
    }
    if as_json:
        print(json.dumps(summary))
    else:
        _report(target, comparisons, summary)


@dataclass(frozen=True)
class _Pair:
    """What stays the same from prompt to prompt."""

    target: Target
    tokenizer: Any
    drafter: DFlashDrafter
    max_tokens: int
    block_size: int

    def plain(self, prompt: list[int]) -> measure.Decoded:
        return measure.decode(self.target, self.tokenizer, prompt, self.max_tokens)

    def dflash(self, prompt: list[int], show: measure.Show | None = None) -> measure.Decoded:
        return measure.decode(
            self.target,
            self.tokenizer,
            prompt,
            self.max_tokens,
            self.drafter,
            block_size=self.block_size,
            show=show,
        )


def _compare(
    pair: _Pair, prompts: Sequence[Prompt], marks: DraftMarks | None
) -> list[measure.Comparison]:
    """Each prompt both ways; each way goes first every other time. The first one is shown."""
    ids = [list(pair.tokenizer.encode(prompt.text)) for prompt in prompts]
    with err().status("warming up"):
        measure.warm_up(pair.target, ids[0], pair.drafter, block_size=pair.block_size)
    comparisons = []
    for index, (prompt, tokens) in enumerate(zip(prompts, ids, strict=True)):
        dflash = None
        if index == 0 and marks is not None:
            marks.begin(prompt)
            dflash = pair.dflash(tokens, marks.write)
            marks.end()
        with err().status(f"measuring {prompt.name}"):
            if index % 2 == 0:
                dflash = dflash or pair.dflash(tokens)
            plain = pair.plain(tokens)
            dflash = dflash or pair.dflash(tokens)
        comparisons.append(measure.Comparison(prompt.name, tokens, plain, dflash))
    return comparisons


def _report(
    target: Target, comparisons: Sequence[measure.Comparison], summary: dict[str, Any]
) -> None:
    console = out()
    where = f"{summary['backend']}, {summary['dtype']}, blocks of {summary['block_size']}"
    console.print(f"\nPlain decoding against DFlash ({where})", style="bold")
    console.print(_table(comparisons, summary))
    if summary["acceptance_by_position"]:
        console.print("Drafts accepted, by their position in the block, %", style="bold")
        console.print(_acceptance(summary["acceptance_by_position"]))
    for sentence in _remarks(target, comparisons, summary):
        console.print(f"\n{sentence}")


def _table(comparisons: Sequence[measure.Comparison], summary: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_footer=True)
    footers = (
        "all",
        f"{summary['tokens']}",
        f"{summary['plain_tok_s']:.1f}",
        f"{summary['dflash_tok_s']:.1f}",
        f"{summary['speedup']:.2f}",
        f"{summary['tokens_per_round']:.2f}",
        f"{summary['identical']} of {summary['prompts']}",
    )
    headers = ("prompt", "tokens", "plain\ntok/s", "DFlash\ntok/s", "ratio", "tokens\na round")
    for header, footer in zip((*headers, "identical"), footers, strict=True):
        table.add_column(header, footer, justify="left" if header == "prompt" else "right")
    for comparison in comparisons:
        row = measure.summarise([comparison])
        table.add_row(
            comparison.name,
            f"{row['tokens']}",
            f"{row['plain_tok_s']:.1f}",
            f"{row['dflash_tok_s']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['tokens_per_round']:.2f}",
            "yes" if row["identical"] else "no",
        )
    return table


def _acceptance(rates: Sequence[float]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for position in range(1, len(rates) + 1):
        table.add_column(f"{position}", justify="right", min_width=3)
    table.add_row(*(f"{100 * rate:.0f}" for rate in rates))
    return table


def _remarks(
    target: Target, comparisons: Sequence[measure.Comparison], summary: dict[str, Any]
) -> Iterator[str]:
    yield (
        "Counted: the time in rounds, without loading, warming up and reading the prompt. Plain "
        "decoding runs the same operations without a drafter."
    )
    for comparison in comparisons:
        if comparison.difference is not None:
            yield _difference(target, comparison, summary["exact"])
    ratio, per_round = summary["speedup"], summary["tokens_per_round"]
    steps = summary["round_in_plain_steps"]
    yield (
        f"A round takes as long as {steps:.2f} plain steps and gives {per_round:.2f} tokens: "
        f"DFlash runs at {ratio:.2f} times the speed of plain decoding."
    )
    if ratio < 1:
        rows = summary["block_size"]
        cost = measure.matmul_cost(target, rows)
        product = (
            f"the matrix product on this backend ({summary['backend']}) takes {cost:.1f} times "
            f"as long for {rows} rows as for one (measured just now on the LM head)"
        )
        yield (
            f"It is slower because {product}, so that verifying a block costs about as much as "
            "decoding its tokens one by one."
            if cost > per_round
            else f"It is slower although {product}: drafting and verifying cost more than the "
            "accepted drafts save."
        )


def _difference(target: Target, comparison: measure.Comparison, exact: bool) -> str:
    gap = measure.logit_gap(target, comparison)
    where = f"{comparison.name} is not identical: token {(comparison.difference or 0) + 1} differs"
    if gap is None:
        return f"{where} because one of the two ends there."
    reason = (
        "That is an error: with --exact nothing may depend on the width of a block."
        if exact
        else "Matrix products and attention are MLX's own, and may round one row and a block "
        "differently."
    )
    return (
        f"{where}, where plain decoding's logit is ahead of the other token's by {gap:.2g}. "
        f"{reason}"
    )
