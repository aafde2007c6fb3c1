"""The stages that need a GPU to be quick: target, continuations, drafts. One folder holds a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import losses
from .checkpoints import read_target, write_draft, write_target
from .continuations import read_pool, write_batches
from .draft import Draft
from .loop import Plan, train
from .optimiser import MuonAdamW
from .shapes import DraftShape, TargetShape
from .target import Target
from .windows import Windows, load_tokens

KINDS = ("dflash", "dflash2")


def device_and_dtype() -> tuple[torch.device, torch.dtype]:
    """A GPU and bf16 where there is one, else the CPU and fp32."""
    torch.set_float32_matmul_precision("high")
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.bfloat16
    return torch.device("cpu"), torch.float32


def train_target(
    folder: Path,
    plan: Plan,
    shape: TargetShape | None = None,
    batch: int = 128,
    length: int = 1024,
    seed: int = 0,
    compiled: bool = True,
) -> bool:
    """Train the target on `folder/train.tokens.xz` and write `folder/target`; False if cut."""
    device, dtype = device_and_dtype()
    torch.manual_seed(seed)
    target = Target(shape or TargetShape()).to(device)
    windows = Windows(load_tokens(folder / "train.tokens.xz", device), length, batch, seed)
    tables = target.rope(length)
    head = _compile(losses.next_token, compiled and device.type == "cuda")
    if compiled and device.type == "cuda":
        _compile_layers(target)

    def loss_of(step: int) -> Tensor:
        tokens = windows(step)
        hidden, _ = target(tokens[:, :-1], tables, dtype)
        loss: Tensor = head(hidden, target.embed_tokens.weight, tokens[:, 1:], dtype)
        return loss

    optimiser = MuonAdamW(target.named_parameters())
    figures = train(target, optimiser, loss_of, plan, folder, "target")
    if figures is None:
        return False
    tokenizer = folder / "tokenizer"
    write_target(target, folder / "target", tokenizer if tokenizer.is_dir() else None)
    seen = figures["steps"] * batch * length
    figures |= {
        "batch": batch,
        "length": length,
        "tokens": seen,
        "epochs": round(figures["steps"] / windows.steps_per_epoch, 2),
        "parameters": _parameters(target),
        "seed": seed,
    }
    _write_figures(folder / "target.json", figures)
    return True


def make_continuations(
    folder: Path, batches: int, rows: int = 4096, length: int = 640, seed: int = 0
) -> None:
    """Write `folder/continuations-NN.pt` with the target as it ships."""
    device, dtype = device_and_dtype()
    target = read_target(folder / "target").to(device)
    tokens = load_tokens(folder / "train.tokens.xz", device)
    write_batches(target, tokens, folder, batches, rows, length, dtype, seed)


def train_draft(
    folder: Path,
    plan: Plan,
    kind: str,
    shape: DraftShape | None = None,
    batch: int = 128,
    blocks: int = 32,
    gamma: float = 5.0,
    shorter: float = 0.5,
    seed: int = 0,
    compiled: bool = True,
) -> bool:
    """Train a draft, "dflash" or "dflash2", and write `folder/<kind>`; False if cut.

    `batch` texts a step with `blocks` blocks each. `gamma` is the decay of a row's weight,
    `shorter` the share of blocks below the full length.
    """
    device, dtype = device_and_dtype()
    torch.manual_seed(seed)
    is_dflash2 = KINDS.index(kind) == 1
    shape = replace(shape or DraftShape(), is_dflash2=is_dflash2)
    target = read_target(folder / "target").to(device)
    tokens = load_tokens(folder / "train.tokens.xz", device)
    texts, starts = read_pool(folder, tokens, seed, device)
    taps = tap_texts(target, texts, shape.target_layer_ids, dtype)
    table = target.embed_tokens.weight
    draft = Draft(shape).to(device)
    tables = draft.rope(texts.shape[1] + shape.block_size)
    loss_function = _compile(losses.block_loss, compiled and device.type == "cuda")
    if compiled and device.type == "cuda":
        _compile_layers(draft)

    def loss_of(step: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(1_000_003 * (seed + 1) + step)
        chosen = torch.randint(0, len(texts), (batch,), generator=generator, device=device)
        anchors, lengths = losses.draw_anchors(
            starts[chosen], texts.shape[1], shape.block_size, blocks, shorter, generator
        )
        part = losses.Blocks(texts[chosen].long(), taps[chosen], anchors, lengths)
        hidden, before, labels = losses.draft_hidden(draft, part, table, tables, dtype)
        weights = losses.position_weights(lengths, shape.block_size, gamma)
        loss: Tensor = loss_function(draft, hidden, before, labels, weights, table, dtype)
        return loss

    optimiser = MuonAdamW(draft.named_parameters())
    figures = train(draft, optimiser, loss_of, plan, folder, kind)
    if figures is None:
        return False
    write_draft(draft, folder / kind)
    figures |= {
        "batch": batch,
        "blocks_a_text": blocks,
        "blocks": figures["steps"] * batch * blocks,
        "texts": len(texts),
        "gamma": gamma,
        "shorter": shorter,
        "parameters": _parameters(draft),
        "seed": seed,
    }
    _write_figures(folder / f"{kind}.json", figures)
    return True


@torch.no_grad()
def tap_texts(
    target: Target, texts: Tensor, layers: tuple[int, ...], dtype: torch.dtype, rows: int = 128
) -> Tensor:
    """The taps `[N, T, n * H]` of `texts [N, T]`, `rows` texts at a time."""
    tables = target.rope(texts.shape[1])
    columns = len(layers) * target.shape.hidden_size
    result = torch.empty(*texts.shape, columns, device=texts.device, dtype=dtype)
    for first in range(0, len(texts), rows):
        part = slice(first, first + rows)
        _, found = target(texts[part].long(), tables, dtype, layers)
        assert found is not None
        result[part] = found
    return result


def _compile_layers(model: Target | Draft) -> None:
    torch._dynamo.config.cache_size_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    for layer in model.layers:
        layer.compile()


def _compile(function: Callable[..., Tensor], wanted: bool) -> Callable[..., Tensor]:
    return torch.compile(function) if wanted else function


def _parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _write_figures(path: Path, figures: dict[str, Any]) -> None:
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
