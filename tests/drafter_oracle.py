"""Tiny random draft checkpoints, and the forward pass in plain words: no cache, no ops.

`oracle_hidden` runs all context at once with every mask, rotation and convolution written out, so
that it shares nothing with the package but the formulas.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import mlx.core as mx
from mlx_lm.models import qwen3

from dflash_native.drafters import DFlashConfig, DFlashDrafter, DFlashModel, tensor_shapes
from dflash_native.targets import Target

HIDDEN, VOCAB, BLOCK, WINDOW, LAYERS = 32, 97, 6, 9, 3
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
FULL, SLIDING = "full_attention", "sliding_attention"
DFLASH2 = {
    "architectures": ["DFlash2DraftModel"],
    "conv_kernel_size": 3,
    "conv_group_size": 8,
    "selector_rank": 8,
    "selector_top_k": 5,
}
MIXED = {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": WINDOW}
TAPS = (2, 0, 3)
SLIDES = {"layer_types": [SLIDING] * LAYERS, "sliding_window": WINDOW}
VARIANTS = {
    "full": {},
    "older layout": {"older": True},
    "causal": {"is_causal": True},
    "mixed": MIXED,
    "mixed bidirectional": {**MIXED, "is_causal": False},
    "yarn": {"rope_scaling": {"type": "yarn", **YARN}},
    "yarn in rope_parameters": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN},
        **SLIDES,
    },
    "scales": {
        "input_embedding_scale": 0.5,
        "output_multiplier": 2.0,
        "final_logit_softcapping": 1.5,
    },
    "dflash2": {**DFLASH2, **SLIDES, "is_causal": False},
    "dflash2 mixed": {
        **DFLASH2,
        **MIXED,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 2.0,
    },
}
NESTED = {
    "block_size", "final_logit_softcapping", "target_layer_ids", "mask_token_id",
    "input_embedding_scale", "output_multiplier", *DFLASH2,
} - {"architectures"}  # fmt: skip


def raw_config(older: bool = False, **over) -> dict:
    flat = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 40,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "num_target_layers": 4,
        "rope_theta": 1e4,
        "block_size": BLOCK,
        "target_layer_ids": [2, 0, 3],
        "mask_token_id": VOCAB - 1,
        **over,
    }
    nested = NESTED - ({"block_size", "final_logit_softcapping"} if older else set())
    flat = {k: v for k, v in flat.items() if v is not None}
    top = {k: v for k, v in flat.items() if k not in nested}
    return {**top, "dflash_config": {k: v for k, v in flat.items() if k in nested}}


def random_weights(config: DFlashConfig, seed: int = 0) -> dict[str, mx.array]:
    keys = mx.random.split(mx.random.key(seed), 200)
    weights = {}
    for key, (name, shape) in zip(keys, tensor_shapes(config).items(), strict=False):
        scale, shift = 1.5 * shape[-1] ** -0.5, 0.0
        if len(shape) == 1:
            # Sharp attention: the rows of a block, mask tokens all, then differ by their position.
            scale, shift = 0.2, 2.5 if "q_norm" in name or "k_norm" in name else 1.0
        elif "_conv" in name:
            scale, shift = scale / 2, 0.5 * ("base_kernel" in name)
        weights[name] = mx.random.normal(shape, key=key) * scale + shift
    return weights


def save(folder: Path, raw: dict, weights: dict[str, mx.array] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if weights is None:
        weights = random_weights(DFlashConfig.from_dict(raw))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def tokens(count: int, seed: int = 0) -> mx.array:
    return mx.random.randint(0, VOCAB - 1, (1, count), key=mx.random.key(seed))


def drafter_of(raw: dict, weights: dict[str, mx.array] | None = None) -> DFlashDrafter:
    config = DFlashConfig.from_dict(raw)
    model = DFlashModel(config)
    model.load_weights(list((weights or random_weights(config)).items()))
    return DFlashDrafter(config, model)


@cache
def tiny_target() -> Target:
    """A real mlx-lm qwen3 model of four layers."""
    mx.random.seed(3)
    args = {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
    }
    return Target(qwen3.Model(qwen3.ModelArgs.from_dict(args)))


def taps_of(target, ids, layers=TAPS):
    return target.forward(ids, target.make_cache(), commit=True, tap_layers=layers)[1]


def begin(raw, target, weights=None):
    return drafter_of(raw, weights).begin(target)


def block_of(session, anchor, start):
    """Normed hidden rows 1 … B-1."""
    return session.model.norm(session.hidden(anchor, start)[:, 1:])


def one_block(raw, target, weights=None, prompt=20):
    """The first block after a prompt that is longer than the window."""
    session = begin(raw, target, weights)
    session.extend(taps_of(target, tokens(prompt)), 0)
    return block_of(session, tokens(1, 9), prompt)


def gap(a, b):
    return mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item()


def oracle_frequencies(raw: dict) -> tuple[mx.array, float]:
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    base, dim = raw.get("rope_theta") or scaling["rope_theta"], raw["head_dim"]
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    if "factor" not in scaling:
        return mx.array(plain), 1.0

    def dimension(turns: float) -> float:
        original = scaling["original_max_position_embeddings"]
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(scaling["beta_fast"])), 0)
    high = min(math.ceil(dimension(scaling["beta_slow"])), dim - 1)
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(dim // 2)]
    mixed = [f / scaling["factor"] * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]
    return mx.array(mixed), 0.1 * math.log(scaling["factor"]) + 1


def oracle_hidden(raw, w, target, taps, anchor) -> mx.array:
    """Normed hidden rows 1 … B-1 `[1, B-1, H]` for the block after `taps [1, n, 3 H]`."""
    cfg = {**raw, **raw["dflash_config"]}
    heads, kv, dim, start = 4, 2, cfg["head_dim"], taps.shape[1]
    frequencies, temperature = oracle_frequencies(raw)

    def norm(x, name):
        return x * mx.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w[name + ".weight"]

    def rope(x, positions):
        angle = positions[:, None, None] * frequencies
        sin, cos = mx.sin(angle) * temperature, mx.cos(angle) * temperature
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return mx.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def conv(x, name, side, source):
        taps_, group = cfg["conv_kernel_size"], cfg["conv_group_size"]
        delta = source @ w[name + ".kernel_projection.weight"].T
        delta = delta.reshape(BLOCK, 2, taps_, HIDDEN // group)
        rows = []
        for i in range(BLOCK):
            row = mx.zeros(HIDDEN)
            for t in range(min(taps_, i + 1)):
                kernel = w[name + ".base_kernel"][side, t] + mx.repeat(delta[i, side, t], group)
                row = row + kernel * x[i - t]
            rows.append(row)
        return mx.stack(rows)

    ctx = norm(taps[0] @ w["fc.weight"].T, "hidden_norm")
    block = mx.concatenate([anchor, mx.full((1, BLOCK - 1), cfg["mask_token_id"])], 1)
    x = target.embed(block)[0] * cfg.get("input_embedding_scale", 1.0)
    positions = mx.arange(start + BLOCK)
    for i in range(LAYERS):
        p, a = f"layers.{i}.", f"layers.{i}.self_attn."
        slides = cfg.get("layer_types", [FULL] * LAYERS)[i] == SLIDING
        causal = slides if cfg.get("is_causal") is None else cfg["is_causal"]
        inner = source = norm(x, p + "input_layernorm")
        if "conv_kernel_size" in cfg:
            inner = conv(source, p + "attention_conv", 0, source)
        rows = mx.concatenate([ctx, inner])
        q = norm((inner @ w[a + "q_proj.weight"].T).reshape(BLOCK, heads, dim), a + "q_norm")
        k = norm((rows @ w[a + "k_proj.weight"].T).reshape(-1, kv, dim), a + "k_norm")
        v = mx.repeat((rows @ w[a + "v_proj.weight"].T).reshape(-1, kv, dim), heads // kv, 1)
        q, k = rope(q, positions[start:]), mx.repeat(rope(k, positions), heads // kv, 1)
        scores = mx.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        query, key = positions[start:, None], positions[None]
        seen = (key >= start) | (not slides) | (query - key < cfg.get("sliding_window", 0))
        if causal:
            seen = seen & (key <= query)
        y = mx.einsum("hqk,khd->qhd", mx.softmax(mx.where(seen, scores, -mx.inf), -1), v)
        y = y.reshape(BLOCK, -1) @ w[a + "o_proj.weight"].T
        x = x + (conv(y, p + "attention_conv", 1, source) if "conv_kernel_size" in cfg else y)
        inner = source = norm(x, p + "post_attention_layernorm")
        if "conv_kernel_size" in cfg:
            inner = conv(source, p + "mlp_conv", 0, source)
        gate = inner @ w[p + "mlp.gate_proj.weight"].T
        y = gate * mx.sigmoid(gate) * (inner @ w[p + "mlp.up_proj.weight"].T)
        y = y @ w[p + "mlp.down_proj.weight"].T
        x = x + (conv(y, p + "mlp_conv", 1, source) if "conv_kernel_size" in cfg else y)
    return norm(x, "norm")[None, 1:]
