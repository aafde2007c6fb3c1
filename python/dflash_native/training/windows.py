"""Training windows of the corpus, chosen by the number of the step alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .tokenizer import read_tokens


def load_tokens(path: Path, device: torch.device | str) -> Tensor:
    """The tokens of a `.tokens.xz` as int32 `[n]` on the device."""
    return torch.from_numpy(read_tokens(path).astype(np.int32)).to(device)


class Windows:
    """Windows of `length + 1` tokens of one long text, each once an epoch, in a random order.

    The text is cut anew every epoch, at an offset of its own.
    """

    def __init__(self, tokens: Tensor, length: int, batch: int, seed: int) -> None:
        self.tokens, self.length, self.batch, self.seed = tokens, length, batch, seed
        self._count = (len(tokens) - 1 - length) // length
        if self._count < batch:
            raise ValueError(
                f"[windows] expected {batch} windows of {length} but got {len(tokens)} tokens"
            )
        self.steps_per_epoch = self._count // batch
        self._epoch = -1

    def __call__(self, step: int) -> Tensor:
        """int64 `[batch, length + 1]` of a step."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
            order = torch.randperm(self._count, generator=generator)
            offset = int(torch.randint(0, self.length, (1,), generator=generator))
            self._starts = (order * self.length + offset).to(self.tokens.device)
            self._epoch = epoch
        starts = self._starts[index * self.batch : (index + 1) * self.batch]
        return gather(self.tokens, starts, self.length + 1)


def gather(tokens: Tensor, starts: Tensor, length: int) -> Tensor:
    """int64 `[n, length]`: the tokens from each of `starts [n]` on."""
    return tokens[starts[:, None] + torch.arange(length, device=tokens.device)].long()


def random_windows(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """int64 `[count, length]` from random places; `generator` is one of the CPU."""
    starts = torch.randint(0, len(tokens) - length - 1, (count,), generator=generator)
    return gather(tokens, starts.to(tokens.device), length)
