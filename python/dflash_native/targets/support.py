"""Which models a target can run, and which of them exactly: everything else is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.convolution import Conv1d
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.positional_encoding import RoPE
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models import llama, qwen3, qwen3_5, qwen3_5_moe, qwen3_next
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU, SwitchLinear

from ..cache import AttentionCache, RecurrentCache
from ..ops import HEAD_DIMS

SHARDED_LAYERS = {
    "AllToShardedLinear",
    "ShardedToAllLinear",
    "QuantizedAllToShardedLinear",
    "QuantizedShardedToAllLinear",
    "FullyShardedModule",
}
"""Classes of mlx.nn whose results need other processes."""

_STRUCTURES = {module.__name__ for module in (llama, qwen3, qwen3_5, qwen3_5_moe, qwen3_next)}
"""Modules of mlx-lm whose classes the families read layer by layer."""

_HINT = "exact=False runs it by MLX's own operations"


def check_supported(model: Module, text: Module) -> None:
    """Raise ValueError for a model that no setting can run."""
    if getattr(text.model, "pipeline_size", 1) > 1:
        raise ValueError(
            "[Target] expected the whole model in one process but it is one stage of a pipeline "
            f"of {text.model.pipeline_size}"
        )
    for path, module in model.named_modules():
        kind = type(module).__name__
        if kind in SHARDED_LAYERS or getattr(module, "sharding_group", None) is not None:
            raise ValueError(
                "[Target] expected the whole model in one process "
                f"but {path or 'the model'} ({kind}) is sharded"
            )
        if kind == "DynamicNTKScalingRoPE":
            raise ValueError(
                f"[Target] expected a rotary embedding that depends on positions alone but {path} "
                "is DynamicNTKScalingRoPE, whose base depends on the width of the call"
            )
    if any(getattr(layer, "use_sliding", False) for layer in text.model.layers):
        window = text.model.sliding_window
        if not window:
            raise ValueError(
                f"[Target] expected a sliding_window for the sliding layers but got {window}"
            )


def check_exact(model: Module, caches: Sequence[AttentionCache | RecurrentCache]) -> None:
    """Raise ValueError, by path and class, for what has no width-independent operation here.

    `caches` are the model's, one a layer.
    """
    for path, module in model.named_modules():
        kind = type(module)
        if kind in _LEAVES:
            problem = _LEAVES[kind](module)
        elif not path or kind is SwitchGLU or kind.__module__ in _STRUCTURES:
            problem = None
        else:
            problem = "is none of the classes that mlx-lm makes this model of"
        if problem is not None:
            raise ValueError(
                "[Target] expected layers that run exactly "
                f"but {path} ({kind.__name__}) {problem}: {_HINT}"
            )
    for index, cache in enumerate(caches):
        if isinstance(cache, AttentionCache):
            dim = cache.keys.shape[-1]
            if dim not in HEAD_DIMS:
                known = ", ".join(map(str, HEAD_DIMS))
                raise ValueError(
                    f"[Target] expected layers that run exactly but the heads of layer {index} "
                    f"have {dim} dimensions and not {known}: {_HINT}"
                )


def _dense(layer: Module) -> str | None:
    if layer.weight.dtype in (mx.float32, mx.bfloat16, mx.float16):
        return None
    return f"has a weight of {layer.weight.dtype}"


def _affine(layer: Module) -> str | None:
    if layer.mode == "affine" and layer.bits in (4, 8) and layer.group_size in (32, 64, 128):
        return None
    return (
        f"is quantised as {layer.mode}, {layer.bits} bits in groups of {layer.group_size}, and "
        "not as affine, 4 or 8 bits in groups of 32, 64 or 128"
    )


def _any(layer: Module) -> None:
    return None


_LEAVES: dict[type, Callable[[Module], str | None]] = {
    Linear: _dense,
    Embedding: _dense,
    SwitchLinear: _dense,
    QuantizedLinear: _affine,
    QuantizedEmbedding: _affine,
    QuantizedSwitchLinear: _affine,
    **dict.fromkeys((Conv1d, RMSNorm, SwiGLU, RoPE, Llama3RoPE, SuScaledRoPE, YarnRoPE), _any),
}
"""Subclasses are other classes: they may compute something else."""
