"""A conventional draft model: a small language model of the target's vocabulary, step by step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..sampling import Proposes, Sampler
from ..targets import FAMILIES, Target
from .protocol import Proposal, TargetLike

_TOGETHER = 64
"""Most inputs that are read in one call whose logits are used."""


class AutoregressiveDrafter:
    """Proposes what a language model of the same vocabulary would say.

    Args:
        model: of one of `FAMILIES`, hybrids included: it runs over this package's caches, by MLX's
            own operations on a GPU and by this package's on a CPU, where they are the faster ones.
            A `Target` over such a model runs as that target does. Any other model of mlx-lm runs by
            its own forward, if its prompt cache can be trimmed at any length.
        max_drafts: most tokens of a proposal; each costs a step of the model.
        prefill_step_size: most inputs of one call that reads a prompt.

    The model reads committed tokens once, also those that it drafted itself: after a proposal its
    caches go back to where the committed tokens end (`Cache.snapshot`; trimming, for others), and
    the next proposal begins by reading what was committed since in one call. So no rejected draft
    leaves a trace, and nothing has to be asked of the device.

    Raises ValueError for a model that cannot be taken back.
    """

    tap_layers: tuple[int, ...] = ()
    context_rows: int | None = 0

    proposes: Proposes = "coupled"
    """What is drafted where tokens are drawn (measured by `python -m bench sampling`).

    "argmax": the draft's most probable tokens. "coupled": what the draft draws with the noise that
    the target will draw with; accepted far more often, and like "argmax" it changes no token.
    "drawn": a `Proposal` drawn with other noise; accepted about as often as "coupled", and the text
    of a seed then depends on the blocks that it was drafted in. Penalties and processors are the
    target's alone.
    """

    def __init__(
        self, model: Module | Target, max_drafts: int = 4, *, prefill_step_size: int = 2048
    ) -> None:
        self.max_drafts = operator.index(max_drafts)
        self.prefill_step_size = operator.index(prefill_step_size)
        for name in ("max_drafts", "prefill_step_size"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"[AutoregressiveDrafter] expected {name} of at least 1 "
                    f"but got {getattr(self, name)}"
                )
        if isinstance(model, Target):
            self._target: Target | None = model
        elif getattr(model, "model_type", None) in FAMILIES:
            self._target = Target(model, exact=mx.default_device() == mx.cpu)
        else:
            self._target = None
            _check_stock(model)
        self.model: Module = model.model if isinstance(model, Target) else model
        self.vocab_size = (
            self.model(mx.zeros((1, 1), mx.int32)).shape[-1]  # lazy: nothing is computed
            if self._target is None
            else self._target.vocab_size
        )

    def begin(self, target: TargetLike) -> AutoregressiveSession:
        """A fresh session for one request. Raises ValueError for another vocabulary."""
        if self.vocab_size != target.vocab_size:
            raise ValueError(
                f"[AutoregressiveDrafter.begin] expected a target of vocab_size {self.vocab_size}, "
                f"the draft model's, but got {target.vocab_size}"
            )
        return AutoregressiveSession(self, self.reader())

    def reader(self) -> Reader:
        """The model with an empty cache."""
        return _StockReader(self.model) if self._target is None else _TargetReader(self._target)


class Reader(Protocol):
    """A language model and the tokens that it has read."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""

    def read(self, tokens: mx.array) -> mx.array:
        """Read `tokens [1, n]`, lazily; the logits `[1, V]` after the last one."""

    def snapshot(self) -> Callable[[], None]:
        """A function that takes the cache back to now, however often, whatever was read since."""

    def export(self) -> dict[str, mx.array]:
        """The cache's arrays, cut to the length."""

    def load(self, arrays: Mapping[str, mx.array], length: int) -> None:
        """Take what `export` gave after `length` tokens. Raises ValueError for a misfit."""

    def arrays(self) -> list[mx.array]:
        """Of the cache."""


class _TargetReader:
    def __init__(self, target: Target) -> None:
        self._target, self.cache = target, target.make_cache()

    @property
    def length(self) -> int:
        return self.cache.lengths[0]

    def read(self, tokens: mx.array) -> mx.array:
        hidden, _ = self._target.forward(tokens, self.cache, commit=True)
        return self._target.logits(hidden[:, -1:])[0]

    def snapshot(self) -> Callable[[], None]:
        return self.cache.snapshot()

    def export(self) -> dict[str, mx.array]:
        return self.cache.export()

    def load(self, arrays: Mapping[str, mx.array], length: int) -> None:
        self.cache = self._target.load_cache(arrays, length)

    def arrays(self) -> list[mx.array]:
        return self.cache.arrays()


class _StockReader:
    def __init__(self, model: Module) -> None:
        self._model, self.cache = model, make_prompt_cache(model)

    @property
    def length(self) -> int:
        return int(self.cache[0].offset)

    def read(self, tokens: mx.array) -> mx.array:
        logits: mx.array = self._model(tokens, cache=self.cache)
        return logits[0, -1:]

    def snapshot(self) -> Callable[[], None]:
        offsets = [layer.offset for layer in self.cache]

        def restore() -> None:
            for layer, offset in zip(self.cache, offsets, strict=True):
                layer.trim(layer.offset - offset)

        return restore

    def export(self) -> dict[str, mx.array]:
        return {
            f"{index}.{name}": buffer[:, :, : layer.offset]
            for index, layer in enumerate(self.cache)
            for name, buffer in (("keys", layer.keys), ("values", layer.values))
        }

    def load(self, arrays: Mapping[str, mx.array], length: int) -> None:
        pairs = [(f"{index}.keys", f"{index}.values") for index in range(len(self.cache))]
        names = {name for pair in pairs for name in pair}
        if set(arrays) != names or any(array.shape[2] != length for array in arrays.values()):
            raise ValueError(
                f"[resume] expected {sorted(names)} of {length} tokens "
                f"but got {sorted((n, a.shape) for n, a in arrays.items())}"
            )
        for layer, (keys, values) in zip(self.cache, pairs, strict=True):
            layer.keys, layer.values, layer.offset = arrays[keys], arrays[values], length

    def arrays(self) -> list[mx.array]:
        filled = [layer for layer in self.cache if not layer.empty()]
        return [array for layer in filled for array in (layer.keys, layer.values)]


class AutoregressiveSession:
    """One request: what the draft model has read, and the drafts after it."""

    def __init__(self, drafter: AutoregressiveDrafter, reader: Reader) -> None:
        self.finite: mx.array | None = None
        self._drafter, self._reader = drafter, reader
        self._tokens: list[int] = []
        self._take_back = reader.snapshot()
        """To where the cache holds committed tokens alone."""
        self._logits: mx.array | None = None
        """After the last of those."""

    def observe(self, tokens: Sequence[int]) -> None:
        """Note what was committed; a prompt is read, its last tokens left for the proposal."""
        self._tokens += tokens
        self._take_back()
        while (left := len(self._tokens) - self._reader.length) > _TOGETHER:
            self._read(min(self._drafter.prefill_step_size, left - 1))
            mx.async_eval(self._reader.arrays())

    def extend(self, taps: mx.array, position: int) -> None:
        """It takes no taps."""

    def context(self, length: int) -> dict[str, mx.array]:
        """The model's caches and `length` int32, the tokens in them: at most those that were asked
        for. Empty where nothing was read, or more: a round that failed had read the next one.
        """
        self._take_back()
        read = self._reader.length
        if not 0 < read <= length:
            return {}
        return {"length": mx.array(read, dtype=mx.int32), **self._reader.export()}

    def resume(self, context: Mapping[str, mx.array], tokens: Sequence[int]) -> None:
        """Go on after `tokens`; what is not in the context is read for the next proposal.

        Raises ValueError for the caches of another model.
        """
        arrays = dict(context)
        if "length" in arrays:
            length = cast("int", arrays.pop("length").item())
            if not 0 < length <= len(tokens):
                raise ValueError(f"[resume] expected 1 … {len(tokens)} tokens but got {length}")
            self._reader.load(arrays, length)
            self._take_back = self._reader.snapshot()
        elif arrays:
            raise ValueError(f"[resume] expected a length but got {sorted(arrays)}")
        self._tokens += tokens

    def propose(
        self, pending: mx.array, position: int, count: int, sampler: Sampler | None = None
    ) -> mx.array | Proposal:
        """Drafts int32 `[1, count]`, each from the logits after the one before it, lazily.

        Ties go to the lowest id. With a sampler `AutoregressiveDrafter.proposes` tells how they are
        chosen. Raises ValueError unless `1 <= count <= max_drafts` and `position` is that of the
        last token that was observed.
        """
        drafter = self._drafter
        if not 1 <= count <= drafter.max_drafts:
            raise ValueError(
                f"[propose] expected a count from 1 to {drafter.max_drafts} but got {count}"
            )
        if position != len(self._tokens) - 1:
            raise ValueError(
                f"[propose] expected position {len(self._tokens) - 1} but got {position}"
            )
        self._take_back()
        if left := len(self._tokens) - self._reader.length:
            self._read(left)
        assert self._logits is not None
        rows = [self._logits]
        tokens: list[mx.array] = []
        chances: list[mx.array] = []
        for at in range(position + 1, position + 1 + count):
            if tokens:
                rows.append(self._reader.read(tokens[-1][None]))
            if sampler is None or drafter.proposes == "argmax":
                tokens.append(mx.argmax(rows[-1], axis=-1).astype(mx.int32))
                continue
            token, chance = sampler.draft(rows[-1], at, drafter.proposes)
            tokens.append(token)
            chances.append(chance)
        if self.finite is None:
            self.finite = mx.all(mx.isfinite(mx.concatenate(rows)))
        drafts = mx.concatenate(tokens)[None]
        if chances and drafter.proposes == "drawn":
            return Proposal(drafts, mx.concatenate(chances))
        return drafts

    def arrays(self) -> list[mx.array]:
        """Every array of this session's state, for `mx.eval`."""
        return self._reader.arrays() + ([] if self._logits is None else [self._logits])

    def _read(self, count: int) -> None:
        """Read the next `count` committed tokens."""
        at = self._reader.length
        chunk = mx.array(self._tokens[at : at + count], dtype=mx.int32)[None]
        logits = self._reader.read(chunk)
        # No call between these: after a Ctrl-C the tokens are read again or they were read.
        self._take_back, self._logits = self._reader.snapshot(), logits


def _check_stock(model: Any) -> None:
    name = f"{type(model).__module__}.{type(model).__name__}"
    if not isinstance(model, Module) or not hasattr(model, "layers"):
        raise ValueError(
            f"[AutoregressiveDrafter] expected a language model that mlx-lm loaded but got {name}"
        )
    others = {type(cache).__name__ for cache in make_prompt_cache(model)} - {KVCache.__name__}
    if others:
        raise ValueError(
            f"[AutoregressiveDrafter] expected a model of {', '.join(FAMILIES)}, or one whose "
            f"prompt cache can be trimmed at any length, but {name} has {', '.join(sorted(others))}"
        )
