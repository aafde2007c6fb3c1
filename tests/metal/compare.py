"""How the shaders' tests compare what kernels wrote, and a change that they have to notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import SCHEDULES, frontend
from .tools import SHADERS

ULP = {"float": 2.0**-23, "half": 2.0**-10, "bfloat": 2.0**-7}


def same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    """Same bits."""
    return a is b or (a is not None and b is not None and a.tobytes() == b.tobytes())


def close(got: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    """Root mean square of the error against that of the expected values."""
    error = np.sqrt(np.mean((got - expected) ** 2))
    return bool(error <= tolerance * np.sqrt(np.mean(expected**2)))


def nudged(x: np.ndarray) -> np.ndarray:
    """The same array, every element one unit in the last place away."""
    bits = np.uint32 if x.dtype == np.float32 else np.uint16
    return (x.view(bits) + bits(1)).view(x.dtype)


def on_every_schedule(run: Callable[..., np.ndarray], **how: Any) -> np.ndarray:
    """The result, which the schedules have to agree on."""
    first, *others = (run(schedule=schedule, **how) for schedule in SCHEDULES)
    assert all(same(first, other) for other in others), "schedules disagree"
    return first


def instances(shader: str) -> set[str]:
    """Names of the kernels in the metallib that come from metal/<shader>.metal."""
    text = frontend.preprocess(SHADERS / f"{shader}.metal")
    return {name for name, _ in frontend.Source(text).instances}
