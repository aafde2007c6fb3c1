"""Sizes of the target and of its drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Attention = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True)
class TargetShape:
    """A Qwen3.5 text model. Names are those of its `config.json`.

    Head dims are those of the published line, so that the demo runs the kernels that real models
    use. In 8 bits its 13.4 million parameters leave room for both drafts below 30 MB.
    """

    vocab_size: int = 8192
    hidden_size: int = 320
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 3
    num_key_value_heads: int = 1
    head_dim: int = 128
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100_000.0
    partial_rotary_factor: float = 0.25
    max_position_embeddings: int = 4096

    def is_linear(self, layer: int) -> bool:
        """Whether a layer is GatedDeltaNet; every `full_attention_interval`th is attention."""
        return (layer + 1) % self.full_attention_interval != 0

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_dim(self) -> int:
        """Columns of all key heads of a GatedDeltaNet layer."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Columns of all value heads of a GatedDeltaNet layer."""
        return self.linear_num_value_heads * self.linear_value_head_dim


@dataclass(frozen=True)
class DraftShape:
    """A DFlash draft, or with `is_dflash2` a DFlash2 one. Hidden size and vocabulary: the target's.

    Both kinds of layer are there, so that both kinds of context cache run on trained weights.
    """

    is_dflash2: bool = False
    vocab_size: int = 8192
    hidden_size: int = 320
    intermediate_size: int = 640
    layer_types: tuple[Attention, ...] = (
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    )
    num_attention_heads: int = 3
    num_key_value_heads: int = 1
    head_dim: int = 128
    sliding_window: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100_000.0
    max_position_embeddings: int = 4096
    block_size: int = 16
    target_layer_ids: tuple[int, ...] = (1, 4, 6)
    num_target_layers: int = 8
    mask_token_id: int = 8179
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 32
    selector_top_k: int = 16
