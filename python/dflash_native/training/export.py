"""From a finished run to the files that ship: target in 8 bits, drafts in bf16, a model card.

Runs on MLX and needs no PyTorch. The target is written in mlx-lm's quantised layout: affine, 8
bits, groups of 64, so that `mlx_lm.load` reads it too. The files depend on the run alone: a second
export writes the same bytes.

Each group's bias and scale are rounded to bf16 *before* its weights are rounded to the grid that
they span. Rounding them afterwards, as `mx.quantize` does, makes the logits' largest error 1.7
times as large.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from .. import demo, hub
from .card import model_card

GROUP_SIZE = 64
BITS = 8
LIMIT_BYTES = 30_000_000
TARGET_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
DRAFTS = {"dflash": "draft", "dflash2": "draft2"}
"""A run's folder and the shipped one."""


def export(run: Path, out: Path) -> list[tuple[Path, int]]:
    """Write `out/target`, the drafts and `out/MODEL_CARD.md`; returns the files and their bytes.

    Raises ValueError for a draft that is not bf16, and where all together reach 30 MB.
    """
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        write_target(run / "target", out / "target")
        for kind, name in DRAFTS.items():
            if (run / kind).is_dir():
                write_draft(run / kind, out / name)
        files = sorted(
            path for name in ("target", *DRAFTS.values()) for path in out.glob(f"{name}/*")
        )
        sizes = [(path, path.stat().st_size) for path in files]
        total = sum(size for _, size in sizes)
        if total >= LIMIT_BYTES:
            raise ValueError(f"[export] expected less than {LIMIT_BYTES} bytes but got {total}")
        error = logit_error(run / "target", out / "target")
    finally:
        mx.set_default_device(before)
    shipped = {str(path.relative_to(out)): size for path, size in sizes}
    (out / "MODEL_CARD.md").write_text(model_card(run, shipped, error), encoding="utf-8")
    return sizes


def quantise(weight: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """`weight [rows, columns]` as `(packed uint32 [rows, columns / 4], scales, biases)`.

    Scales and biases are bf16 `[rows, columns / GROUP_SIZE]`. Dequantised: `scale * q + bias`.
    """
    rows, columns = weight.shape
    groups = weight.astype(mx.float32).reshape(rows, -1, GROUP_SIZE)
    bias = groups.min(-1).astype(mx.bfloat16)
    origin = bias.astype(mx.float32)
    levels = 2**BITS - 1
    scale = mx.maximum((groups.max(-1) - origin) / levels, 1e-12).astype(mx.bfloat16)
    q = (groups - origin[..., None]) / scale.astype(mx.float32)[..., None]
    q = mx.clip(mx.round(q), 0, levels).astype(mx.uint8)
    return q.reshape(rows, columns).view(mx.uint32), scale, bias


def write_target(source: Path, folder: Path) -> None:
    """Quantise what mlx-lm makes of `source`: norms already shifted, convolutions transposed."""
    model, _ = load_model(source)
    modules = dict(model.named_modules())
    weights: dict[str, mx.array] = {}
    parameters: Any = tree_flatten(model.parameters())
    for name, value in parameters:
        module = modules[name.rpartition(".")[0]]
        if isinstance(module, nn.Linear | nn.Embedding) and value.shape[-1] % GROUP_SIZE == 0:
            stem = name.removesuffix("weight")
            packed = quantise(value)
            for suffix, part in zip(("weight", "scales", "biases"), packed, strict=True):
                weights[stem + suffix] = part
        else:
            weights[name] = value
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(sorted(weights.items())), {"format": "mlx"}
    )
    config = json.loads((source / "config.json").read_text())
    config["quantization"] = {"group_size": GROUP_SIZE, "bits": BITS, "mode": "affine"}
    config["quantization_config"] = config["quantization"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in TARGET_FILES:
        shutil.copyfile(source / name, folder / name)


def write_draft(source: Path, folder: Path) -> None:
    """Copy a draft's two files. Raises ValueError where a tensor is not bf16."""
    weights = mx.load(str(source / "model.safetensors"))
    assert isinstance(weights, dict)
    foreign = {str(v.dtype) for v in weights.values() if v.dtype != mx.bfloat16}
    if foreign:
        raise ValueError(f"[export] expected a bf16 draft but got {sorted(foreign)}")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(source / name, folder / name)


def logit_error(original: Path, shipped: Path) -> tuple[float, float, float]:
    """Both targets in fp32 on the demo's prompts.

    Returns the largest error of a logit, the largest logit, and the share of equal argmaxes.
    """
    exact, tokenizer = hub.load(original, mx.float32)
    quantised, _ = hub.load(shipped, mx.float32)
    error: Any = 0.0
    largest: Any = 0.0
    equal = count = 0
    for prompt in demo.prompts():
        tokens = mx.array([tokenizer.encode(prompt.text)])
        a, b = exact(tokens), quantised(tokens)
        error = max(error, mx.abs(a - b).max().item())
        largest = max(largest, mx.abs(a).max().item())
        equal += (a.argmax(-1) == b.argmax(-1)).sum().item()
        count += tokens.size
    return error, largest, equal / count
