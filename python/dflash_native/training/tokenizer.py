"""The tokenizer: byte-level BPE with Qwen3.5's splitting rule, and the corpus in its tokens."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from .corpus import read_documents
from .documents import IM_END, IM_START

SPECIAL = (
    "<|endoftext|>",
    IM_START,
    IM_END,
    "<|mask|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""The last ids of the vocabulary, in this order. The first ends and separates documents."""

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen3.5's rule: transformers puts it in place of any other for this `model_type`."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '" + IM_START + "' + message['role'] + '\\n' + "
    "message['content'] + '" + IM_END + "\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + IM_START + "assistant\\n' }}{% endif %}"
)

_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]
"""xz for numbers of two bytes."""


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of `vocab_size` entries, the special tokens included."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocab_size - len(SPECIAL):
        raise ValueError(
            f"[tokenizer] expected text for {vocab_size - len(SPECIAL)} entries but got {found}"
        )
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, with the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL[0],
        "errors": "replace",
        "mask_token": SPECIAL[3],
        "model_max_length": 4096,
        "pad_token": SPECIAL[0],
        "split_special_tokens": False,
        "unk_token": None,
    }
    text = json.dumps(config, indent=1) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def encode(
    tokenizer: Tokenizer, texts: Iterable[str], limit: int | None = None
) -> tuple[NDArray[np.uint16], int]:
    """Whole texts until `limit` tokens, an end token after each, and their UTF-8 bytes."""
    end = tokenizer.token_to_id(SPECIAL[0])
    parts: list[NDArray[np.uint16]] = []
    count = size = 0
    remaining = iter(texts)
    while group := list(islice(remaining, 256)):
        for text, coded in zip(group, tokenizer.encode_batch_fast(group), strict=True):
            if limit is not None and count + len(coded.ids) + 1 > limit:
                return np.concatenate(parts), size
            parts.append(np.array([*coded.ids, end], dtype=np.uint16))
            count += len(parts[-1])
            size += len(text.encode())
    return np.concatenate(parts), size


def build(folder: Path, vocab_size: int, limit: int, sample: int = 3) -> dict[str, Any]:
    """Train on every `sample`th text of `folder/train.jsonl.xz`, then encode all.

    `limit` is the most training tokens: prose and chats, which are few, come first and code fills
    what is left. Writes `tokenizer/`, `train.tokens.xz`, `held-code.tokens.xz` and
    `held-prose.tokens.xz` (raw little-endian uint16) and `tokens.json` to `folder`.
    """
    texts = (document.text for document in read_documents(folder / "train.jsonl.xz"))
    tokenizer = train(islice(texts, 0, None, sample), vocab_size)
    save(tokenizer, folder / "tokenizer")
    figures: dict[str, Any] = {"vocab_size": vocab_size}

    def write(name: str, chosen: Iterator[str], most: int | None = None) -> None:
        tokens, size = encode(tokenizer, chosen, most)
        path = folder / f"{name}.tokens.xz"
        data = lzma.compress(tokens.astype("<u2").tobytes(), filters=_FILTERS)
        path.write_bytes(data)
        figures[name] = {
            "tokens": len(tokens),
            "bytes_per_token": round(size / len(tokens), 4),
            "file_bytes": len(data),
        }

    def training(is_code: bool) -> Iterator[str]:
        documents = read_documents(folder / "train.jsonl.xz")
        return (d.text for d in documents if (d.kind == "code") == is_code)

    write("train", chain(training(False), training(True)), limit)
    for kind in ("code", "prose"):
        held = read_documents(folder / "held.jsonl.xz")
        write(f"held-{kind}", (d.text for d in held if d.kind == kind))
    (folder / "tokens.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def read_tokens(path: Path) -> NDArray[np.uint16]:
    """The tokens of one `.tokens.xz`."""
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2")
