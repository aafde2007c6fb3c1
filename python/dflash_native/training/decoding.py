"""Batched decoding of the target, one token a step, with noise that depends on the place alone."""

from __future__ import annotations

import torch
from torch import Tensor

from .target import Target

_WORD = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A hash of 32 bits in int64, by C. Wellons's constants (lowbias32)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def gumbel(rows: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Gumbel noise `[..., vocab]` fp32 for rows and positions (int64, of shapes that broadcast).

    The same row and position give the same noise in every call: the token that is drawn with it and
    the draft that is drawn with it are coupled.
    """
    keys = _mix(_mix(rows & _WORD) ^ ((positions * 0x9E3779B1) & _WORD))
    words = torch.arange(vocab, device=keys.device) * 0x85EBCA77
    bits = _mix((keys[..., None] + words) & _WORD) >> 8
    uniform = (bits.float() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform))


class Decoder:
    """Decodes `rows` texts side by side up to `capacity` tokens; a CUDA graph a step on a GPU."""

    def __init__(self, target: Target, rows: int, capacity: int, dtype: torch.dtype) -> None:
        device = target.embed_tokens.weight.device
        self.target, self.dtype, self.capacity = target, dtype, capacity
        self._tables = target.rope(capacity)
        self._caches = target.make_cache(rows, capacity, dtype)
        self._texts = torch.zeros(rows, capacity, device=device, dtype=torch.int64)
        self._known = torch.zeros(rows, device=device, dtype=torch.int64)
        self._seeds = torch.zeros_like(self._known)
        self._position = torch.zeros(1, device=device, dtype=torch.int64)
        self._temperatures = torch.zeros(rows, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(
        self, prompts: Tensor, lengths: Tensor, temperatures: Tensor, seeds: Tensor
    ) -> Tensor:
        """Texts int64 `[rows, capacity]`: each prompt's first tokens, then the target's.

        `prompts [rows, P]`, `lengths [rows]` how many of a row's tokens are given, at least one;
        `temperatures [rows]`, 0 for greedy; `seeds [rows]` of the noise.
        """
        self._begin(prompts, lengths, temperatures, seeds)
        if self._texts.is_cuda and self._graph is None:
            self._capture()
            self._begin(prompts, lengths, temperatures, seeds)
        for _ in range(self.capacity - 1):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
        return self._texts.clone()

    def _begin(self, prompts: Tensor, lengths: Tensor, temperatures: Tensor, seeds: Tensor) -> None:
        for cache in self._caches:
            for part in cache:
                part.zero_()
        self._texts.zero_()
        self._texts[:, : prompts.shape[1]] = prompts
        self._known.copy_(lengths)
        self._temperatures.copy_(temperatures)
        self._seeds.copy_(seeds)
        self._position.zero_()

    def _step(self) -> None:
        token = self._texts.index_select(1, self._position)[:, 0]
        logits = self.target.step(token, self._position, self._tables, self._caches, self.dtype)
        self._position.add_(1)
        noise = gumbel(self._seeds, self._position, logits.shape[-1])
        scores = logits.float() + self._temperatures[:, None] * noise
        given = self._texts.index_select(1, self._position)[:, 0]
        chosen = torch.where(self._position < self._known, given, scores.argmax(-1))
        self._texts.index_copy_(1, self._position, chosen[:, None])

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()


def loop_mask(texts: Tensor, longest: int = 48) -> Tensor:
    """Which tokens of `texts [rows, T]` lie in a loop, bool of the same shape.

    A token is in a loop of period p, 1 to `longest`, where it and the max(2 p, 8) - 1 tokens before
    it all equal the token p before them.
    """
    index = torch.arange(texts.shape[1], device=texts.device).expand_as(texts)
    found = torch.zeros_like(texts, dtype=torch.bool)
    for period in range(1, min(longest, texts.shape[1] - 1) + 1):
        equal = torch.zeros_like(found)
        equal[:, period:] = texts[:, period:] == texts[:, :-period]
        broken = torch.where(equal, -1, index).cummax(1).values
        found |= index - broken >= max(2 * period, 8)
    return found
