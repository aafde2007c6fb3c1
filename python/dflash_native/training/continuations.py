"""The texts that drafts learn from: what the target writes after pieces of the corpus."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .decoding import Decoder
from .target import Target
from .windows import random_windows

TEMPERATURES = (0.0, 0.0, 0.5, 0.8, 1.0)
"""Drawn from for each text."""

_CORPUS_SHARE = 0.2
_SHORTEST, _LONGEST = 24, 256
_CORPUS_START = 16


def write_batches(
    target: Target,
    tokens: Tensor,
    folder: Path,
    batches: int,
    rows: int,
    length: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Write `batches` files `continuations-NN.pt` of `rows` texts of `length` tokens each.

    A prompt is 24 to 256 tokens (at most half the length) of `tokens [n]`. Files that are there
    stay: a cut command goes on where it was.
    """
    longest = min(_LONGEST, length // 2)
    shortest = min(_SHORTEST, longest)
    missing = [batch for batch in range(batches) if not _path(folder, batch).is_file()]
    decoder = Decoder(target, rows, length, dtype) if missing else None
    for batch in missing:
        assert decoder is not None
        generator = torch.Generator().manual_seed(1_000_003 * seed + batch)
        prompts = random_windows(tokens, rows, longest, generator)
        lengths = torch.randint(shortest, longest + 1, (rows,), generator=generator)
        choice = torch.randint(0, len(TEMPERATURES), (rows,), generator=generator)
        seeds = torch.arange(rows) + rows * batch
        texts = decoder(prompts, lengths, torch.tensor(TEMPERATURES)[choice], seeds)
        part = _path(folder, batch).with_suffix(".part")
        torch.save({"texts": texts.short().cpu(), "starts": lengths}, part)
        part.replace(_path(folder, batch))
        print(f"continuations: batch {batch + 1} of {batches}", flush=True)


def read_pool(
    folder: Path, tokens: Tensor, seed: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """All continuations and a fifth as many corpus windows: texts int32 `[N, T]`, starts `[N]`.

    A text's anchors begin at its start: the first token that the target wrote. Raises ValueError
    where there are no continuations.
    """
    files = sorted(folder.glob("continuations-*.pt"))
    if not files:
        raise ValueError(f"[draft] expected continuations in {folder} but got none")
    parts = [torch.load(file, weights_only=True) for file in files]
    texts = torch.cat([part["texts"].int() for part in parts]).to(device)
    starts = torch.cat([part["starts"] for part in parts]).to(device)
    count = int(len(texts) * _CORPUS_SHARE)
    generator = torch.Generator().manual_seed(1_000_003 * seed + 999)
    windows = random_windows(tokens, count, texts.shape[1], generator).int()
    first = torch.full((count,), _CORPUS_START, device=device)
    return torch.cat([texts, windows]), torch.cat([starts, first])


def _path(folder: Path, batch: int) -> Path:
    return folder / f"continuations-{batch:02d}.pt"
