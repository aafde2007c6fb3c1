"""Drawing tokens: mlx-lm's penalties and filters, and noise that belongs to a position.

The token at a position is the argmax of its filtered log probabilities over the temperature, plus
Gumbel noise that depends on the seed and the position alone (the Gumbel-max trick; Maddison et al.,
"A* sampling", 2014). So a draft that is rejected costs no randomness, a stop inside a block changes
nothing later, and drafts, the width of a block and other sessions change no token.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""mlx-lm's: `(tokens [n], logits [1, V])` to logits, a function of these two and nothing else."""

Proposes = Literal["argmax", "coupled", "drawn"]
"""How a draft chooses where the target draws; `DFlashDrafter.proposes` tells them apart."""

NOISE_OF = {"coupled": "token", "drawn": "draft"}
"""The `use` of the noise by which a draft draws: the target's own, or another."""

_COLUMNS = 64
"""Rows are padded to a multiple of it: MLX's CPU loops end in scalar code, of other bits."""

_LARGEST = 1e37
"""Of factors, so that no product of one with infinity is anything else."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; names and meaning as in mlx-lm, and the defaults are greedy decoding.

    Raises ValueError for a value out of range.
    """

    temperature: float = 0.0
    """0 takes the most probable token, the lowest id where two are equal."""
    top_p: float = 1.0
    """Keep the most probable tokens that together reach it, before temperature (0, 1: all)."""
    min_p: float = 0.0
    """Keep tokens of at least this share of the most probable one's probability."""
    min_tokens_to_keep: int = 1
    """Tokens that `min_p` never removes."""
    top_k: int = 0
    """Keep so many of the most probable tokens; 0 keeps all."""
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens."""
    logits_processors: Sequence[LogitsProcessor] = ()
    """Called after the penalties, in order, for each row with the tokens before it."""
    seed: int | None = None
    """Of the noise; None takes a fresh one for each session."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, math.inf),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("min_tokens_to_keep", 1, math.inf),
            ("top_k", 0, math.inf),
            ("repetition_penalty", 0.0, math.inf),
            ("presence_penalty", -math.inf, math.inf),
            ("frequency_penalty", -math.inf, math.inf),
            ("repetition_context_size", 1, math.inf),
            ("presence_context_size", 1, math.inf),
            ("frequency_context_size", 1, math.inf),
        ):
            value = getattr(self, name)
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                raise ValueError(
                    f"[Sampling] expected {name} from {low} to {high} but got {value}."
                )
        bias = self.logit_bias or {}
        for token, value in bias.items():
            if not isinstance(token, int) or not (abs(value) < 1e30 or value == -math.inf):
                raise ValueError(
                    "[Sampling] expected logit_bias of token ids with finite numbers or -inf "
                    f"but got {token!r}: {value!r}."
                )
        for name in (
            "top_k",
            "min_tokens_to_keep",
            "repetition_context_size",
            "presence_context_size",
            "frequency_context_size",
        ):
            if not isinstance(getattr(self, name), int):
                raise ValueError(
                    f"[Sampling] expected {name} to be an integer but got {getattr(self, name)!r}."
                )

    @property
    def is_argmax(self) -> bool:
        """Whether the token is the argmax of the target's own logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        changed = self.logits_processors or self.logit_bias or any(penalties)
        return self.temperature == 0 and not changed


class Sampler:
    """Draws by one `Sampling` with one seed. It has no state: every call is a function."""

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        """Raises ValueError where a filter does not fit the vocabulary."""
        if sampling.top_k >= vocab_size:
            raise ValueError(
                f"[Sampling] expected top_k below the vocabulary's {vocab_size} tokens "
                f"but got {sampling.top_k}."
            )
        outside = [token for token in sampling.logit_bias or () if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(
                f"[Sampling] expected logit_bias for ids in 0 … {vocab_size - 1} "
                f"but got {outside[0]}."
            )
        self.sampling = sampling
        self.seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._processors = [
            *make_logits_processors(
                dict(sampling.logit_bias) if sampling.logit_bias else None,
                sampling.repetition_penalty,
                sampling.repetition_context_size,
                sampling.presence_penalty,
                sampling.presence_context_size,
                sampling.frequency_penalty,
                sampling.frequency_context_size,
            ),
            *sampling.logits_processors,
        ]

    @property
    def reads_tokens(self) -> bool:
        """Whether `processed` needs the tokens."""
        return bool(self._processors)

    def processed(self, logits: mx.array, tokens: mx.array | None = None) -> mx.array:
        """Logits `[R, V]` in fp32, after bias, penalties and processors.

        `tokens` int `[n + R - 1]`: what stands before the last row; row i is processed with all but
        the last R - 1 - i of them. Unused where `reads_tokens` is False.
        """
        logits = logits.astype(mx.float32)
        if not self._processors:
            return logits
        assert tokens is not None
        count, rows = logits.shape[0], []
        for i in range(count):
            row, before = logits[i : i + 1], tokens[: tokens.shape[0] - (count - 1 - i)]
            for processor in self._processors:
                row = processor(before, row)
            rows.append(row)
        return mx.concatenate(rows)

    def scores(self, logits: mx.array) -> mx.array:
        """Unnormalised log probabilities `[R, V]` that tokens are drawn from, -inf for those that a
        filter removed. `logits [R, V]` fp32, processed. At a temperature above 0.
        """
        return self._scores(logits)[:, : logits.shape[1]]

    def draw(self, logits: mx.array, position: int, use: str = "token") -> mx.array:
        """Tokens int32 `[R]` for the positions `position … position + R - 1`.

        `logits [R, V]` fp32, processed. `use` tells apart draws at the same position.
        """
        if self.sampling.temperature == 0:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        return self._noisy_argmax(self._scores(logits), position, use)

    def noise(self, scores: mx.array, position: int, use: str = "token") -> mx.array:
        """Gumbel noise fp32, in the shape of `scores [R, V]`, row 0 for `position`."""
        rows, columns = scores.shape
        width = columns + -columns % _COLUMNS
        keys = self._keys(position, rows, use)
        return mx.vmap(lambda key: mx.random.gumbel((width,), key=key))(keys)[:, :columns]

    def draft(
        self, logits: mx.array, position: int, proposes: Proposes
    ) -> tuple[mx.array, mx.array]:
        """Drafts int32 `[R]` for the positions from `position` on, and what they were drawn from,
        fp32 `[R, V]`. `logits [R, V]` are the draft's, `proposes` "coupled" or "drawn".
        """
        scores = self.scores(logits.astype(mx.float32))
        tokens = self._noisy_argmax(scores, position, NOISE_OF[proposes])
        return tokens, mx.softmax(scores, axis=-1)

    def judge(
        self, logits: mx.array, drafts: mx.array, probabilities: mx.array, position: int
    ) -> tuple[mx.array, mx.array]:
        """Judges drafts that were drawn from `probabilities` (Leviathan et al., "Fast
        inference from transformers via speculative decoding", 2023).

        Args:
            logits: [n + 1, V] fp32, processed, for the positions `position … position + n`.
            drafts: [n] int.
            probabilities: [n, V] fp32, rows that sum to 1: draft i was drawn from row i.

        Returns:
            Bool [n], whether each is accepted if all before it are. And int32 [n + 1]: at i < n
            what stands in the place of a refused draft i, from the positive part of target minus
            proposal, and at n the target's own token. Where that part is zero everywhere, the
            target's distribution is taken: such a draft is refused by rounding alone.
        """
        count = drafts.shape[0]
        scores = self._scores(logits)
        target = mx.softmax(scores, axis=-1)
        proposal = _padded(probabilities.astype(mx.float32), 0.0)
        at = drafts.astype(mx.int32)[:, None]
        ours = mx.take_along_axis(target[:count], at, axis=-1)[:, 0]
        theirs = mx.take_along_axis(proposal, at, axis=-1)[:, 0]
        keys = self._keys(position, count, "accept")
        uniform = mx.vmap(lambda key: mx.random.uniform(key=key))(keys)
        rest = mx.maximum(target[:count] - proposal, 0.0)
        rest = mx.where(rest.sum(axis=-1, keepdims=True) > 0, rest, target[:count])
        tokens = [self._noisy_argmax(mx.log(rest), position, "residual")] if count else []
        tokens.append(self._noisy_argmax(scores[count:], position + count, "token"))
        return uniform * theirs < ours, mx.concatenate(tokens)

    def _scores(self, logits: mx.array) -> mx.array:
        """As `scores`, padded."""
        chosen = self.sampling
        logits = _padded(logits, -math.inf)
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if 0 < chosen.top_p < 1:
            scores = apply_top_p(scores, chosen.top_p)
        if chosen.min_p:
            scores = apply_min_p(scores, chosen.min_p, chosen.min_tokens_to_keep)
        if chosen.top_k:
            scores = apply_top_k(scores, chosen.top_k)
        # From the best one on, so that no temperature is too low.
        best = scores.max(axis=-1, keepdims=True)
        scale = min(max(1 / chosen.temperature, 1 / _LARGEST), _LARGEST)
        return (scores - best) * scale

    def _noisy_argmax(self, scores: mx.array, position: int, use: str) -> mx.array:
        return mx.argmax(scores + self.noise(scores, position, use), axis=-1).astype(mx.int32)

    def _keys(self, position: int, count: int, use: str) -> mx.array:
        """Keys uint32 `[count, 2]` of MLX's generator."""
        words = []
        for at in range(position, position + count):
            text = f"{self.seed} {at} {use}"
            words.append(
                struct.unpack("<II", hashlib.blake2b(text.encode(), digest_size=8).digest())
            )
        return mx.array(words, dtype=mx.uint32)


def _padded(rows: mx.array, value: float) -> mx.array:
    """`rows [R, V]` with columns of `value` up to a multiple of _COLUMNS."""
    return mx.pad(rows, [(0, 0), (0, -rows.shape[1] % _COLUMNS)], constant_values=value)
