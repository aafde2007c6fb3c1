"""What a target refuses, by name: models, layers, settings and inputs."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.nn.layers.distributed import AllToShardedLinear
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.tuner.lora import LoRALinear

from dflash_native.targets import FAMILIES, Target
from test_targets import Wrapper, make_model, random_tokens, run


@pytest.mark.parametrize(
    ("name", "path", "change", "message"),
    [
        (
            "llama",
            "model.layers.1.self_attn.v_proj",
            lambda layer: LoRALinear.from_base(layer, r=2),
            r"model\.layers\.1\.self_attn\.v_proj \(LoRALinear\) is none of the classes",
        ),
        (
            "llama",
            "lm_head",
            lambda layer: layer.to_quantized(64, 6),
            r"lm_head \(QuantizedLinear\) is quantised as affine, 6 bits in groups of 64",
        ),
        (
            "qwen3",
            "model.embed_tokens",
            lambda layer: layer.to_quantized(32, 4, mode="mxfp4"),
            r"model\.embed_tokens \(QuantizedEmbedding\) is quantised as mxfp4, 4 bits",
        ),
        (
            "qwen3_next",
            "model.layers.0.mlp.switch_mlp.up_proj",
            lambda layer: layer.to_quantized(32, 3),
            r"mlp\.switch_mlp\.up_proj \(QuantizedSwitchLinear\) is quantised as affine, 3 bits",
        ),
        (
            "qwen3_5_moe",
            "model.layers.0.mlp.switch_mlp.activation",
            lambda layer: SwigluOAI(),
            r"mlp\.switch_mlp\.activation \(SwigluOAI\) is none of the classes",
        ),
        (
            "qwen3",
            "model.norm",
            lambda layer: Wrapper(layer),
            r"model\.norm \(Wrapper\) is none of the classes",
        ),
    ],
)
def test_what_cannot_run_exactly_is_refused_by_path_and_class(
    name: str, path: str, change: Callable, message: str
) -> None:
    model = make_model(name)
    Target(model)
    owner, _, last = path.rpartition(".")
    module = model
    for part in filter(None, owner.split(".")):
        module = module[int(part)] if part.isdigit() else getattr(module, part)
    setattr(module, last, change(getattr(module, last)))
    with pytest.raises(ValueError, match=f"{message}.*: exact=False runs it by MLX's own"):
        Target(model)
    run(Target(model, exact=False), random_tokens(1, 3), Target(model, exact=False).make_cache())


def test_heads_without_an_exact_attention_are_refused() -> None:
    model = make_model("llama", head_dim=40)
    with pytest.raises(ValueError, match=r"the heads of layer 0 have 40 dimensions and not 32, 64"):
        Target(model)
    Target(model, exact=False)


def test_settings_that_contradict_each_other_are_refused() -> None:
    model = make_model("qwen3")
    with pytest.raises(ValueError, match="expected exact=True with prefill='exact' but got"):
        Target(model, exact=False, prefill="exact")
    with pytest.raises(ValueError, match="expected prefill 'fast' or 'exact' but got 'slow'"):
        Target(model, prefill="slow")


def test_an_unknown_model_type_is_refused_with_the_known_ones() -> None:
    model = make_model("llama")
    model.model_type = "gpt2"
    with pytest.raises(ValueError, match="'gpt2'") as refusal:
        Target(model)
    for known in FAMILIES:
        assert known in str(refusal.value)


class Foreign(nn.Module):
    model_type = "qwen3"


class DFlashDraftModel(nn.Module):
    model_type = "qwen3"


class Draft(nn.Module):
    model_type = "qwen3"

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.hidden_norm = nn.Linear(8, 4, bias=False), nn.RMSNorm(4)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Foreign, "expected a qwen3 model that mlx-lm loaded"),
        (DFlashDraftModel, "the DFlash draft .*DFlashDraftModel"),
        (Draft, "the DFlash draft .*Draft"),
    ],
)
def test_other_modules_are_refused(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Target(model())


@pytest.mark.parametrize(
    ("path", "attribute", "value", "message"),
    [
        (
            "layers.0.linear_attn",
            "sharding_group",
            object(),
            r"layers\.0\.linear_attn .* is sharded",
        ),
        ("language_model", "sharding_group", object(), r"language_model \(TextModel\) is sharded"),
        (
            "layers.1.mlp",
            "up_proj",
            AllToShardedLinear(64, 96, bias=False),
            r"layers\.1\.mlp\.up_proj \(AllToShardedLinear\) is sharded",
        ),
        ("model", "pipeline_size", 2, "one stage of a pipeline of 2"),
    ],
)
def test_models_spread_over_processes_are_refused(
    path: str, attribute: str, value: object, message: str
) -> None:
    model = make_model("qwen3_5")
    Target(model)
    module = model
    for part in path.split("."):
        module = module[int(part)] if part.isdigit() else getattr(module, part)
    setattr(module, attribute, value)
    with pytest.raises(ValueError, match=message):
        Target(model)


def test_a_rope_that_depends_on_the_width_is_refused() -> None:
    model = make_model("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(ValueError, match=r"layers\.\d\.self_attn\.rope is DynamicNTKScalingRoPE"):
        Target(model)


def test_sliding_layers_without_a_window_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a sliding_window .* but got None"):
        Target(make_model("llama_sliding", sliding_window=None))


@pytest.mark.parametrize(
    ("tokens", "taps", "message"),
    [
        (mx.zeros((2, 0), mx.int32), (), r"tokens \[B, T\] with T >= 1 but got"),
        (mx.zeros((2,), mx.int32), (), r"but got mlx.core.int32 \(2,\)"),
        (mx.zeros((2, 3)), (), r"but got mlx.core.float32 \(2, 3\)"),
        (mx.zeros((3, 1), mx.int32), (), r"the cache's 2 rows but got shape \(3, 1\)"),
        (mx.zeros((2, 1), mx.int32), (1, 4), r"tap layers from 0 to 3 but got \[1, 4\]"),
        (mx.zeros((2, 1), mx.int32), (-1,), r"tap layers from 0 to 3 but got \[-1\]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    tokens: mx.array, taps: tuple[int, ...], message: str
) -> None:
    target = Target(make_model("qwen3"))
    cache = target.make_cache(2)
    with pytest.raises(ValueError, match=message):
        target.forward(tokens, cache, commit=True, tap_layers=taps)
    assert cache.lengths == [0, 0]
