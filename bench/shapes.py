"""Models by their shapes alone: published dimensions, filled with random weights."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map_with_path

from dflash_native.drafters import DFlashDrafter
from dflash_native.drafters.config import DFlashConfig
from dflash_native.drafters.dflash import DFlashModel

HYBRID = {
    "model_type": "qwen3_5",
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 32,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
"""What the text models of Qwen3.5 and its successors have in common."""

DENSE_27B = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "linear_num_value_heads": 48,
}
SLIDING = ("sliding_attention",) * 4 + ("full_attention",)


@dataclass(frozen=True)
class Shape:
    """Dimensions of a target and of a draft for it."""

    source: str
    """Where the target's come from."""
    config: dict[str, Any]
    """The text model's configuration in mlx-lm's names."""
    draft: dict[str, Any] = field(default_factory=dict)
    """What the draft's configuration has beside `DRAFT`."""


DRAFT = {
    "architectures": ["DFlashDraftModel"],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "max_position_embeddings": 262144,
    "block_size": 16,
    "layer_types": SLIDING,
    "sliding_window": 2048,
}
"""Of a draft: five layers, as published for the 27B; where no draft is published, too."""

SHAPES = {
    "tiny": Shape(
        "none: for tests",
        {
            **HYBRID,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "vocab_size": 512,
            "tie_word_embeddings": True,
        },
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "layer_types": ("sliding_attention", "full_attention"),
            "sliding_window": 32,
        },
    ),
    "tiny-moe": Shape(
        "none: for tests",
        {
            **HYBRID,
            "model_type": "qwen3_5_moe",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "vocab_size": 512,
        },
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 128,
            "architectures": ["DFlash2DraftModel"],
            "layer_types": ("full_attention",),
            "dflash_config": {
                "conv_kernel_size": 2,
                "conv_group_size": 16,
                "selector_rank": 8,
                "selector_top_k": 4,
            },
        },
    ),
    "tiny-dense": Shape(
        "none: for tests",
        {
            "model_type": "qwen3",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "vocab_size": 512,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
        },
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    ),
    "qwen3.5-4b": Shape(
        "config.json of Qwen/Qwen3.5-4B, text_config",
        {
            **HYBRID,
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-9b": Shape(
        "config.json of Qwen/Qwen3.5-9B, text_config",
        {**HYBRID, "hidden_size": 4096, "intermediate_size": 12288},
    ),
    "qwen3.5-27b": Shape(
        "config.json of Qwen/Qwen3.5-27B, text_config; draft as z-lab/Qwen3.6-27B-DFlash",
        {**HYBRID, **DENSE_27B},
        {"dflash_config": {"target_layer_ids": (1, 16, 31, 46, 61)}},
    ),
    "qwen3.5-35b-a3b": Shape(
        "config.json of Qwen/Qwen3.5-35B-A3B, text_config; draft as z-lab/Qwen3.6-35B-A3B-DFlash "
        "but for its inner width, which is 6144 here",
        {
            **HYBRID,
            "model_type": "qwen3_5_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        {
            "intermediate_size": 6144,
            "layer_types": ("sliding_attention",) * 5 + ("full_attention",),
            "sliding_window": 4096,
            "dflash_config": {"target_layer_ids": (1, 6, 11, 16, 22, 27, 32, 37)},
        },
    ),
    "qwen3.8-27b": Shape(
        "config.json of Qwen/Qwen3.8-27B, text_config: the dimensions of Qwen3.5-27B; draft as "
        "z-lab/Qwen3.8-27B-DFlash2",
        {**HYBRID, **DENSE_27B},
        {
            "architectures": ["DFlash2DraftModel"],
            "block_size": 8,
            "layer_types": ("sliding_attention",) * 5,
            "is_causal": False,
            "dflash_config": {
                "target_layer_ids": (5, 19, 33, 47, 61),
                "conv_kernel_size": 2,
                "conv_group_size": 16,
                "selector_rank": 256,
                "selector_top_k": 16,
            },
        },
    ),
    "qwen3-8b": Shape(
        "config.json of Qwen/Qwen3-8B; draft as z-lab/Qwen3-8B-DFlash-b16",
        {
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        },
        {
            "rope_theta": 1e6,
            "layer_types": ("full_attention",) * 5,
            "dflash_config": {"target_layer_ids": (2, 10, 18, 26, 34)},
        },
    ),
}


def config_of(shape: str, layers: int | None = None) -> dict[str, Any]:
    """The configuration of a preset; with `layers`, cut to so many."""
    config = SHAPES[shape].config
    return config if layers is None else {**config, "num_hidden_layers": layers}


def lazy_model(shape: str, layers: int | None = None) -> Module:
    """mlx-lm's model of a preset with random weights that are not evaluated yet."""
    config = config_of(shape, layers)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: Module = module.Model(module.ModelArgs.from_dict(config))
    return model


def make_model(shape: str, bits: int, dtype: mx.Dtype, layers: int | None = None) -> Module:
    """A random model, bits 16 for no quantisation; a weight at a time is in memory in fp32."""
    model = lazy_model(shape, layers)
    stays = getattr(model, "cast_predicate", lambda path: True)

    def cast(path: str, value: mx.array) -> mx.array:
        return value.astype(dtype) if stays(path) else value

    model.update(tree_map_with_path(cast, model.parameters()))
    if bits != 16:
        quantize(model, group_size=64, bits=bits)
    model.eval()
    for _, value in tree_flatten(model.parameters()):
        mx.eval(value)
    return model


def draft_config(shape: str, layers: int | None = None) -> DFlashConfig:
    """Of a draft for a preset: published taps, or five (or fewer) spread over the layers."""
    config, extra = config_of(shape, layers), SHAPES[shape].draft
    depth, types = config["num_hidden_layers"], extra.get("layer_types", SLIDING)
    spread = sorted({1 + round(i * (depth - 4) / 4) for i in range(5)} & set(range(depth)))
    nested = extra.get("dflash_config", {})
    taps = nested.get("target_layer_ids", spread) if layers is None else spread
    return DFlashConfig.from_dict(
        {
            **DRAFT,
            **extra,
            "hidden_size": config["hidden_size"],
            "intermediate_size": extra.get("intermediate_size", config.get("intermediate_size")),
            "vocab_size": config["vocab_size"],
            "num_hidden_layers": len(types),
            "layer_types": list(types),
            "num_target_layers": depth,
            "dflash_config": {
                **nested,
                "target_layer_ids": list(taps),
                "mask_token_id": config["vocab_size"] - 1,
            },
        }
    )


def make_drafter(shape: str, dtype: mx.Dtype, layers: int | None = None) -> DFlashDrafter:
    """A random draft for a random model of this preset."""
    config = draft_config(shape, layers)
    model = DFlashModel(config)
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return DFlashDrafter(config, model)
