"""The files that ship: the target in the Hugging Face layout, drafts in the DFlash layout."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .draft import Draft
from .shapes import DraftShape, TargetShape
from .target import Target
from .tokenizer import SPECIAL

_PREFIX = "model.language_model."
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def _is_shifted(name: str) -> bool:
    """Whether the layout stores a norm's difference from one; a GatedDeltaNet's own it does not."""
    return name == "norm.weight" or name.endswith(
        ("layernorm.weight", "q_norm.weight", "k_norm.weight")
    )


def target_tensors(target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
    """The target's tensors by their names in the file, `A_log` in fp32 and the rest in `dtype`.

    A norm's factor is rounded to `dtype` before one is subtracted, so that readers that add one in
    bf16 and readers that add it in fp32 find the same number.
    """
    tensors = {}
    for name, value in target.state_dict().items():
        value = value.detach().float().cpu()
        if _is_shifted(name):
            value = value.to(dtype).float() - 1.0
        kept = torch.float32 if name.endswith("A_log") else dtype
        tensors[_PREFIX + name] = value.to(kept).contiguous()
    return tensors


def target_config(shape: TargetShape, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` of a Qwen3.5 text model in its multimodal wrapping."""
    end = shape.vocab_size - len(SPECIAL)
    sections = _mrope_sections(shape.rotary_dim // 2)
    kind = str(dtype).removeprefix("torch.")
    text: dict[str, Any] = asdict(shape)
    theta = text.pop("rope_theta")
    text |= {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": kind,
        "eos_token_id": end,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": [
            "linear_attention" if shape.is_linear(i) else "full_attention"
            for i in range(shape.num_hidden_layers)
        ],
        "mamba_ssm_dtype": "float32",
        "pad_token_id": end,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": sections,
            "partial_rotary_factor": shape.partial_rotary_factor,
            "rope_theta": theta,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "use_cache": True,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": kind,
        "eos_token_id": end,
        "pad_token_id": end,
        "tie_word_embeddings": True,
        "text_config": text,
    }


def _mrope_sections(pairs: int) -> list[int]:
    third = pairs // 3
    return [pairs - 2 * third, third, third]


def write_target(
    target: Target, folder: Path, tokenizer: Path | None, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a folder that transformers and mlx-lm load; `tokenizer` holds the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    end = target.shape.vocab_size - len(SPECIAL)
    save_file(target_tensors(target, dtype), folder / "model.safetensors", {"format": "pt"})
    _write_json(folder / "config.json", target_config(target.shape, dtype))
    stops = [end, end + SPECIAL.index("<|im_end|>")]
    generation = {"do_sample": False, "eos_token_id": stops, "pad_token_id": end}
    _write_json(folder / "generation_config.json", generation)
    for name in _TOKENIZER_FILES if tokenizer is not None else ():
        assert tokenizer is not None
        shutil.copyfile(tokenizer / name, folder / name)


def read_target(folder: Path) -> Target:
    """The target of a folder that `write_target` wrote, with exactly the weights that ship."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    values = {name: config[name] for name in asdict(TargetShape()) if name in config}
    shape = TargetShape(**values, rope_theta=config["rope_parameters"]["rope_theta"])
    target = Target(shape)
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        name = name.removeprefix(_PREFIX)
        tensors[name] = value.float() + (1.0 if _is_shifted(name) else 0.0)
    target.load_state_dict(tensors)
    target.requires_grad_(False)
    return target


def draft_config(shape: DraftShape, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` of a DFlash or DFlash2 draft."""
    end = shape.vocab_size - len(SPECIAL)
    values = asdict(shape)
    nested = ["block_size", "mask_token_id", "target_layer_ids"]
    added = ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"]
    dflash = {name: values.pop(name) for name in (*nested, *added)}
    if not values.pop("is_dflash2"):
        dflash = {name: dflash[name] for name in nested}
    return {
        **values,
        "architectures": ["DFlash2DraftModel" if shape.is_dflash2 else "DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dflash_config": dflash,
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": end,
        "hidden_act": "silu",
        "is_causal": False,
        "num_hidden_layers": len(shape.layer_types),
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": True,
    }


def write_draft(draft: Draft, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a folder in the DFlash layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().float().cpu() for name, value in draft.state_dict().items()}
    tensors = {name: value.to(dtype).contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _write_json(folder / "config.json", draft_config(draft.shape, dtype))


def read_draft(folder: Path) -> Draft:
    """The draft of a folder that `write_draft` wrote, with exactly the weights that ship."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    flat = {**config, **config["dflash_config"]}
    values = {name: flat[name] for name in asdict(DraftShape()) if name in flat}
    for name in ("layer_types", "target_layer_ids"):
        values[name] = tuple(values[name])
    is_dflash2 = config["architectures"] == ["DFlash2DraftModel"]
    draft = Draft(DraftShape(**values, is_dflash2=is_dflash2))
    tensors = load_file(folder / "model.safetensors")
    draft.load_state_dict({name: value.float() for name, value in tensors.items()})
    draft.requires_grad_(False)
    return draft


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
