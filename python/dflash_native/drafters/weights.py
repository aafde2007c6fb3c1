"""Tensor names, shapes and files of a draft checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx

from .config import DFlashConfig

_DTYPES = {"BF16": mx.bfloat16, "F32": mx.float32}
_NO_FP16 = "a draft's residuals reach 1e6 and overflow fp16, whose largest number is 65504"


def tensor_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint that `config` describes; allocates none.

    3 + 11 L tensors for DFlash, 3 + 15 L + 3 for DFlash2 (L layers).
    """
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.is_dflash2:
        taps = config.conv_kernel_size
        groups = hidden // config.conv_group_size
        for conv in ("attention_conv", "mlp_conv"):
            layer[f"{conv}.base_kernel"] = (2, taps, hidden)
            layer[f"{conv}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config.num_hidden_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    if config.is_dflash2:
        codebook = (config.vocab_size, config.selector_rank)
        shapes["candidate_selector.predecessor_codebook"] = codebook
        shapes["candidate_selector.successor_codebook"] = codebook
        shapes["candidate_selector.hidden_projection.weight"] = (config.selector_rank, hidden)
    return shapes


def parameter_count(config: DFlashConfig) -> int:
    """How many parameters the checkpoint holds (two bytes each in bf16)."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def check_dtype(dtype: mx.Dtype) -> None:
    """Raises ValueError unless `dtype` is bfloat16 or float32."""
    if dtype not in _DTYPES.values():
        reason = f" ({_NO_FP16})" if dtype == mx.float16 else ""
        raise ValueError(f"[DFlashDrafter] expected bfloat16 or float32 but got {dtype!r}{reason}")


def load_weights(
    folder: Path, config: DFlashConfig, dtype: mx.Dtype | None = None
) -> dict[str, mx.array]:
    """The checkpoint's tensors, all of one dtype: `dtype`, else the stored one (fp32 if mixed).

    Headers are checked before any weight is read. Raises FileNotFoundError for a missing file,
    ValueError for a truncated one, for tensors that are missing, unexpected or misshapen, and for
    any dtype but bf16 and fp32.
    """
    if dtype is not None:
        check_dtype(dtype)
    files = _files(folder)
    found = {name: entry for file in files for name, entry in _read_header(file).items()}
    _compare(folder, tensor_shapes(config), {n: tuple(e["shape"]) for n, e in found.items()})
    stored = {entry["dtype"] for entry in found.values()}
    for name, entry in found.items():
        if entry["dtype"] not in _DTYPES:
            reason = f" ({_NO_FP16})" if entry["dtype"] == "F16" else ""
            raise ValueError(
                f"[DFlashDrafter.load] expected BF16 or F32 tensors in {folder} but got "
                f"{entry['dtype']} for {name}{reason}"
            )
    dtype = dtype or (_DTYPES[stored.pop()] if len(stored) == 1 else mx.float32)
    weights: dict[str, mx.array] = {}
    for file in files:
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        weights |= {name: value.astype(dtype) for name, value in loaded.items()}
    mx.eval(weights)
    return weights


def _files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names: Iterable[str] = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"[DFlashDrafter.load] {index} holds no readable weight_map") from None
        files = sorted(folder / name for name in names)
    else:
        files = [single] if single.is_file() else sorted(folder.glob("model-*.safetensors"))
    missing = [file for file in files or [single] if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"[DFlashDrafter.load] expected the weights at {missing[0]} but there is no such file"
        )
    return files


def _read_header(file: Path) -> dict[str, dict[str, Any]]:
    """A safetensors header: name to dtype, shape and offsets, checked against the file's size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length) if length <= size - 8 else b""
    try:
        header: dict[str, dict[str, Any]] = json.loads(text)
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"[DFlashDrafter.load] {file} ({size} bytes) is truncated or no safetensors file: "
            "its header cannot be read"
        ) from None
    if size < end:
        raise ValueError(
            f"[DFlashDrafter.load] {file} is truncated: expected {end} bytes but got {size}"
        )
    return header


def _compare(
    folder: Path, expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]
) -> None:
    problems = [
        *(f"{name} is missing" for name in expected.keys() - found.keys()),
        *(f"{name} is unexpected" for name in found.keys() - expected.keys()),
        *(
            f"{name} has shape {found[name]} and not {expected[name]}"
            for name in expected.keys() & found.keys()
            if found[name] != expected[name]
        ),
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:4])
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(
            f"[DFlashDrafter.load] expected the {len(expected)} tensors of config.json in {folder} "
            f"but got {len(found)}: {shown}{more}"
        )
