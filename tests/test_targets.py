"""Targets against mlx-lm's own forward on tiny random models; taps; packed weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear

from dflash_native.cache import Cache
from dflash_native.targets import Target
from dflash_native.targets.layers import ExactLayers, StockLayers

VOCAB = 101
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
HYBRID = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.25,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}
CONFIGS = {
    "qwen3_5": {"model_type": "qwen3_5", **HYBRID, "tie_word_embeddings": True},
    "qwen3_5_wide_keys": {
        "model_type": "qwen3_5",
        **HYBRID,
        "full_attention_interval": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 1,
        "linear_conv_kernel_dim": 3,
        "attention_bias": True,
    },
    "qwen3_5_moe": {"model_type": "qwen3_5_moe", **HYBRID, **EXPERTS},
    "qwen3_next": {"model_type": "qwen3_next", **HYBRID, **EXPERTS, "mlp_only_layers": [1]},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama_sliding": {
        "model_type": "llama",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 7,
        "rope_scaling": {"rope_type": "llama3", "factor": 4.0},
    },
}
HYBRIDS = ["qwen3_5", "qwen3_5_wide_keys", "qwen3_5_moe", "qwen3_next"]

every_family = pytest.mark.parametrize("name", CONFIGS)


def make_model(name: str, seed: int = 0, **changes: object) -> nn.Module:
    """A random model in which no parameter is left at its neutral value."""
    config = {**COMMON, **CONFIGS[name], **changes}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))

    def perturbed(path: str, value: mx.array) -> mx.array:
        if path.endswith("A_log"):
            return mx.random.uniform(-4, 0, value.shape)
        return value + 0.3 * mx.random.normal(value.shape) if value.ndim == 1 else value

    model.update(tree_map_with_path(perturbed, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def random_tokens(batch_size: int, count: int, seed: int = 1) -> mx.array:
    return mx.array(np.random.default_rng(seed).integers(0, VOCAB, (batch_size, count)))


def error(found: mx.array, expected: mx.array) -> float:
    """Largest difference, relative to the largest value."""
    assert found.shape == expected.shape
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    return (mx.abs(found - expected).max() / mx.abs(expected).max()).item()


def run(target: Target, tokens: mx.array, cache: Cache, commit: bool = True) -> mx.array:
    hidden, _ = target.forward(tokens, cache, commit=commit)
    return target.logits(hidden)


EXACT = {"exact": True, "prefill": "exact"}
STOCK = {"exact": False}
either_way = pytest.mark.parametrize("how", [EXACT, STOCK], ids=["exact", "stock"])


def both(
    model: nn.Module, tokens: mx.array, chunks: list[int], how: dict[str, object] = EXACT
) -> list[tuple[mx.array, mx.array]]:
    """Our logits and mlx-lm's for the same chunks over their own caches."""
    target, theirs = Target(model, **how), make_prompt_cache(model)
    ours = target.make_cache(tokens.shape[0])
    pairs, at = [], 0
    for count in chunks:
        chunk = tokens[:, at : at + count]
        pairs.append((run(target, chunk, ours), model(chunk, cache=theirs)))
        at += count
        mx.eval(pairs[-1], ours.arrays())
    assert ours.lengths == [at] * tokens.shape[0]
    return pairs


CHUNKS = [9, 5, 1, 1, 1, 6, 1]


@every_family
@either_way
@pytest.mark.parametrize("batch_size", [1, 3])
def test_prefill_and_steps_equal_mlx_lm(name: str, how: dict, batch_size: int) -> None:
    pairs = both(make_model(name), random_tokens(batch_size, sum(CHUNKS)), CHUNKS, how)
    for ours, theirs in pairs:
        assert error(ours, theirs) < 1e-5
    # Control: steps that belong to different tokens are told apart.
    assert error(pairs[2][0], pairs[3][1]) > 1e-2


@every_family
@either_way
def test_bf16_is_as_near_to_fp32_as_mlx_lm(name: str, how: dict) -> None:
    exact, rounded, half = (make_model(name) for _ in range(3))

    def cast(path: str, value: mx.array) -> mx.array:
        return value if path.endswith("A_log") else value.astype(mx.bfloat16)

    half.update(tree_map_with_path(cast, exact.parameters()))
    for model in (half, rounded):  # MLX's CPU runs dense experts in fp32 alone
        nn.quantize(model, 32, 4, class_predicate=lambda _, m: isinstance(m, SwitchLinear))

    def widen(value: mx.array) -> mx.array:
        return value.astype(mx.float32) if value.dtype == mx.bfloat16 else value

    rounded.update(tree_map(widen, half.parameters()))
    assert Target(half).dtype == mx.bfloat16
    tokens = random_tokens(2, sum(CHUNKS))
    truth = mx.concatenate([theirs for _, theirs in both(rounded, tokens, CHUNKS)], axis=1)
    pairs = both(half, tokens, CHUNKS, how)
    ours, theirs = (mx.concatenate(side, axis=1) for side in zip(*pairs, strict=True))
    assert ours.dtype == theirs.dtype == mx.bfloat16
    away = (mx.square(x - truth).mean(axis=-1) for x in (ours, theirs))
    # The median position: rounding sends a few positions to other experts.
    ours_away, theirs_away = (mx.sqrt(mx.median(each)).item() for each in away)
    assert ours_away < 1.25 * theirs_away
    # Control: the measure sees rounding.
    assert theirs_away > 1e-4 * mx.abs(truth).max().item()


@every_family
@either_way
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised(name: str, how: dict, bits: int) -> None:
    model = make_model(name)
    nn.quantize(model, group_size=32, bits=bits)
    pairs = both(model, random_tokens(2, sum(CHUNKS)), CHUNKS, how)
    for ours, theirs in pairs:
        assert error(ours, theirs) < 1e-5
    # Control: the weights were quantised.
    plain = both(make_model(name), random_tokens(2, sum(CHUNKS)), CHUNKS)
    assert error(pairs[0][0], plain[0][0]) > 1e-3


def residual_after(model: nn.Module, tokens: mx.array, layer: int) -> mx.array:
    """The residual stream after decoder layer `layer`, by a stack cut there."""
    stack = getattr(model, "language_model", model).model
    hidden = stack.embed_tokens(tokens)
    for module in stack.layers[: layer + 1]:
        mask = create_attention_mask(hidden)
        if getattr(module, "use_sliding", False):
            mask = create_attention_mask(hidden, window_size=stack.sliding_window)
        hidden = module(hidden, None if getattr(module, "is_linear", False) else mask)
    return hidden


@every_family
def test_taps_are_the_outputs_of_their_layers(name: str) -> None:
    model = make_model(name)
    target = Target(model)
    tokens = random_tokens(2, 11)
    order = (2, 0, 3)
    cache = target.make_cache(2)
    _, first = target.forward(tokens[:, :7], cache, commit=True, tap_layers=order)
    hidden, second = target.forward(tokens[:, 7:], cache, commit=False, tap_layers=order)
    assert first.shape == (2, 7, 3 * target.hidden_size)
    taps = mx.split(mx.concatenate([first, second], axis=1), 3, axis=-1)
    for tap, layer in zip(taps, order, strict=True):
        assert error(tap, residual_after(model, tokens, layer)) < 1e-5
        for other in {0, 1, 2, 3} - {layer}:
            assert error(tap, residual_after(model, tokens, other)) > 1e-2
    normed = getattr(model, "language_model", model).model.norm(taps[2][:, 7:])
    assert error(hidden, normed) < 1e-6
    assert target.forward(tokens[:, :1], target.make_cache(2), commit=True)[1] is None


def snapshot(model: nn.Module) -> dict[str, object]:
    """Every module with its class and attributes, every class's namespace, every parameter."""
    modules = dict(model.named_modules())
    classes = {cls for module in modules.values() for cls in type(module).__mro__}
    return {
        "modules": {path: (id(module), type(module)) for path, module in modules.items()},
        "attributes": {
            path: {key: id(value) for key, value in vars(module).items()}
            for path, module in modules.items()
        },
        "keys": {path: list(module) for path, module in modules.items()},
        "classes": {cls: {key: id(value) for key, value in vars(cls).items()} for cls in classes},
        "parameters": {
            path: (id(value), value.dtype, np.array(value.astype(mx.float32)).tobytes())
            for path, value in tree_flatten(model.parameters())
        },
    }


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array) -> mx.array:
        return self.inner(x)


@every_family
@either_way
def test_the_model_is_left_as_it_was_also_by_a_failure(
    name: str, how: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(name)
    before = snapshot(model)
    target = Target(model, **how)
    cache = target.make_cache(2)
    tokens = random_tokens(2, 16)
    run(target, tokens[:, :5], cache)
    run(target, tokens[:, 5:9], cache, commit=False)
    cache.commit([2, 2])
    cache.eval()
    ways = (StockLayers, ExactLayers)
    for commit in (True, False):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="on purpose"):
            for way in ways:
                patch.setattr(way, "mlp", failing_at(model.layers[2].mlp, way.mlp))
            target.forward(tokens[:, 9:12], cache, commit=commit)
        assert snapshot(model) == before
        assert cache.lengths == [7, 7] and cache.uncommitted is None
    # The cache still covers the committed prefix and nothing else.
    prefix = mx.concatenate([tokens[:, :7], tokens[:, 12:]], axis=1)
    found = run(target, tokens[:, 12:], cache)
    assert error(found, model(prefix)[:, 7:]) < 1e-5
    assert snapshot(model) == before
    # Control: the snapshot sees a wrapped layer, a new parameter value and a patched class.
    layer = model.layers[2]
    inner, layer.mlp = layer.mlp, Wrapper(layer.mlp)
    assert snapshot(model) != before
    layer.mlp = inner
    norm = model.layers[0].input_layernorm
    weight, norm.weight = norm.weight, norm.weight + 0
    assert snapshot(model)["parameters"] != before["parameters"]
    norm.weight = weight
    with monkeypatch.context() as patch:
        patch.setattr(type(inner), "__call__", Wrapper.__call__)
        assert snapshot(model)["classes"] != before["classes"]
    assert snapshot(model) == before


def failing_at(broken: nn.Module, mlp: Callable) -> Callable:
    def run_or_fail(self: object, layer: nn.Module, x: mx.array) -> mx.array:
        if layer is broken:
            raise RuntimeError("broken on purpose")
        return mlp(self, layer, x)

    return run_or_fail


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="GPUs use the weights as they are")
@pytest.mark.parametrize("bits", [None, 8, 4])
@every_family
def test_weights_are_packed_once_and_take_no_more_than_the_model(name: str, bits: int) -> None:
    model = make_model(name, vocab_size=128)  # a multiple of 16, and so are the other sizes
    if bits is not None:
        nn.quantize(model, 32, bits)
    target = Target(model)
    assert target.packed_nbytes == 0
    for _ in range(2):
        run(target, random_tokens(1, 4), target.make_cache())
    weights = sum(value.nbytes for _, value in tree_flatten(model.parameters()))
    first = target.packed_nbytes
    assert 0.5 * weights < first <= 1.02 * weights
    run(target, random_tokens(2, 9), target.make_cache(2), commit=False)
    assert target.packed_nbytes == first
    stock = Target(model, exact=False)
    run(stock, random_tokens(1, 4), stock.make_cache())
    assert stock.packed_nbytes == 0


def test_a_layer_that_was_given_another_weight_is_packed_anew() -> None:
    model = make_model("llama")
    target, tokens = Target(model), random_tokens(1, 5)
    before = run(target, tokens, target.make_cache())
    projection = model.layers[1].self_attn.k_proj
    for part in ("weight", "bias"):
        projection[part] = projection[part] + 0.5
        after = run(target, tokens, target.make_cache())
        assert error(after, model(tokens)) < 1e-5
        assert error(after, before) > 1e-3
        before = after


def test_what_a_target_says_of_its_model() -> None:
    target = Target(make_model("qwen3_5"))
    assert target.model_type == "qwen3_5"
    assert (target.hidden_size, target.vocab_size, target.num_layers) == (64, VOCAB, 4)
    assert target.dtype == mx.float32
    assert (target.exact, target.prefill) == (True, "fast")
    tokens = random_tokens(2, 3)
    assert target.embed(tokens).shape == (2, 3, 64)
    assert target.logits(target.embed(tokens)).shape == (2, 3, VOCAB)
    with pytest.raises(ValueError, match="expected at least one row but got 0"):
        target.make_cache(0)
