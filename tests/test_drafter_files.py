"""Draft checkpoints on disk: published cards, shards, broken folders, configurations."""

from __future__ import annotations

import json
import re

import mlx.core as mx
import pytest

from dflash_native.drafters import (
    DFlashConfig,
    DFlashDrafter,
    is_draft,
    parameter_count,
    tensor_shapes,
)
from drafter_oracle import DFLASH2, FULL, SLIDING, VOCAB, YARN, random_weights, raw_config, save


def card(layers, hidden, heads, inner, vocab, taps, **over):
    raw = {**raw_config(**over), "hidden_size": hidden, "num_hidden_layers": layers}
    raw |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 128}
    raw |= {"intermediate_size": inner, "vocab_size": vocab, "num_target_layers": 64}
    raw["dflash_config"]["target_layer_ids"] = taps
    return raw


CARDS = {
    "Qwen3-8B-DFlash-b16": (
        card(5, 4096, (32, 8), 12288, 151936, [2, 10, 18, 26, 34], block_size=16, older=True,
             mask_token_id=151669),
        (58, None, 16, None),
    ),
    "Qwen3.6-27B-DFlash": (
        card(5, 5120, (32, 8), 17408, 248320, [1, 16, 31, 46, 61], block_size=16, older=True,
             mask_token_id=248070, layer_types=[SLIDING] * 4 + [FULL], sliding_window=2048),
        (58, None, 16, None),
    ),
    "Qwen3.6-35B-A3B-DFlash": (
        card(6, 2048, (32, 8), 6144, 248320, [1, 6, 11, 16, 22, 27, 32, 37], block_size=16,
             mask_token_id=248077, layer_types=[SLIDING] * 5 + [FULL], sliding_window=4096),
        (69, None, 16, None),
    ),
    "Qwen3.8-27B-DFlash2": (
        card(5, 5120, (32, 8), 17408, 248320, [5, 19, 33, 47, 61], **{
            **DFLASH2, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256,
            "selector_top_k": 16}, block_size=8, mask_token_id=248070, is_causal=False,
            layer_types=[SLIDING] * 5, sliding_window=2048, rope_theta=1e7),
        (81, 1_924_404_480, 8, 2047),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CARDS)
def test_published_cards_have_their_published_sizes(name):
    raw, (tensors, parameters, block, reach) = CARDS[name]
    before = mx.get_active_memory()
    config = DFlashConfig.from_dict(raw)
    assert len(tensor_shapes(config)) == tensors
    assert (config.block_size, config.context_rows) == (block, reach)
    assert is_draft(raw) and not is_draft({"architectures": ["Qwen3ForCausalLM"]})
    if parameters is not None:
        assert parameter_count(config) == parameters
        assert 2 * parameter_count(config) == 3_848_808_960
    assert mx.get_active_memory() == before


def test_shards_load_like_one_file(tmp_path):
    raw = raw_config()
    weights = random_weights(DFlashConfig.from_dict(raw))
    one, two = save(tmp_path / "one", raw, weights), save(tmp_path / "two", raw, weights)
    (two / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in shards.items():
        mx.save_safetensors(str(two / file), {n: weights[n] for n in part})
    loaded = [DFlashDrafter.load(f).model.parameters() for f in (one, two)]
    assert str(loaded[0]) == str(loaded[1])
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (two / "model.safetensors.index.json").write_text(json.dumps(index))
    DFlashDrafter.load(two)
    (two / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors"):
        DFlashDrafter.load(two)


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def pointer(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def rename(folder):
    weights = mx.load(str(folder / "model.safetensors"))
    weights["surplus.weight"] = weights.pop("norm.weight")
    weights["fc.weight"] = weights["fc.weight"][:, :-1]
    save(folder, raw_config(), weights)


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        (truncate, ValueError, r"model\.safetensors is truncated: expected \d+ bytes but got \d+"),
        (pointer, ValueError, r"model\.safetensors \(43 bytes\) is truncated or no safetensors"),
        (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, r"/model\.safetensors"),
        (lambda f: (f / "config.json").unlink(), FileNotFoundError, r"/config\.json"),
        (lambda f: (f / "config.json").write_text("{"), ValueError, r"config\.json is not valid"),
        (
            rename,
            ValueError,
            r"expected the 36 tensors .* got 36: fc.weight has shape \(32, 95\) and not "
            r"\(32, 96\); norm.weight is missing; surplus.weight is unexpected$",
        ),
    ],
)
def test_a_broken_folder_is_named(harm, error, message, tmp_path):
    DFlashDrafter.load(save(tmp_path, raw_config()))
    harm(tmp_path)
    with pytest.raises(error, match=message):
        DFlashDrafter.load(tmp_path)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "DFlash2DraftModel but got ['Qwen3ForCausalLM']"),
        ({"rope_theta": None}, "rope_theta at the top or inside rope_parameters but got None"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "linear, llama3, yarn but got"),
        ({"rope_scaling": {"rope_type": "yarn"} | YARN | {"truncate": False}}, "truncate true"),
        ({"head_dim": 16}, "head_dim to be one of (32, 64, 96, 128, 256) but got 16"),
        ({"layer_types": [SLIDING] * 3, "sliding_window": 5}, "hold the block of 6 but got 5"),
        ({"layer_types": [SLIDING] * 3}, "sliding_window to be an integer of at least 2 but"),
        ({"layer_types": [FULL]}, "layer_types to have 3 entries but got 1"),
        ({"layer_types": [FULL, FULL, "linear_attention"]}, "but got 'linear_attention'"),
        ({"target_layer_ids": [1, 4]}, "target_layer_ids from 0 to 3 but got 4"),
        ({"mask_token_id": VOCAB}, f"row of the {VOCAB} embeddings but got {VOCAB}"),
        ({"hidden_size": None}, "hidden_size to be an integer of at least 1 but got None"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads but got '4 and 3'"),
        ({"attention_bias": True}, "attention_bias to be False but got True"),
        ({"is_causal": "no"}, "is_causal to be true, false or absent but got 'no'"),
        (DFLASH2 | {"conv_group_size": 5}, "conv_group_size to divide hidden_size 32 but got 5"),
        (DFLASH2 | {"selector_top_k": None}, "selector_top_k to be an integer"),
    ],
)
def test_a_configuration_that_cannot_run_is_refused(over, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DFlashConfig.from_dict(raw_config(**over))
