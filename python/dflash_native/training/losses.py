"""What target and drafts are trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .draft import Draft
from .target import Target


def next_token(hidden: Tensor, table: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean cross-entropy of `hidden [B, T, H]` through the tied head for `labels [B, T]`."""
    logits = F.linear(hidden.to(dtype), table.to(dtype)).float()
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


@dataclass(frozen=True)
class Blocks:
    """Some blocks of each of B texts, what a draft sees and what it shall say."""

    texts: Tensor
    """int64 `[B, T]`."""
    taps: Tensor
    """`[B, T, n * H]`."""
    anchors: Tensor
    """int64 `[B, N]`: the position of each block's first row, the last known token."""
    lengths: Tensor
    """int64 `[B, N]`: rows of each block that are in use, 2 to the block size."""


def draw_anchors(
    starts: Tensor,
    length: int,
    block: int,
    count: int,
    shorter: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Anchors and block lengths `[B, count]` for texts of `length` tokens.

    An anchor lies between its text's start `[B]` and the last place for a whole block; of all
    blocks the share `shorter` has a random length below the full one.
    """
    size, device = (len(starts), count), starts.device
    place = torch.rand(size, generator=generator, device=device)
    room = length - block - starts + 1
    anchors = starts[:, None] + (place * room[:, None]).long()
    short = torch.rand(size, generator=generator, device=device) < shorter
    lengths = torch.randint(2, block, size, generator=generator, device=device)
    return anchors, torch.where(short, lengths, block)


def draft_hidden(
    draft: Draft,
    blocks: Blocks,
    table: Tensor,
    tables: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed hidden states `[B, N, block - 1, H]` of the mask rows, the token before each, and the
    token that each shall say, int64 `[B, N, block - 1]`; `table` is the target's embeddings."""
    shape = draft.shape
    slots = torch.arange(shape.block_size, device=table.device)
    places = (blocks.anchors[:, :, None] + slots).clamp_max(blocks.texts.shape[1] - 1)
    tokens = blocks.texts.gather(1, places.flatten(1)).view_as(places)
    inputs = torch.where(slots == 0, tokens, shape.mask_token_id)
    embedded = F.embedding(inputs.flatten(1), table)
    hidden = draft(embedded, blocks.taps, blocks.anchors, tables, dtype, blocks.lengths)
    return hidden[:, :, 1:], tokens[:, :, :-1], tokens[:, :, 1:]


def block_loss(
    draft: Draft,
    hidden: Tensor,
    before: Tensor,
    labels: Tensor,
    weights: Tensor,
    table: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Cross-entropy of the mask rows, weighted by `weights [B, N, block - 1]`.

    DFlash2 adds the cross-entropy of the selector's scores, given the right token before, and the
    mean of both counts: the head alone must still rank the candidates.
    """
    logits = F.linear(hidden.to(dtype), table.to(dtype))
    loss = _weighted(logits, labels, weights)
    if draft.shape.is_dflash2:
        steps = draft.candidate_selector.steps(hidden, before, dtype)
        loss = (loss + _weighted(logits + steps, labels, weights)) / 2
    return loss


def position_weights(lengths: Tensor, block: int, gamma: float) -> Tensor:
    """`exp(-(k - 1) / gamma)` for row k of a block `[B, N, block - 1]`, 0 outside its length."""
    rows = torch.arange(1, block, device=lengths.device)
    return torch.exp(-(rows - 1) / gamma) * (rows < lengths[:, :, None])


def _weighted(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def held_out_loss(
    target: Target, tokens: Tensor, length: int, dtype: torch.dtype, most: int = 96
) -> float:
    """Nats a token over the first `most` windows of a held-out text `[n]`."""
    count = min(most, (len(tokens) - 1) // length)
    if count < 1:
        raise ValueError(f"[evaluate] expected {length} held-out tokens but got {len(tokens)}")
    inputs = tokens[: count * length].view(count, length).long()
    labels = tokens[1 : count * length + 1].view(count, length).long()
    tables, total = target.rope(length), 0.0
    with torch.no_grad():
        for first in range(0, count, 16):
            part = slice(first, first + 16)
            hidden, _ = target(inputs[part], tables, dtype)
            loss = next_token(hidden, target.embed_tokens.weight, labels[part], dtype)
            total += loss.item() * len(inputs[part])
    return total / count
