"""How much of its own text a target accepts from a draft: rounds replayed over finished texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .decoding import gumbel
from .draft import Draft
from .losses import Blocks, draft_hidden
from .target import Target


@dataclass(frozen=True)
class Texts:
    """Texts that the target wrote after prompts of one length, with what a draft needs of them."""

    tokens: Tensor
    """int64 `[R, T]`; T leaves room for one more block after the last token that counts."""
    taps: Tensor
    """`[R, T, n * H]`."""
    loops: Tensor
    """bool `[R, T]`."""
    temperatures: Tensor
    """fp32 `[R]`."""
    seeds: Tensor
    """int64 `[R]`, of the noise that the tokens were drawn with."""
    prompt: int
    """Tokens of the prompt; the next one is the first anchor."""
    end: int
    """The position after the last token that counts."""


@torch.no_grad()
def proposals(
    draft: Draft, target: Target, texts: Texts, anchors: Tensor, dtype: torch.dtype, length: int
) -> tuple[Tensor, Tensor]:
    """What the draft says after `anchors [R]` and what the target said, int64 `[R, length - 1]`.

    Where a text was drawn, the draft draws with the noise of its positions, as the runtime does.
    """
    lengths = torch.full_like(anchors, length)[:, None]
    blocks = Blocks(texts.tokens, texts.taps, anchors[:, None], lengths)
    table = target.embed_tokens.weight
    tables = draft.rope(texts.tokens.shape[1] + draft.shape.block_size)
    hidden, _, labels = draft_hidden(draft, blocks, table, tables, dtype)
    hidden, labels = hidden[:, 0, : length - 1], labels[:, 0, : length - 1]
    logits = target.head(hidden, dtype).float()
    noise = torch.zeros_like(logits)
    drawn = texts.temperatures > 0
    if drawn.any():
        slots = torch.arange(1, length, device=anchors.device)
        positions = anchors[drawn, None] + slots
        found = gumbel(texts.seeds[drawn, None], positions, logits.shape[-1])
        noise[drawn] = found * texts.temperatures[drawn, None, None]
    if draft.shape.is_dflash2:
        anchor = texts.tokens.gather(1, anchors[:, None])[:, 0]
        return draft.candidate_selector.select(hidden, logits, anchor, noise), labels
    return (logits + noise).argmax(-1), labels


def replay(
    draft: Draft, target: Target, texts: Texts, dtype: torch.dtype, length: int | None = None
) -> dict[str, Any]:
    """Rounds over all texts, with blocks of `length` rows (the draft's own when left out).

    `tokens_a_round` counts the accepted drafts and the bonus; `outside_loops` the rounds whose
    anchor lies in none; `survival` is the share of rounds, of those with room for a whole block,
    that accept at least so many drafts, by position. Raises ValueError where no text has a token.
    """
    length = length or draft.shape.block_size
    rows = torch.arange(len(texts.tokens), device=texts.tokens.device)
    anchors = torch.full_like(rows, texts.prompt)
    emitted, in_loop, whole, accepted = [], [], [], []
    while bool((live := anchors < texts.end - 1).any()):
        said, labels = proposals(draft, target, texts, anchors, dtype, length)
        count = (said == labels).long().cumprod(1).sum(1)
        room = texts.end - 1 - anchors
        step = torch.minimum(count + 1, room)
        emitted.append(step[live])
        in_loop.append(texts.loops[rows, anchors][live])
        accepted.append(count[live])
        whole.append(room[live] >= length)
        anchors = torch.where(live, anchors + step, anchors)
    if not emitted:
        raise ValueError(f"[evaluate] expected tokens after {texts.prompt} but got none")
    steps, loops = torch.cat(emitted).double(), torch.cat(in_loop)
    kept = torch.cat(accepted)[torch.cat(whole)]
    survival = [(kept >= j).double().mean().item() for j in range(1, length)] if len(kept) else []
    return {
        "rounds": len(steps),
        "tokens_a_round": round(steps.mean().item(), 3),
        "outside_loops": round(steps[~loops].mean().item(), 3) if (~loops).any() else None,
        "rounds_in_loops": round(loops.double().mean().item(), 3),
        "survival": [round(value, 3) for value in survival],
    }
