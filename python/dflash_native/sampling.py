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
from typing import Literal, SupportsFloat

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from ._arguments import integer, number

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

_LARGEST_BIAS = 1e30
_MILDEST = 1e-6
"""Of biases and penalties: within these bounds no sum or product of them leaves fp32."""

_NUMBERS = (
    ("temperature", 0.0, math.inf),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.0, math.inf),
    ("presence_penalty", -_LARGEST_BIAS, _LARGEST_BIAS),
    ("frequency_penalty", -_LARGEST_BIAS, _LARGEST_BIAS),
)
_INTEGERS = (
    ("min_tokens_to_keep", 1),
    ("top_k", 0),
    ("repetition_context_size", 1),
    ("presence_context_size", 1),
    ("frequency_context_size", 1),
)
"""The fields of a `Sampling` and their ranges."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; names and meaning as in mlx-lm, and the defaults are greedy decoding.

    numpy's scalars are taken as Python's. Raises ValueError for a value out of range, TypeError for
    one of another kind.
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
    """Divides positive logits of recent tokens and multiplies negative ones; 0 is none at all."""
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
        def take(name: str, value: object) -> None:
            object.__setattr__(self, name, value)  # a numpy scalar becomes Python's

        for name, low, high in _NUMBERS:
            value = getattr(self, name)
            if value is not None or name in ("temperature", "top_p", "min_p"):
                take(name, number("Sampling", name, value, low, high))
        if self.repetition_penalty and not _MILDEST <= self.repetition_penalty <= 1 / _MILDEST:
            raise ValueError(
                f"[Sampling] expected repetition_penalty 0 (none) or in {_MILDEST:g} … "
                f"{1 / _MILDEST:g} but got {self.repetition_penalty:g}."
            )
        for name, least in _INTEGERS:
            take(name, integer("Sampling", name, getattr(self, name), least))
        if self.seed is not None:
            take("seed", integer("Sampling", "seed", self.seed))
        if self.logit_bias is not None:
            take("logit_bias", _bias(self.logit_bias))
        check_processors("Sampling", self.logits_processors)

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
        for name, most in (("top_k", vocab_size - 1), ("min_tokens_to_keep", vocab_size)):
            if getattr(sampling, name) > most:
                raise ValueError(
                    f"[Sampling] expected {name} of at most {most} in a vocabulary of {vocab_size} "
                    f"tokens but got {getattr(sampling, name)}."
                )
        outside = [token for token in sampling.logit_bias or () if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(
                f"[Sampling] expected logit_bias for ids in 0 … {vocab_size - 1} "
                f"but got {outside[0]}."
            )
        if list((sampling.logit_bias or {}).values()).count(-math.inf) == vocab_size:
            raise ValueError(
                "[Sampling] expected logit_bias to leave a token but got -inf for all."
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
                row = _checked(processor, processor(before, row), logits.shape[1])
            rows.append(row.astype(mx.float32))
        return mx.concatenate(rows)

    def scores(self, logits: mx.array) -> mx.array:
        """Unnormalised log probabilities `[R, V]` that tokens are drawn from, -inf for those that a
        filter removed. `logits [R, V]` fp32, processed. At a temperature above 0.
        """
        return self._scores(logits)[:, : logits.shape[1]]

    def tempered(self, scores: mx.array) -> mx.array:
        """`scores [..., n]` over the temperature, the best one 0, so that no temperature is too low
        or too high.
        """
        scale = min(max(1 / self.sampling.temperature, 1 / _LARGEST), _LARGEST)
        return (scores - scores.max(axis=-1, keepdims=True)) * scale

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
        return (uniform * theirs < ours) & (ours > 0), mx.concatenate(tokens)

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
        return self.tempered(scores)

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


def check_processors(operation: str, processors: object) -> None:
    """Raises TypeError for anything but a list of callables."""
    wrong: list[object] = [processors]
    if isinstance(processors, Sequence) and not isinstance(processors, str):
        wrong = [each for each in processors if not callable(each)]
    if wrong:
        raise TypeError(
            f"[{operation}] expected logits_processors to be a list of callables "
            f"but got {type(wrong[0]).__name__}."
        )


def _bias(bias: object) -> dict[int, float]:
    """A `logit_bias` with Python's numbers."""
    if not isinstance(bias, Mapping):
        raise TypeError(
            f"[Sampling] expected logit_bias to be a mapping but got {type(bias).__name__}."
        )
    found = {}
    for key, value in bias.items():
        token = integer("Sampling", "logit_bias's token ids", key)
        if isinstance(value, SupportsFloat) and float(value) == -math.inf:
            found[token] = -math.inf
        else:
            name = f"logit_bias[{token}], unless it is -inf,"
            found[token] = number("Sampling", name, value, -_LARGEST_BIAS, _LARGEST_BIAS)
    return found


def _checked(processor: LogitsProcessor, row: object, vocab_size: int) -> mx.array:
    """What `processor` gave, if it is one row of logits."""
    if isinstance(row, mx.array) and row.shape == (1, vocab_size):
        return row
    name = getattr(processor, "__name__", type(processor).__name__)
    given = row.shape if isinstance(row, mx.array) else type(row).__name__
    raise ValueError(
        f"[Sampling] expected logits (1, {vocab_size}) from the logits processor {name} "
        f"but got {given}."
    )


def _padded(rows: mx.array, value: float) -> mx.array:
    """`rows [R, V]` with columns of `value` up to a multiple of _COLUMNS."""
    return mx.pad(rows, [(0, 0), (0, -rows.shape[1] % _COLUMNS)], constant_values=value)
