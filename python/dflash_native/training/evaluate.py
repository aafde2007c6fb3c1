"""Figures of a finished pair: losses, loops, acceptance by kind of text, sample continuations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .acceptance import Texts, replay
from .checkpoints import read_draft, read_target
from .decoding import Decoder, loop_mask
from .draft import Draft
from .losses import held_out_loss
from .stages import KINDS, device_and_dtype, tap_texts
from .target import Target
from .tokenizer import SPECIAL
from .windows import load_tokens, random_windows

TEXT_KINDS = ("code", "prose")
TEMPERATURES = (0.0, 0.8)
SHORTER_BLOCKS = (4, 8, 12)


def evaluate(
    folder: Path,
    rows: int = 256,
    prompt: int = 96,
    generated: int = 256,
    length: int = 1024,
    seed: int = 7,
) -> dict[str, Any]:
    """Write `folder/evaluation.json` about the target and whichever drafts are there.

    `rows` cuts of `prompt` tokens of each kind's held-out text at random places are continued by
    `generated` tokens, greedily and at 0.8; and the first 128 tokens of 20 held-out code files by
    128 tokens, greedily.
    """
    device, dtype = device_and_dtype()
    target = read_target(folder / "target").to(device)
    drafts = {
        kind: read_draft(folder / kind).to(device) for kind in KINDS if (folder / kind).is_dir()
    }
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    end = target.shape.vocab_size - len(SPECIAL)
    counts = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    figures: dict[str, Any] = {"held_out": {}, "loops": {}, "drafts": {k: {} for k in drafts}}
    for text_kind in TEXT_KINDS:
        held = load_tokens(folder / f"held-{text_kind}.tokens.xz", device)
        loss = held_out_loss(target, held, length, dtype)
        bits = loss / 0.6931471805599453 / counts[f"held-{text_kind}"]["bytes_per_token"]
        figures["held_out"][text_kind] = {
            "nats_a_token": round(loss, 4),
            "bits_a_byte": round(bits, 4),
        }
        generator = torch.Generator().manual_seed(seed)
        prompts = random_windows(held, rows, prompt, generator)
        for temperature in TEMPERATURES:
            texts = write(target, drafts, prompts, temperature, generated, dtype)
            name = f"{text_kind}, T = {temperature:g}"
            share = texts.loops[:, prompt : prompt + generated].double().mean().item()
            figures["loops"][name] = round(share, 4)
            for kind, draft in drafts.items():
                found = replay(draft, target, texts, dtype)
                if temperature == 0 and text_kind == "code":
                    found["shorter_blocks"] = {
                        str(n): replay(draft, target, texts, dtype, n)["tokens_a_round"]
                        for n in SHORTER_BLOCKS
                        if n < draft.shape.block_size
                    }
                figures["drafts"][kind][name] = found
        if text_kind == "code":
            prompts = file_beginnings(held, end, 20, 128)
            texts = write(target, drafts, prompts, 0.0, 128, dtype)
            figures["twenty_prompts"] = {
                kind: replay(draft, target, texts, dtype) for kind, draft in drafts.items()
            }
            figures["samples"] = [
                {
                    "prompt": tokenizer.decode(row[:128], skip_special_tokens=False),
                    "continuation": tokenizer.decode(row[128:256], skip_special_tokens=False),
                }
                for row in texts.tokens[:3].tolist()
            ]
    text = json.dumps(figures, indent=1) + "\n"
    (folder / "evaluation.json").write_text(text, encoding="utf-8")
    return figures


def write(
    target: Target,
    drafts: dict[str, Draft],
    prompts: Tensor,
    temperature: float,
    generated: int,
    dtype: torch.dtype,
) -> Texts:
    """Let the target go on after `prompts [R, P]` by `generated` tokens.

    All drafts must read the same taps.
    """
    rows, prompt = prompts.shape
    device = prompts.device
    layers = {draft.shape.target_layer_ids for draft in drafts.values()} or {(0,)}
    if len(layers) > 1:
        raise ValueError(f"[evaluate] expected drafts of the same taps but got {sorted(layers)}")
    end = prompt + generated
    room = max((draft.shape.block_size for draft in drafts.values()), default=0)
    decoder = Decoder(target, rows, end + room, dtype)
    temperatures = torch.full((rows,), temperature, device=device)
    seeds = torch.arange(rows, device=device)
    tokens = decoder(prompts, torch.full((rows,), prompt, device=device), temperatures, seeds)
    taps = tap_texts(target, tokens, layers.pop(), dtype)
    return Texts(tokens, taps, loop_mask(tokens), temperatures, seeds, prompt, end)


def file_beginnings(held: Tensor, end: int, count: int, length: int) -> Tensor:
    """int64 `[<= count, length]`: the beginnings of the first files that are twice as long."""
    ends = (held == end).nonzero()[:, 0].tolist()
    starts = [0, *(position + 1 for position in ends)]
    long = [
        start
        for start, stop in zip(starts, [*ends, len(held)], strict=True)
        if stop - start >= 2 * length
    ]
    if not long:
        raise ValueError(f"[evaluate] expected held-out files of {2 * length} tokens but got none")
    return torch.stack([held[start : start + length] for start in long[:count]]).long()
