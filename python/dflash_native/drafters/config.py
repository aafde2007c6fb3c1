"""Reading the `config.json` of a DFlash or DFlash2 draft into one validated dataclass."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ops import HEAD_DIMS

_ARCHITECTURES = {"DFlashDraftModel": False, "DFlash2DraftModel": True}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class DFlashConfig:
    """A draft's configuration, the same from both layouts of `config.json` (nested, at the top)."""

    is_dflash2: bool
    """True for DFlash2: convolutions in every layer and the candidate selector."""
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    """As `mlx_lm.models.rope_utils.initialize_rope` takes it, None for plain rope."""
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: bool | None
    block_size: int
    """Rows of one pass: the anchor and `block_size - 1` mask tokens."""
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, None where it attends to everything."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def causal(self, layer: int) -> bool:
        """Whether a layer's block rows see only earlier block rows."""
        return self.window(layer) is not None if self.is_causal is None else self.is_causal

    @property
    def context_rows(self) -> int | None:
        """The most context rows that any layer can see from the block, None for all."""
        if self.sliding_window is None or "full_attention" in self.layer_types:
            return None
        return self.sliding_window - 1

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DFlashConfig:
        """Validate a parsed `config.json`. Raises ValueError: key, expected, found."""
        names = raw.get("architectures") or []
        known = [name for name in names if name in _ARCHITECTURES]
        if not known:
            raise _error(f"architectures to name one of {', '.join(_ARCHITECTURES)}", names)
        keys = _Keys(raw)
        layers = keys.integer("num_hidden_layers")
        values: dict[str, Any] = {
            name: keys.integer(name)
            for name in (
                "hidden_size",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "intermediate_size",
                "vocab_size",
                "max_position_embeddings",
                "num_target_layers",
            )
        }
        if values["num_attention_heads"] % values["num_key_value_heads"]:
            heads = f"{values['num_attention_heads']} and {values['num_key_value_heads']}"
            raise _error("num_attention_heads to be a multiple of num_key_value_heads", heads)
        if values["head_dim"] not in HEAD_DIMS:
            raise _error(f"head_dim to be one of {HEAD_DIMS}", values["head_dim"])
        keys.refuse("attention_bias", False)
        keys.refuse("hidden_act", "silu")
        layer_types = _layer_types(raw, layers)
        slides = "sliding_attention" in layer_types
        is_dflash2 = _ARCHITECTURES[known[0]]
        softcap = keys.number("final_logit_softcapping", 0.0)
        config = cls(
            **values,
            is_dflash2=is_dflash2,
            num_hidden_layers=layers,
            rms_norm_eps=keys.number("rms_norm_eps"),
            rope_theta=_rope_theta(raw),
            rope_scaling=_rope_scaling(raw, values["max_position_embeddings"]),
            layer_types=layer_types,
            sliding_window=keys.integer("sliding_window", minimum=2) if slides else None,
            is_causal=_is_causal(raw),
            block_size=keys.integer("block_size", 16, minimum=2),
            target_layer_ids=_target_layer_ids(keys, values["num_target_layers"]),
            mask_token_id=keys.integer("mask_token_id", minimum=0),
            final_logit_softcapping=softcap if softcap > 0 else None,
            input_embedding_scale=keys.number("input_embedding_scale", 1.0),
            output_multiplier=keys.number("output_multiplier", 1.0),
            conv_kernel_size=keys.integer("conv_kernel_size") if is_dflash2 else 0,
            conv_group_size=keys.integer("conv_group_size") if is_dflash2 else 0,
            selector_rank=keys.integer("selector_rank") if is_dflash2 else 0,
            selector_top_k=keys.integer("selector_top_k") if is_dflash2 else 0,
        )
        config._check()
        return config

    @classmethod
    def load(cls, folder: str | Path) -> DFlashConfig:
        """Read `folder/config.json`. Raises FileNotFoundError or ValueError naming the file."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"[DFlashDrafter.load] expected a draft's config at {path} but found no such file"
            )
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"[DFlashDrafter.load] {path} is not valid JSON: {error}") from None
        if not isinstance(raw, dict):
            raise ValueError(f"[DFlashDrafter.load] expected an object in {path} but got {raw!r}")
        return cls.from_dict(raw)

    def _check(self) -> None:
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise _error(
                f"sliding_window to hold the block of {self.block_size}", self.sliding_window
            )
        if self.mask_token_id >= self.vocab_size:
            raise _error(
                f"mask_token_id to be a row of the {self.vocab_size} embeddings", self.mask_token_id
            )
        if self.is_dflash2 and self.hidden_size % self.conv_group_size:
            raise _error(
                f"conv_group_size to divide hidden_size {self.hidden_size}", self.conv_group_size
            )
        if self.selector_top_k > self.vocab_size:
            raise _error(f"selector_top_k to be at most {self.vocab_size}", self.selector_top_k)


def is_draft(config: Mapping[str, Any]) -> bool:
    """Whether a parsed `config.json` is that of a DFlash or DFlash2 draft, which is no target."""
    return any(name in _ARCHITECTURES for name in config.get("architectures") or [])


def _error(expected: str, got: object) -> ValueError:
    return ValueError(f"[DFlashConfig] expected {expected} but got {got!r}")


class _Keys:
    """Typed look-ups: `dflash_config` first, then the top level. null counts as absent."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        nested = raw.get("dflash_config") or {}
        if not isinstance(nested, Mapping):
            raise _error("dflash_config to be an object", nested)
        self._places = (nested, raw)

    def find(self, name: str) -> Any:
        return next((p[name] for p in self._places if p.get(name) is not None), None)

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.find(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise _error(f"{name} to be an integer of at least {minimum}", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.find(name)
        value = default if value is None else value
        return _number(name, value)

    def refuse(self, name: str, supported: object) -> None:
        value = self.find(name)
        if value is not None and value != supported:
            raise _error(f"{name} to be {supported!r}", value)


def _number(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise _error(f"{name} to be a number", value)
    return float(value)


def _layer_types(raw: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    types = raw.get("layer_types")
    if types is None:
        return ("full_attention",) * layers
    if len(types) != layers:
        raise _error(f"layer_types to have {layers} entries", len(types))
    for name in types:
        if name not in _LAYER_TYPES:
            raise _error(f"layer_types of {' or '.join(_LAYER_TYPES)}", name)
    return tuple(types)


def _is_causal(raw: Mapping[str, Any]) -> bool | None:
    value = raw.get("is_causal")
    if value is None:
        value = (raw.get("dflash_config") or {}).get("causal")
    if value is not None and not isinstance(value, bool):
        raise _error("is_causal to be true, false or absent", value)
    return value


def _target_layer_ids(keys: _Keys, target_layers: int) -> tuple[int, ...]:
    ids = keys.find("target_layer_ids")
    if not isinstance(ids, list) or not ids:
        raise _error("target_layer_ids to be a list of layer numbers", ids)
    for layer in ids:
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < target_layers:
            raise _error(f"target_layer_ids from 0 to {target_layers - 1}", layer)
    return tuple(ids)


def _rope_places(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    places = [raw.get("rope_parameters"), raw.get("rope_scaling")]
    found = [place for place in places if place]
    for place in found:
        if not isinstance(place, Mapping) or any(isinstance(v, Mapping) for v in place.values()):
            raise _error("one flat object of rope parameters for all layers", place)
    return found


def _rope_theta(raw: Mapping[str, Any]) -> float:
    for place in (raw, *_rope_places(raw)):
        if place.get("rope_theta") is not None:
            theta = _number("rope_theta", place["rope_theta"])
            if theta <= 0:
                raise _error("rope_theta to be positive", theta)
            return theta
    raise _error("rope_theta at the top or inside rope_parameters", None)


def _rope_scaling(raw: Mapping[str, Any], max_positions: int) -> dict[str, Any] | None:
    """The one scaling that is not `default`, in `initialize_rope`'s words.

    A `partial_rotary_factor` is the target's: a draft rotates its whole head.
    """
    chosen: dict[str, Any] | None = None
    for place in _rope_places(raw):
        kind = place.get("rope_type") or place.get("type") or "default"
        if kind == "default":
            continue
        if kind not in _ROPE_TYPES:
            raise _error(f"rope_type to be one of {', '.join(_ROPE_TYPES)}", kind)
        dropped = ("type", "rope_theta", "partial_rotary_factor")
        scaling = {k: v for k, v in place.items() if k not in dropped and v is not None}
        scaling["rope_type"] = kind
        if chosen is not None and chosen != scaling:
            raise _error("rope_parameters and rope_scaling to agree", [chosen, scaling])
        chosen = scaling
    if chosen is None:
        return None
    if chosen["rope_type"] != "linear":
        # The order and the default are transformers': a value at the top wins, then the nested one.
        original = raw.get("original_max_position_embeddings")
        chosen.setdefault("original_max_position_embeddings", max_positions)
        if original is not None:
            chosen["original_max_position_embeddings"] = original
    if chosen["rope_type"] == "yarn":
        return _yarn(chosen, max_positions)
    _number("rope scaling factor", chosen.get("factor"))
    return chosen


def _yarn(scaling: dict[str, Any], max_positions: int) -> dict[str, Any]:
    """Yarn's temperature, however it is given, as the one `mscale` that mlx-lm's yarn reads.

    transformers multiplies cos and sin by `attention_factor`, else by the ratio of `0.1 m
    ln(factor) + 1` for `mscale` and `mscale_all_dim` if both are given, else by `0.1 ln(factor) +
    1` (arXiv:2309.00071, 3.4).
    """
    if scaling.get("truncate") is False:
        raise _error("yarn with truncate true or absent", False)
    original = scaling["original_max_position_embeddings"]
    factor = _number("yarn's factor", scaling.get("factor", max_positions / original))
    result = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    result |= {k: scaling[k] for k in ("beta_fast", "beta_slow") if scaling.get(k)}
    temperature = scaling.get("attention_factor")
    if temperature is not None:
        if factor <= 1:
            raise _error("a yarn factor above 1 beside attention_factor", factor)
        result["mscale"] = (_number("attention_factor", temperature) - 1) / (0.1 * math.log(factor))
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        result |= {k: scaling[k] for k in ("mscale", "mscale_all_dim")}
    return result
