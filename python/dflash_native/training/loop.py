"""The training loop: a schedule over time or steps, checkpoints, and going on after a cut."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .optimiser import MuonAdamW

_WARM_STEPS = 2
"""Steps of a command that are not on the clock: the first ones compile."""


@dataclass(frozen=True)
class Plan:
    """How long a model trains, and how one command of that is bounded."""

    seconds: float | None = None
    """Training time, over all commands; compilation is not counted. Or, where figures must not
    depend on a clock:"""
    steps: int | None = None
    warm_up: float = 0.015
    """Share of the whole with a rising rate; then it is flat until `flat`, then falls to zero."""
    flat: float = 0.45
    command_seconds: float = 540.0
    """After so long this command saves and stops, to go on when it is run again."""
    checkpoint_seconds: float = 60.0
    report_steps: int = 100

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.steps is None):
            raise ValueError(
                f"[train] expected either seconds or steps but got {self.seconds} and {self.steps}"
            )

    def progress(self, step: int, elapsed: float) -> float:
        """The share of the whole that is done, 0 to 1."""
        done = step / self.steps if self.steps else elapsed / (self.seconds or math.inf)
        return min(1.0, done)

    def scale(self, progress: float) -> float:
        """The factor of the learning rates."""
        if progress < self.warm_up:
            return max(1e-3, progress / self.warm_up)
        return 1.0 if progress < self.flat else max(0.02, (1 - progress) / (1 - self.flat))


def train(
    model: nn.Module,
    optimiser: MuonAdamW,
    loss_of: Callable[[int], Tensor],
    plan: Plan,
    folder: Path,
    name: str,
) -> dict[str, Any] | None:
    """Train until the plan is done and return its figures, or None where the command's time ended.

    `loss_of(step)` is the loss of a step and depends on the step's number alone for its data, so
    that a cut training goes on as if it had not been cut. The state lies in
    `folder/name.checkpoint`, replaced as a whole; each report is a line of `folder/name.log.jsonl`.
    Raises RuntimeError where the loss is no number.
    """
    began = time.monotonic()
    path = folder / f"{name}.checkpoint"
    state = _restore(path, model, optimiser)
    step, spent, seen = state["step"], state["seconds"], state["step"]
    device = next(model.parameters()).device
    start: float | None = None
    saved_at, total, first = began, torch.zeros((), device=device), step
    log = (folder / f"{name}.log.jsonl").open("a", encoding="utf-8")
    with log:
        while True:
            if start is None and step >= seen + _WARM_STEPS:
                _wait(device)
                start = time.monotonic()
            elapsed = spent + (time.monotonic() - start if start is not None else 0.0)
            progress = plan.progress(step, elapsed)
            if progress >= 1.0:
                break
            now = time.monotonic()
            cut = step > seen and now - began > plan.command_seconds
            if cut or now - saved_at > plan.checkpoint_seconds:
                _save(path, model, optimiser, step, elapsed)
                saved_at = now
            if cut:
                print(f"{name}: cut at {progress:.1%}, step {step}; run the command again")
                return None
            loss = loss_of(step)
            loss.backward()
            optimiser.step(plan.scale(progress))
            total += loss.detach()
            step += 1
            if (step - first) % plan.report_steps == 0 or step - seen in (1, 10):
                mean = total.item() / (step - first)
                first = step
                total.zero_()
                line = {
                    "step": step,
                    "loss": round(mean, 4),
                    "seconds": round(elapsed, 1),
                    "done": round(progress, 3),
                }
                print(f"{name}: {json.dumps(line)}", flush=True)
                log.write(json.dumps(line) + "\n")
                log.flush()
                if not math.isfinite(mean):
                    raise RuntimeError(f"[train] expected a finite loss at step {step}: {mean}")
    _wait(device)
    _save(path, model, optimiser, step, elapsed)
    return {"steps": step, "seconds": round(elapsed, 1)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _save(path: Path, model: nn.Module, optimiser: MuonAdamW, step: int, seconds: float) -> None:
    state = {
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "step": step,
        "seconds": seconds,
    }
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


def _restore(path: Path, model: nn.Module, optimiser: MuonAdamW) -> dict[str, Any]:
    if not path.is_file():
        return {"step": 0, "seconds": 0.0}
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return state
