"""The target: a language model of mlx-lm, read by functions of (model, tokens, cache)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..cache import AttentionCache, Cache, RecurrentCache
from ..modules import Products
from . import llama, qwen3, qwen3_5, qwen3_next
from .layers import ExactLayers, Layers, StockLayers
from .support import check_exact, check_supported


class Family(Protocol):
    """What a family's module gives. Its name is that of mlx-lm's module."""

    __name__: str

    def text_model(self, model: Module) -> Module:
        """The module that holds args, model (embed_tokens, layers, norm) and lm_head."""

    def make_layer_caches(
        self, model: Module, batch_size: int, dtype: mx.Dtype
    ) -> Sequence[AttentionCache | RecurrentCache]:
        """Empty caches, one a layer."""

    def forward(
        self,
        model: Module,
        tokens: mx.array,
        cache: Cache,
        *,
        layers: Layers,
        commit: bool,
        tap_layers: Sequence[int] = (),
    ) -> tuple[mx.array, mx.array | None]:
        """See `Target.forward`."""


FAMILIES: dict[str, Family] = {
    "llama": llama,
    "qwen3": qwen3,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5,
    "qwen3_next": qwen3_next,
}
"""The module that runs each model_type."""

Prefill = Literal["fast", "exact"]
"""By which operations a prompt is read."""


class Target:
    """A model loaded by mlx-lm, as the drafters and the session see it: read, never changed.

    Args:
        model: of a family in `FAMILIES`.
        exact: decode by operations whose bits do not depend on the width of a call, so that a block
            verify gives what single steps give, bit for bit. Otherwise by MLX's own, which are
            another's up to rounding, so that a near tie can flip a token.
        prefill: "exact" reads prompts by the operations of decoding, and then the caches depend on
            the tokens alone, not on the chunks or rounds that fed them. "fast" reads them by MLX's
            own operations on a GPU; on the CPU, where those are several times slower, it is the
            same as "exact".

    On the CPU an exact target packs each weight at its first use and keeps that beside the model:
    sessions, and calls of `generate`, share it by sharing the target.

    Raises ValueError if the model is of no known family, is a DFlash draft, is split over several
    processes, or has a rotary embedding whose values depend on the width of the call; with `exact`
    also if it holds a layer that has no such operations, naming it.
    """

    def __init__(self, model: Module, *, exact: bool = True, prefill: Prefill = "fast") -> None:
        if prefill not in ("fast", "exact"):
            raise ValueError(f"[Target] expected prefill 'fast' or 'exact' but got {prefill!r}")
        if prefill == "exact" and not exact:
            raise ValueError(
                "[Target] expected exact=True with prefill='exact' but got exact=False"
            )
        self._family = _family_of(model)
        self.model = model
        self._text: Module = self._family.text_model(model)
        check_supported(model, self._text)
        self.model_type: str = model.model_type
        self.hidden_size: int = self._text.args.hidden_size
        self.vocab_size: int = self._text.args.vocab_size
        self.num_layers: int = len(self._text.model.layers)
        self.dtype: mx.Dtype = self.embed(mx.zeros((1, 1), mx.int32)).dtype
        """Of the activations."""
        if exact:
            check_exact(model, self._family.make_layer_caches(model, 1, self.dtype))
        self.exact = exact
        self.prefill = prefill
        self._products = Products()
        self._stock = StockLayers()
        self._decoding: Layers = ExactLayers(self._products) if exact else self._stock

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the weights that were packed so far for the CPU, beside the model's own."""
        return self._products.nbytes

    def make_cache(self, batch_size: int = 1) -> Cache:
        """An empty cache for `batch_size` rows."""
        if batch_size < 1:
            raise ValueError(f"[make_cache] expected at least one row but got {batch_size}")
        layers = self._family.make_layer_caches(self.model, batch_size, self.dtype)
        return Cache(layers, batch_size)

    def load_cache(self, arrays: Mapping[str, mx.array], length: int) -> Cache:
        """A cache of one row that holds what `Cache.export` gave after `length` inputs.

        Raises ValueError for arrays that are not those of this target's caches at that length.
        """
        probe = self.make_cache()  # what the arrays are like after a call; lazy, nothing is run
        self.forward(mx.zeros((1, 1), mx.int32), probe, commit=True)
        expected = {
            name: (array.dtype, [*array.shape[:2], length, *array.shape[3:]])
            if name.endswith(("keys", "values"))
            else (array.dtype, [*array.shape])
            for name, array in probe.export().items()
        }
        found = {name: (array.dtype, [*array.shape]) for name, array in arrays.items()}
        if found != expected:
            at = next(n for n in [*expected, *found] if found.get(n) != expected.get(n))
            raise ValueError(
                f"[load_cache] expected the arrays of this target after {length} inputs, {at} "
                f"{_described(expected.get(at))}, but got {_described(found.get(at))}"
            )
        cache = self.make_cache()
        cache.load(arrays, length)
        return cache

    def forward(
        self,
        tokens: mx.array,
        cache: Cache,
        *,
        commit: bool,
        tap_layers: Sequence[int] = (),
    ) -> tuple[mx.array, mx.array | None]:
        """Run T inputs of each row at the row's own position, lazily.

        `tokens [B, T]` are ints. With `commit` the inputs join the committed prefix at once, as in
        prefill and plain decoding; without it they are on trial until `cache.commit`.

        Returns `(hidden, taps)`: hidden `[B, T, H]` after the final norm, and the residual stream
        after each layer of `tap_layers` (0-based), concatenated in their order to
        `[B, T, len(tap_layers) * H]`, or None without any.

        Raises ValueError for tokens that do not fit the cache, for a layer that does not exist and
        for a verify that was not committed; the committed prefix is then as it was.
        """
        for layer in tap_layers:
            if not 0 <= layer < self.num_layers:
                raise ValueError(
                    f"[forward] expected tap layers from 0 to {self.num_layers - 1} "
                    f"but got {list(tap_layers)}"
                )
        stock = commit and self.prefill == "fast" and mx.default_device() != mx.cpu
        layers = self._stock if stock else self._decoding
        return self._family.forward(
            self.model, tokens, cache, layers=layers, commit=commit, tap_layers=tap_layers
        )

    def logits(self, hidden: mx.array) -> mx.array:
        """The LM head, or the tied embedding: `[B, T, H]` to `[B, T, V]`."""
        text = self._text
        tied = text.args.tie_word_embeddings
        return self._decoding.head(text.model.embed_tokens if tied else text.lm_head, hidden)

    def embed(self, tokens: mx.array) -> mx.array:
        """Input embeddings with the target's own scale: `[B, T]` to `[B, T, H]`."""
        embedded: mx.array = self._text.model.embed_tokens(tokens)
        return embedded


def _described(array: tuple[mx.Dtype, list[int]] | None) -> str:
    return "absent" if array is None else f"{array[0]} {array[1]}"


def _family_of(model: Module) -> Family:
    name = f"{type(model).__module__}.{type(model).__name__}"
    if _is_draft(model):
        raise ValueError(
            f"[Target] expected a language model but got the DFlash draft {name}: "
            "pass it as the drafter of a target"
        )
    known = ", ".join(FAMILIES)
    model_type = getattr(model, "model_type", None)
    if model_type not in FAMILIES:
        raise ValueError(
            f"[Target] expected a model_type among {known} but got {model_type!r} ({name})"
        )
    family = FAMILIES[model_type]
    expected = f"mlx_lm.models.{family.__name__.rpartition('.')[2]}"
    if not any(
        cls.__module__ == expected and cls.__name__ == "Model" for cls in type(model).__mro__
    ):
        raise ValueError(
            f"[Target] expected a {model_type} model that mlx-lm loaded ({expected}.Model) "
            f"but got {name}"
        )
    return family


def _is_draft(model: object) -> bool:
    if any(cls.__name__.startswith("DFlash") for cls in type(model).__mro__):
        return True
    return hasattr(model, "fc") and hasattr(model, "hidden_norm")
