"""Make the shipped demo pair from a trained one: target in 8 bits, draft as it is.

    python tools/make_demo_pair.py PAIR [--out FOLDER]

PAIR holds `target/` (Hugging Face layout, bf16, with its tokenizer) and `draft/` (DFlash layout,
bf16). The target is written to FOLDER, the package's own `demo` when left out, in mlx-lm's
quantised layout: affine, 8 bits, groups of 64, so that `mlx_lm.load` reads it too. The files depend
on PAIR alone: a second run writes the same bytes.

Each group's bias and scale are rounded to bf16 *before* its weights are rounded to the grid that
they span. Rounding them afterwards, as `mx.quantize` does, makes the logits' largest error 1.7
times as large.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from dflash_native import demo, hub

GROUP_SIZE = 64
BITS = 8
LIMIT_BYTES = 30_000_000
TARGET_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


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
    weights = {}
    for name, value in tree_flatten(model.parameters()):
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
    weights = mx.load(str(source / "model.safetensors"))
    foreign = {str(v.dtype) for v in weights.values() if v.dtype != mx.bfloat16}
    if foreign:
        raise ValueError(f"[make_demo_pair] expected a bf16 draft but got {sorted(foreign)}")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(source / name, folder / name)


def logit_error(original: Path, shipped: Path) -> tuple[float, float, float]:
    """Both targets in fp32 on the shipped prompts.

    Returns the largest error of a logit, the largest logit, and the share of equal argmaxes.
    """
    exact, tokenizer = hub.load(original, mx.float32)
    quantised, _ = hub.load(shipped, mx.float32)
    error = largest = 0.0
    equal = count = 0
    for prompt in demo.prompts():
        tokens = mx.array([tokenizer.encode(prompt.text)])
        a, b = exact(tokens), quantised(tokens)
        error = max(error, mx.abs(a - b).max().item())
        largest = max(largest, mx.abs(a).max().item())
        equal += (a.argmax(-1) == b.argmax(-1)).sum().item()
        count += tokens.size
    return error, largest, equal / count


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the shipped demo pair from a trained one.")
    parser.add_argument("pair", type=Path, help="a folder that holds target/ and draft/")
    parser.add_argument("--out", type=Path, default=demo.TARGET.parent)
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)

    write_target(arguments.pair / "target", arguments.out / "target")
    write_draft(arguments.pair / "draft", arguments.out / "draft")
    total = 0
    for path in sorted([*arguments.out.glob("target/*"), *arguments.out.glob("draft/*")]):
        print(f"{path.stat().st_size:>12,}  {path.relative_to(arguments.out)}")
        total += path.stat().st_size
    print(f"{total:>12,}  in all")
    if total >= LIMIT_BYTES:
        raise SystemExit(f"[make_demo_pair] expected less than {LIMIT_BYTES} bytes but got {total}")
    error, largest, equal = logit_error(arguments.pair / "target", arguments.out / "target")
    print(f"fp32 logits against the original's: largest error {error:.3f} (largest logit")
    print(f"{largest:.1f}), same argmax at {equal:.2%} of the prompts' positions")


if __name__ == "__main__":
    main()
