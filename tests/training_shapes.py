"""Sizes for tests of the training code: small, with every kind of layer and odd head counts."""

from __future__ import annotations

from dataclasses import replace

from dflash_native.training.shapes import DraftShape, TargetShape

VOCAB = 300
"""Without the 16 special tokens."""

TARGET = TargetShape(
    vocab_size=VOCAB + 16,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)
DRAFT = DraftShape(
    vocab_size=TARGET.vocab_size,
    hidden_size=TARGET.hidden_size,
    intermediate_size=96,
    layer_types=("sliding_attention", "full_attention"),
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    sliding_window=12,
    block_size=8,
    target_layer_ids=(0, 2, 3),
    num_target_layers=4,
    mask_token_id=VOCAB + 3,
    conv_group_size=16,
    selector_rank=8,
    selector_top_k=6,
)
DRAFT2 = replace(DRAFT, is_dflash2=True)


def sharpen(model):
    """Larger weights, so that an untrained model's outputs differ clearly from place to place."""
    for name, parameter in model.named_parameters():
        if name.endswith(("base_kernel", "codebook")):
            parameter.data += 0.3 * parameter.data.new_empty(parameter.shape).normal_()
        elif parameter.dim() == 2:
            parameter.data.normal_(0.0, parameter.shape[1] ** -0.5)
        elif parameter.dim() == 1 and "norm" in name:
            parameter.data += 0.2 * parameter.data.new_empty(parameter.shape).normal_()
    return model
