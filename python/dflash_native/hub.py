"""Loading targets and drafts from folders, from the hub, and from the package itself."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, cast

import mlx.core as mx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_map_with_path, tree_unflatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config, load_model, load_tokenizer
from transformers import PreTrainedConfig

from . import demo
from .drafters import DFlashDrafter, is_draft

KNOWN_PAIRS = {
    "Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16",
    "Qwen3.6-27B": "z-lab/Qwen3.6-27B-DFlash",
    "Qwen3.6-35B-A3B": "z-lab/Qwen3.6-35B-A3B-DFlash",
    "Qwen3.8-27B": "z-lab/Qwen3.8-27B-DFlash2",
}
"""Published drafts by the name of their target. For suggestions: this table chooses nothing."""

_DTYPES = (mx.float32, mx.bfloat16, mx.float16)
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_QUANTISATION = re.compile(r"-(\d+bit|bf16|fp16|mxfp\d|nvfp4)$", re.IGNORECASE)
_TOKENIZER_FILES = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.tiktoken")
_MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja")


class HasVocabulary(Protocol):
    """What `check_tokenizer` asks of a target."""

    vocab_size: int
    """Rows of the embedding table."""


def load(
    path_or_id: str | PathLike[str], dtype: mx.Dtype | None = None
) -> tuple[Module, TokenizerWrapper]:
    """Load a target and its tokenizer with mlx-lm.

    `path_or_id` is a folder, or a hub id `owner/name` if no such folder exists. With `dtype`
    (float32, bfloat16 or float16) every weight is plain and of that dtype: affine-quantised Linear
    and Embedding layers are dequantised in fp32 and rounded once, so the model grows to its full
    size; only what the model itself exempts (such as `A_log`, fp32) stays as stored. Without
    `dtype` everything does.

    Raises FileNotFoundError for a folder, a file or a hub repository that cannot be had, and
    ValueError for a DFlash draft, a damaged or incomplete checkpoint, a model that mlx-lm does not
    know, and a dtype or a quantisation that cannot be converted.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(
            f"[load] expected mx.float32, mx.bfloat16, mx.float16 or None but got {dtype!r}"
        )
    folder = _resolve("load", path_or_id, want_draft=False)
    _check_weights(folder)
    try:
        model, config = load_model(folder, lazy=True)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"[load] mlx-lm cannot load {folder}: {_first_line(error)}") from error
    if dtype is not None:
        _make_plain(model, dtype)
    mx.eval(model.parameters())
    return model, _load_tokenizer(folder, config.get("eos_token_id"))


def load_drafter(path_or_id: str | PathLike[str], dtype: mx.Dtype | None = None) -> DFlashDrafter:
    """Load a DFlash or DFlash2 draft: a folder, or a hub id if no such folder exists.

    `dtype` is bfloat16 or float32, and None keeps what is stored. Raises FileNotFoundError for a
    folder, a file or a hub repository that cannot be had, and ValueError for a target, a damaged
    checkpoint, and fp16, which a draft's residuals overflow.
    """
    return DFlashDrafter.load(_resolve("load_drafter", path_or_id, want_draft=True), dtype)


def load_demo(
    dtype: mx.Dtype | None = mx.float32,
) -> tuple[Module, TokenizerWrapper, DFlashDrafter]:
    """Load the pair that ships in the package; no network is used.

    `dtype` is the target's, dequantised from 8 bits, and the draft's as well, which runs in fp32
    beside an fp16 target. None keeps the target in 8 bits and the draft in bf16. Raises ValueError
    for any other dtype.
    """
    model, tokenizer = load(demo.TARGET, dtype)
    is_fp16 = dtype is not None and dtype == mx.float16
    return model, tokenizer, load_drafter(demo.DRAFT, mx.float32 if is_fp16 else dtype)


def is_dflash(path_or_id: str | PathLike[str]) -> bool:
    """Whether a folder, or a hub id if no such folder exists, is a DFlash draft and no language
    model. Raises FileNotFoundError and ValueError as `load_drafter` does.
    """
    found, _ = _kind("load_drafter", _locate("load_drafter", path_or_id))
    return found


def check_tokenizer(target: HasVocabulary, tokenizer: Any) -> None:
    """Refuse a tokenizer whose ids go beyond the target's embedding table.

    `tokenizer` is mlx-lm's wrapper or a tokenizer of transformers. A smaller vocabulary is usual:
    tables are padded. Raises ValueError naming both sizes.
    """
    size = max(tokenizer.get_vocab().values()) + 1
    if size > target.vocab_size:
        raise ValueError(
            f"[check_tokenizer] expected a tokenizer of at most {target.vocab_size} entries, the "
            f"rows of the target's embedding table, but got {size}: it belongs to another model"
        )


def check_draft_tokenizer(tokenizer: Any, drafts: Any) -> None:
    """Refuse a draft model whose tokenizer gives a token another id than the target's does.

    Both are mlx-lm's wrappers or tokenizers of transformers. Raises ValueError naming the token.
    """
    ours, theirs = tokenizer.get_vocab(), drafts.get_vocab()
    for token in sorted(ours.keys() & theirs.keys()):
        if ours[token] != theirs[token]:
            raise ValueError(
                f"[check_draft_tokenizer] expected a draft model with {token!r} as id "
                f"{ours[token]}, as the target's tokenizer has it, but got {theirs[token]}"
            )
    if not ours.keys() & theirs.keys():
        raise ValueError(
            "[check_draft_tokenizer] expected a draft model of the target's vocabulary but the two "
            "have no token in common"
        )


def known_draft(target: str | PathLike[str]) -> str | None:
    """The hub id of a draft published for this target (a folder or id, also quantised), or None."""
    return KNOWN_PAIRS.get(_QUANTISATION.sub("", Path(target).name))


def _resolve(operation: str, path_or_id: str | PathLike[str], *, want_draft: bool) -> Path:
    """The folder of a checkpoint of the wanted kind, downloaded if need be."""
    # The configuration alone first: a draft given as a target is no reason to download one.
    folder = _locate(operation, path_or_id)
    found, architectures = _kind(operation, folder)
    if found != want_draft:
        kinds = ("a target", "a DFlash draft")
        raise ValueError(
            f"[{operation}] expected {kinds[want_draft]} but {str(path_or_id)!r} is {kinds[found]} "
            f"(architectures {architectures})"
        )
    if Path(path_or_id).expanduser().is_dir():
        return folder
    return _download(operation, str(path_or_id), _MODEL_FILES)


def _locate(operation: str, path_or_id: str | PathLike[str]) -> Path:
    """A folder, or that of a hub repository's configuration, downloaded if need be."""
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"[{operation}] expected a model's folder but {folder} is a file")
    if not isinstance(path_or_id, str) or not _HUB_ID.fullmatch(path_or_id):
        raise FileNotFoundError(
            f"[{operation}] expected a model's folder or a hub id (owner/name) but there is no "
            f"folder {str(path_or_id)!r}"
        )
    return _download(operation, path_or_id, ("config.json",))


def _download(operation: str, hub_id: str, patterns: Sequence[str]) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except RepositoryNotFoundError as error:
        reason = "the hub has no such repository that you may read"
        cause: Exception = error
    except (OSError, HFValidationError) as error:
        reason = f"it is not in the hub's cache and cannot be downloaded ({type(error).__name__})"
        cause = error
    raise FileNotFoundError(
        f"[{operation}] there is no folder {hub_id!r}, and as a hub id {reason}"
    ) from cause


def _kind(operation: str, folder: Path) -> tuple[bool, Any]:
    """Whether `config.json` is a DFlash draft's, and its architectures."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"[{operation}] expected {path} but there is no such file")
    try:
        config = load_config(folder)
        return is_draft(config), config.get("architectures")
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"[{operation}] {path} is no configuration: {error}") from error


def _check_weights(folder: Path) -> None:
    """Raise for missing shards and for files whose header promises more than they hold."""
    index = folder / "model.safetensors.index.json"
    names = {path.name for path in folder.glob("model*.safetensors")}
    if index.is_file():
        try:
            names |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"[load] {index} holds no readable weight_map") from error
    for name in sorted(names or {"model.safetensors"}):
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"[load] expected {path} but there is no such file")
        try:
            mx.load(str(path))
        except RuntimeError as error:
            raise ValueError(
                f"[load] {path} is truncated or no safetensors file: {_first_line(error)}"
            ) from error


def _load_tokenizer(folder: Path, eos_token_ids: Any) -> TokenizerWrapper:
    """mlx-lm's tokenizer, cutting text as `tokenizer.json` says where the checkpoint wants that.

    For some model types (qwen3_5 is one) transformers 5 takes only the vocabulary from the file and
    cuts by a rule of its own, even if `tokenizer_class` asks for the plain class. Given a
    configuration without a model type it keeps to the file.
    """
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise FileNotFoundError(f"[load] expected a tokenizer in {folder} but there is none")
    extra = {}
    path = folder / "tokenizer_config.json"
    try:
        if path.is_file():
            wanted = json.loads(path.read_text(encoding="utf-8")).get("tokenizer_class")
            if wanted in ("PreTrainedTokenizerFast", "TokenizersBackend"):
                extra["config"] = PreTrainedConfig()
        tokenizer: TokenizerWrapper = load_tokenizer(folder, extra, eos_token_ids=eos_token_ids)
        return tokenizer
    except Exception as error:  # the tokenizers library raises Exception itself
        raise ValueError(
            f"[load] transformers cannot read the tokenizer in {folder}: {_first_line(error)}"
        ) from error


def _make_plain(model: Module, dtype: mx.Dtype) -> None:
    """Dequantise and cast a model that nobody else has seen yet."""
    plain: list[tuple[str, Module]] = []
    for name, module in model.named_modules():
        if "scales" not in module:
            continue
        mode = getattr(module, "mode", None)
        if not isinstance(module, QuantizedLinear | QuantizedEmbedding) or mode != "affine":
            raise ValueError(
                "[load] expected only affine Linear and Embedding layers to dequantise but got "
                f"{type(module).__name__} ({mode}) at {name}: load it with dtype=None"
            )
        plain.append((name, _dequantise(module, dtype)))
    if plain:
        model.update_modules(cast(dict[str, Any], tree_unflatten(plain)))
        model.eval()
    casts = getattr(model, "cast_predicate", lambda path: True)
    model.update(
        tree_map_with_path(
            lambda path, value: (
                value.astype(dtype)
                if mx.issubdtype(value.dtype, mx.floating) and casts(path)
                else value
            ),
            model.parameters(),
        )
    )


def _dequantise(module: QuantizedLinear | QuantizedEmbedding, dtype: mx.Dtype) -> Module:
    assert module.biases is not None, "affine layers have biases"
    scales, biases = module.scales.astype(mx.float32), module.biases.astype(mx.float32)
    weight = mx.dequantize(module.weight, scales, biases, module.group_size, module.bits)
    plain: Module
    if isinstance(module, QuantizedEmbedding):
        plain = Embedding(1, 1)
    else:
        plain = Linear(1, 1, bias="bias" in module)
        if "bias" in module:
            plain.bias = module.bias
    plain.weight = weight.astype(dtype)
    return plain


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
