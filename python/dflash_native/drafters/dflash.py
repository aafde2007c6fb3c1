"""The DFlash block-diffusion drafter: one pass over `[anchor, mask, mask, …]` proposes a block.

The forward pass is that of the published DFlash and DFlash2 checkpoints and stays lazy throughout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.rope_utils import initialize_rope

from .. import ops
from ..modules import Products, norm, rotate
from ..sampling import Proposes, Sampler
from .config import DFlashConfig
from .context import ContextCache
from .dflash2 import CandidateSelector, GroupedDynamicConv
from .protocol import Proposal, TargetLike
from .weights import check_dtype, load_weights


class Attention(Module):
    """Queries from the block; keys and values from context and block by the same projections."""

    def __init__(self, config: DFlashConfig, layer: int, products: Products) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.window, self.causal = config.window(layer), config.causal(layer)
        self.products = products
        self.q_proj = Linear(hidden, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = Linear(hidden, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = Linear(hidden, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = Linear(config.num_attention_heads * self.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def _heads(self, x: mx.array) -> mx.array:
        return mx.unflatten(x, -1, (-1, self.head_dim))

    def store(
        self, rows: mx.array, rope: Module, position: int, cache: ContextCache, committed: int
    ) -> None:
        """Write the keys and values of `rows [1, T, H]`, from `position` on, after the context."""
        both = self.products.matmuls((self.k_proj, self.v_proj), rows)
        keys, values = map(self._heads, both)
        keys = rotate(rope, norm(self.k_norm, keys).transpose(0, 2, 1, 3), [position])
        cache.write(keys, values.transpose(0, 2, 1, 3), committed)

    def __call__(self, x: mx.array, rope: Module, position: int, cache: ContextCache) -> mx.array:
        """`x [1, B, H]` at `position …`, whose keys and values were stored, to `[1, B, H]`."""
        queries = norm(self.q_norm, self._heads(self.products.matmul(self.q_proj, x)))
        queries = rotate(rope, queries.transpose(0, 2, 1, 3), [position])
        y = ops.verify_attention(
            queries,
            cache.keys,
            cache.values,
            [cache.rows],
            self.head_dim**-0.5,
            window=self.window,
            causal=self.causal,
        )
        return self.products.matmul(self.o_proj, y.transpose(0, 2, 1, 3).flatten(-2))


class MLP(Module):
    """SwiGLU."""

    def __init__(self, config: DFlashConfig, products: Products) -> None:
        super().__init__()
        self.products = products
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, bias=False)
        self.up_proj = Linear(hidden, inner, bias=False)
        self.down_proj = Linear(inner, hidden, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = self.products.matmuls((self.gate_proj, self.up_proj), x)
        return self.products.matmul(self.down_proj, ops.swiglu(gate, up))


class Layer(Module):
    """A pre-norm layer. The context reaches its attention as it is: no norm and no convolution."""

    def __init__(self, config: DFlashConfig, index: int, products: Products) -> None:
        super().__init__()
        self.self_attn = Attention(config, index, products)
        self.mlp = MLP(config, products)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.is_dflash2:
            self.attention_conv = GroupedDynamicConv(config, products)
            self.mlp_conv = GroupedDynamicConv(config, products)
        self.convolves = config.is_dflash2

    def append(self, context: mx.array, rope: Module, position: int, cache: ContextCache) -> None:
        """Add `context [1, n, H]`, which ends before `position`, to this layer's cache."""
        rows = _reachable(context, cache)
        new = rows.shape[1]
        self.self_attn.store(rows, rope, position - new, cache, new)

    def __call__(
        self,
        x: mx.array,
        context: mx.array | None,
        rope: Module,
        position: int,
        cache: ContextCache,
    ) -> mx.array:
        """The block `x [1, B, H]` at `position …` after `context [1, n, H]`, in no cache yet."""
        inner = norm(self.input_layernorm, x)
        if self.convolves:
            before, after = self.attention_conv.kernels(inner)
            inner = self.attention_conv(inner, before)
        rows, new = inner, 0
        if context is not None:
            context = _reachable(context, cache)
            rows, new = mx.concatenate([context, inner], axis=1), context.shape[1]
        self.self_attn.store(rows, rope, position - new, cache, new)
        y = self.self_attn(inner, rope, position, cache)
        x = x + (self.attention_conv(y, after) if self.convolves else y)

        inner = norm(self.post_attention_layernorm, x)
        if not self.convolves:
            return x + self.mlp(inner)
        before, after = self.mlp_conv.kernels(inner)
        return x + self.mlp_conv(self.mlp(self.mlp_conv(inner, before)), after)


def _reachable(context: mx.array, cache: ContextCache) -> mx.array:
    skipped = cache.skip(context.shape[1])
    return context[:, skipped:] if skipped else context


class DFlashModel(Module):
    """The draft's weights. Embedding table and LM head are the target's."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, self.products = config.hidden_size, Products()
        self.fc = Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = [
            Layer(config, index, self.products) for index in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm(hidden, eps=config.rms_norm_eps)
        if config.is_dflash2:
            self.candidate_selector = CandidateSelector(config, self.products)
        self.rope = initialize_rope(
            config.head_dim,
            config.rope_theta,
            False,
            None if config.rope_scaling is None else dict(config.rope_scaling),
            config.max_position_embeddings,
        )

    @property
    def dtype(self) -> mx.Dtype:
        return self.norm.weight.dtype

    def context(self, taps: mx.array) -> mx.array:
        """`taps [1, n, len(target_layer_ids) * H]` to the rows `[1, n, H]` shared by all layers."""
        return norm(self.hidden_norm, self.products.matmul(self.fc, taps.astype(self.dtype)))


class DFlashDrafter:
    """A DFlash or DFlash2 draft: weights shared by any number of sessions."""

    proposes: Proposes = "coupled"
    """What is drafted where tokens are drawn (`python -m bench sampling` measures all three).

    "argmax": the draft's most probable tokens. "coupled": what the draft draws with the noise that
    the target will draw with; accepted more often, and like "argmax" it changes no token. "drawn":
    a `Proposal` drawn with other noise; accepted still more often, but then the text of a seed
    depends on the blocks that it was drafted in.
    """

    def __init__(self, config: DFlashConfig, model: DFlashModel) -> None:
        check_dtype(model.dtype)
        self.config, self.model = config, model
        self.tap_layers = config.target_layer_ids
        self.context_rows = config.context_rows
        self.max_drafts = config.block_size - 1

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the weights that were packed so far for the CPU, beside the model's own."""
        return self.model.products.nbytes

    @classmethod
    def load(cls, path: str | Path, dtype: mx.Dtype | None = None) -> DFlashDrafter:
        """Load a folder with `config.json` and `model.safetensors` or `model-*.safetensors` shards.

        `dtype`: bfloat16 or float32; None keeps the stored one. Raises FileNotFoundError for a
        missing file and ValueError for a configuration, a file, a tensor or a dtype that does not
        fit, always naming it.
        """
        folder = Path(path)
        config = DFlashConfig.load(folder)
        model = DFlashModel(config)
        model.load_weights(list(load_weights(folder, config, dtype).items()))
        model.eval()
        return cls(config, model)

    def begin(self, target: TargetLike) -> DFlashSession:
        """A fresh session for one request. Raises TypeError or ValueError for a misfit."""
        if isinstance(target, (DFlashDrafter, DFlashModel)):
            raise TypeError("[DFlashDrafter.begin] expected a target model but got a DFlash draft")
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(self.config, name), getattr(target, name)
            if ours != theirs:
                raise ValueError(
                    f"[DFlashDrafter.begin] expected a target of {name} {ours} but got {theirs}"
                )
        if max(self.tap_layers) >= target.num_layers:
            raise ValueError(
                f"[DFlashDrafter.begin] expected a target with layer {max(self.tap_layers)} "
                f"(target_layer_ids {list(self.tap_layers)}) but got {target.num_layers} layers"
            )
        return DFlashSession(self, target)


class DFlashSession:
    """One request's draft context. Positions are host integers and everything else stays lazy."""

    def __init__(self, drafter: DFlashDrafter, target: TargetLike) -> None:
        self.config, self.model, self.target = drafter.config, drafter.model, target
        self._drafter = drafter
        config, dtype = self.config, self.model.dtype
        self.max_drafts = drafter.max_drafts
        self.position = 0
        """The next position to come: as many positions are committed."""
        self.finite: mx.array | None = None
        """Whether the first proposal's logits were all finite, lazy. None before it."""
        self._caches = [
            ContextCache(config.num_key_value_heads, config.head_dim, dtype, config.window(layer))
            for layer in range(config.num_hidden_layers)
        ]
        self._waiting: mx.array | None = None
        self._mask_tokens = mx.full((1, self.max_drafts), config.mask_token_id, dtype=mx.int32)

    def observe(self, tokens: Sequence[int]) -> None:
        """The context comes by `extend`: nothing is needed of the tokens."""

    def extend(self, taps: mx.array, position: int) -> None:
        """Append the committed positions `position … position + n - 1` (see `DraftSession.extend`).

        A round's few rows wait for the next block and share its projections; a longer run goes into
        the caches. Raises ValueError where the shape or the position does not fit.
        """
        columns = len(self.config.target_layer_ids) * self.config.hidden_size
        if taps.ndim != 3 or taps.shape[0] != 1 or taps.shape[2] != columns:
            raise ValueError(f"[extend] expected taps (1, n, {columns}) but got {taps.shape}")
        new, reach = taps.shape[1], self.config.context_rows
        if position != self.position and (reach is None or position < self.position):
            raise ValueError(f"[extend] expected position {self.position} but got {position}")
        if new == 0:
            return
        if position > self.position:
            self._waiting = None
            for cache in self._caches:
                cache.rows = 0
        self.position = position + new
        if reach is not None and new > reach:
            taps = taps[:, -reach:]
        context = self.model.context(taps)
        if self._waiting is not None:
            context = mx.concatenate([self._waiting, context], axis=1)
        self._waiting = context
        if context.shape[1] > self.config.block_size:
            self._waiting = None
            for layer, cache in zip(self.model.layers, self._caches, strict=True):
                layer.append(context, self.model.rope, self.position, cache)

    def context(self, length: int) -> dict[str, mx.array]:
        """`{layer}.keys`, `{layer}.values` `[1, Hkv, rows, D]` of the rows that a block may see;
        `waiting` `[1, n, H]`, the newest positions, whose keys and values are still to come.

        Raises ValueError unless `length` positions were extended.
        """
        if length != self.position:
            raise ValueError(f"[context] expected length {self.position} but got {length}")
        waiting = self._waiting
        if waiting is None:
            waiting = mx.zeros((1, 0, self.config.hidden_size), self.model.dtype)
        found = {"waiting": waiting}
        for index, cache in enumerate(self._caches):
            found[f"{index}.keys"], found[f"{index}.values"] = cache.export()
        return found

    def resume(self, context: Mapping[str, mx.array], tokens: Sequence[int]) -> None:
        """Go on after the positions of `tokens` with what `context` gave.

        Raises ValueError for arrays of another drafter, or of another length.
        """
        config, dtype = self.config, self.model.dtype
        layers = range(len(self._caches))
        names = {"waiting", *(f"{i}.{name}" for i in layers for name in ("keys", "values"))}
        if set(context) != names or any(array.dtype != dtype for array in context.values()):
            raise ValueError(
                f"[resume] expected this drafter's context, {dtype} {sorted(names)}, "
                f"but got {sorted((n, a.dtype) for n, a in context.items())}"
            )
        waiting = context["waiting"]
        before = len(tokens) - waiting.shape[1]
        for index, cache in enumerate(self._caches):
            keys, values = context[f"{index}.keys"], context[f"{index}.values"]
            if keys.shape != values.shape or not cache.fits(keys.shape, before):
                raise ValueError(
                    f"[resume] expected keys and values of {before} positions in layer {index} "
                    f"but got {keys.shape} and {values.shape}"
                )
        if waiting.shape != (1, len(tokens) - before, config.hidden_size):
            raise ValueError(
                f"[resume] expected waiting (1, n, {config.hidden_size}) but got {waiting.shape}"
            )
        for index, cache in enumerate(self._caches):
            keys, values = context[f"{index}.keys"], context[f"{index}.values"]
            if keys.shape[2]:
                cache.write(keys, values, keys.shape[2])
        self._waiting = waiting if waiting.shape[1] else None
        self.position = len(tokens)

    def hidden(self, pending: mx.array, position: int) -> mx.array:
        """The block's hidden states `[1, block_size, H]` before the final norm.

        `pending [1, 1]` int stands at `position`, the first one that is not committed. Only context
        stays in the caches. Raises ValueError where the shape or the position does not fit.
        """
        if pending.shape != (1, 1):
            raise ValueError(f"[propose] expected pending (1, 1) but got {pending.shape}")
        if position != self.position:
            raise ValueError(f"[propose] expected position {self.position} but got {position}")
        block = mx.concatenate([pending.astype(mx.int32), self._mask_tokens], axis=1)
        x = self.target.embed(block).astype(self.model.dtype)
        if self.config.input_embedding_scale != 1.0:
            x = x * self.config.input_embedding_scale
        context, self._waiting = self._waiting, None
        for layer, cache in zip(self.model.layers, self._caches, strict=True):
            x = layer(x, context, self.model.rope, position, cache)
        return x

    def logits(self, hidden: mx.array) -> mx.array:
        """`hidden [1, n, H]` after the final norm to `[1, n, V]`, with multiplier and softcap.

        The head works in the target's dtype; multiplier and softcap, where there are any, in fp32.
        """
        logits = self.target.logits(hidden.astype(self.target.dtype))
        if self.config.output_multiplier != 1.0:
            logits = logits.astype(mx.float32) * self.config.output_multiplier
        if self.config.final_logit_softcapping is not None:
            cap = self.config.final_logit_softcapping
            logits = cap * mx.tanh(logits.astype(mx.float32) / cap)
        return logits

    def propose(
        self, pending: mx.array, position: int, count: int, sampler: Sampler | None = None
    ) -> mx.array | Proposal:
        """Drafts for `position + 1 … position + count`, int32 `[1, count]`.

        The block always has its trained width; only its first `count` mask rows go through the
        head. Ties go to the lowest id. With a sampler `DFlashDrafter.proposes` tells how they are
        chosen. Raises ValueError unless `1 <= count <= max_drafts`.
        """
        if not 1 <= count <= self.max_drafts:
            raise ValueError(
                f"[propose] expected a count from 1 to {self.max_drafts} but got {count}"
            )
        hidden = norm(self.model.norm, self.hidden(pending, position)[:, 1 : 1 + count])
        logits = self.logits(hidden)
        if self.finite is None:
            self.finite = mx.all(mx.isfinite(logits))
        proposes: Proposes = self._drafter.proposes if sampler is not None else "argmax"
        if self.config.is_dflash2:
            return self.model.candidate_selector.propose(
                hidden, logits, pending, proposes, sampler, position + 1
            )
        if sampler is None or proposes == "argmax":
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        tokens, probabilities = sampler.draft(logits[0], position + 1, proposes)
        return tokens[None] if proposes == "coupled" else Proposal(tokens[None], probabilities)

    def arrays(self) -> list[mx.array]:
        """Every array of this session's state, for `mx.eval`."""
        arrays = [array for cache in self._caches for array in cache.arrays()]
        return arrays if self._waiting is None else [*arrays, self._waiting]
