"""`dflash-native verify`: plain decoding, speculative decoding and mlx-lm's own, side by side."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import typer
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear, quantize

from ..demo import Prompt, parse_prompts
from ..demo import prompts as demo_prompts
from ..doctor import backend
from ..drafters.protocol import Drafter, TargetLike
from ..sampling import Sampler
from ..session import Session
from ..targets import Target
from . import measure
from .console import OptionError, err, out
from .loading import check_draft, demo_pair, named_pair

DEMO_VARIANTS = (("fp32", "float32"), ("bf16", "bfloat16"), ("8bit", "stored"))
"""How the demo pair is run without --model, before it is quantised to four bits."""

_NAMES = {mx.float32: "fp32", mx.bfloat16: "bf16", mx.float16: "fp16"}


@dataclass(frozen=True)
class Variant:
    """One target, in one format, with its draft or none."""

    name: str
    target: Target
    tokenizer: Any
    drafter: Drafter | None


@dataclass(frozen=True)
class Difference:
    """Where the tokens of two ways of decoding part."""

    prompt: str
    position: int
    """In the continuation, from 0."""
    plain: int | None
    """The token of plain decoding, None where that has ended."""
    other: int | None
    gap: float | None
    """Between the two largest logits of plain decoding there."""


@dataclass
class Outcome:
    """What one variant showed over all prompts."""

    speculative: list[Difference]
    stock: list[Difference] | None
    """None where mlx-lm was left out."""
    rounds: int = 0
    rejections: int = 0
    digest: str = ""
    """sha256 of the plain tokens of all prompts."""


def run(
    *,
    model: str | None,
    draft: str | None,
    prompt_file: Path | None,
    prompts: int,
    max_tokens: int,
    exact: bool,
    stock: bool,
    as_json: bool,
) -> None:
    """Compare and print; exits with 1 where drafts changed a token."""
    if draft is not None and model is None:
        raise OptionError("expected --draft only with --model: the built-in pair has its own")
    check_draft(model, draft)
    if prompts < 1 or max_tokens < 1:
        raise OptionError(
            f"expected --prompts and --max-tokens of at least 1 but got {prompts} and {max_tokens}"
        )
    chosen = _prompts(prompt_file)[:prompts]
    outcomes = {}
    for variant in _variants(model, draft, exact):
        outcomes[variant.name] = outcome = compare(variant, chosen, max_tokens, stock)
        if not as_json:
            _print(variant, outcome, len(chosen))
    if as_json:
        summary = {
            "backend": backend(),
            "exact": exact,
            "prompts": len(chosen),
            "max_tokens": max_tokens,
            "rounds": sum(outcome.rounds for outcome in outcomes.values()),
            "rejections": sum(outcome.rejections for outcome in outcomes.values()),
        }
        for name, outcome in outcomes.items():
            summary |= _fields(name, outcome)
        print(json.dumps(summary))
    if any(outcome.speculative for outcome in outcomes.values()):
        raise typer.Exit(1)


def compare(
    variant: Variant, prompts: Sequence[Prompt], max_tokens: int, stock: bool = True
) -> Outcome:
    """Decode every prompt plainly, with drafts and, unless `stock` is False, by mlx-lm."""
    outcome, hashed = Outcome([], [] if stock else None), hashlib.sha256()
    target, tokenizer = variant.target, variant.tokenizer
    for prompt in prompts:
        ids = list(tokenizer.encode(prompt.text))
        with err().status(f"{variant.name}: {prompt.name}"):
            plain = measure.decode(target, tokenizer, ids, max_tokens).tokens
            drafter = variant.drafter or Rehearsal([*ids, *plain])
            drafted = measure.decode(target, tokenizer, ids, max_tokens, drafter)
            outcome.speculative += _differences(target, prompt.name, ids, plain, drafted.tokens)
            if outcome.stock is not None:
                tokens = _mlx_lm(variant, ids, plain, max_tokens)
                outcome.stock += _differences(target, prompt.name, ids, plain, tokens)
        hashed.update(json.dumps(plain).encode())
        outcome.rounds += drafted.stats.rounds
        outcome.rejections += drafted.stats.rejections
    outcome.digest = hashed.hexdigest()
    return outcome


class Rehearsal:
    """A drafter for targets without one: it knows the answer and spoils every fifth token of it."""

    tap_layers: tuple[int, ...] = ()
    context_rows: int | None = 1
    max_drafts = 15
    finite: mx.array | None = None

    def __init__(self, answer: list[int]) -> None:
        self._answer = answer

    def begin(self, target: TargetLike) -> Rehearsal:
        """It has no state: it is its own session."""
        return self

    def observe(self, tokens: Sequence[int]) -> None:
        """It knows them."""

    def extend(self, taps: mx.array, position: int) -> None:
        """There are no taps."""

    def propose(
        self, pending: mx.array, position: int, count: int, sampler: Sampler | None = None
    ) -> mx.array:
        """The answer's next tokens, every fifth position wrong; past its end, zeros."""
        places = range(position + 1, position + 1 + count)
        known = [self._answer[at] if at < len(self._answer) else 0 for at in places]
        drafts = [token ^ (at % 5 == 0) for at, token in zip(places, known, strict=True)]
        return mx.array([drafts], dtype=mx.int32)

    def arrays(self) -> list[mx.array]:
        """None."""
        return []


def _prompts(file: Path | None) -> list[Prompt]:
    if file is None:
        return demo_prompts()
    text = file.read_text(encoding="utf-8")
    found = parse_prompts(text) or [Prompt(file.name, "file", text)]
    if not all(prompt.text for prompt in found):
        raise OptionError(f"expected prompts in {file} but got an empty one")
    return found


def _variants(model: str | None, draft: str | None, exact: bool) -> Iterator[Variant]:
    if model is not None:
        target, tokenizer, drafter = named_pair(model, draft, "stored", exact)
        yield Variant(_format(target), target, tokenizer, drafter)
        return
    for name, dtype in DEMO_VARIANTS:
        yield Variant(name, *demo_pair(dtype, exact))
    target, tokenizer, drafter = demo_pair("bfloat16", exact)
    quantize(target.model, group_size=64, bits=4)
    yield Variant("4bit", Target(target.model, exact=exact), tokenizer, drafter)


def _format(target: Target) -> str:
    """The bits of a quantised target, else the dtype of its activations."""
    for _, module in target.model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            return f"{module.bits}bit"
    return _NAMES[target.dtype]


def _mlx_lm(variant: Variant, ids: list[int], plain: list[int], max_tokens: int) -> list[int]:
    """mlx-lm's tokens up to the first that is another than in `plain`."""
    from mlx_lm.generate import stream_generate

    model, tokenizer, tokens = variant.target.model, variant.tokenizer, []
    with closing(stream_generate(model, tokenizer, ids, max_tokens=max_tokens)) as responses:
        for response in responses:
            tokens.append(response.token)
            if tokens != plain[: len(tokens)]:
                break
    return tokens


def _differences(
    target: Target, name: str, prompt: list[int], plain: list[int], other: list[int]
) -> Iterator[Difference]:
    """The first difference, if there is one."""
    if plain == other:
        return
    longer = range(max(len(plain), len(other)))
    at = next(i for i in longer if plain[i : i + 1] != other[i : i + 1])
    ours, theirs = (each[at] if at < len(each) else None for each in (plain, other))
    gap = None if ours is None else _top_gap(target, prompt, at)
    yield Difference(name, at, ours, theirs, gap)


def _top_gap(target: Target, prompt: list[int], at: int) -> float:
    """Between the two largest logits of plain decoding for token `at` of the continuation."""
    with Session(target) as session:
        session.prefill(prompt)
        for _ in range(at + 1):
            logits = session.round().logits[0]
        top = mx.topk(logits.astype(mx.float32), 2)
        return cast(float, mx.abs(top[0] - top[1]).item())


def _fields(name: str, outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = {f"sha256_{name}": outcome.digest}
    for key, differences in (
        ("differ", outcome.speculative),
        ("differs_from_stock", outcome.stock),
    ):
        if differences is not None:
            found[f"{key}_{name}"] = len(differences)
            found[f"first_{key}_{name}"] = [asdict(each) for each in differences]
    return found


def _print(variant: Variant, outcome: Outcome, prompts: int) -> None:
    console = out()
    console.print(variant.name, style="bold")
    for what, found in (("speculative", outcome.speculative), ("stock mlx-lm", outcome.stock)):
        if found is None:
            continue
        same = prompts - len(found)
        console.print(f"  {what}: equal to plain decoding in {same} of {prompts} prompts")
        for each in found:
            console.print(f"    {_sentence(variant.tokenizer, each)}", soft_wrap=True)
    console.print(f"  {outcome.rounds} rounds, {outcome.rejections} of them with a rejection")
    console.print(f"  sha256 of the plain tokens: {outcome.digest}", soft_wrap=True)
    if outcome.stock and variant.name.endswith("bit") and backend() == "cpu":
        console.print("  (MLX's own quantised products are less accurate on a CPU)")
    changed = len(outcome.speculative)
    console.print(f"  drafts changed {f'tokens in {changed} prompts' if changed else 'no token'}")


def _sentence(tokenizer: Any, found: Difference) -> str:
    plain, other = (
        "the end" if token is None else f"{token} {tokenizer.decode([token])!r}"
        for token in (found.plain, found.other)
    )
    gap = "" if found.gap is None else f"; its two largest logits are {found.gap:.2g} apart"
    return (
        f"{found.prompt}: token {found.position + 1} is {other} where plain decoding has "
        f"{plain}{gap}"
    )
