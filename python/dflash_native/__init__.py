"""Block speculative decoding on hybrid models, with state rollback that is exact to the bit.

    from dflash_native import load_demo, stream_generate

    model, tokenizer, drafter = load_demo()  # or load(path), load_drafter(path)
    for response in stream_generate(model, tokenizer, "class Stack:", 64, drafter):
        print(response.text, end="")

`Session` is the loop for engines, `ops` the kernels alone, `Sampling` how tokens are drawn.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    import mlx.core  # noqa: F401  (first: the extension needs libmlx loaded)
except ImportError as error:  # pip installs MLX's Linux package without a backend
    raise ImportError(
        f"dflash_native needs a backend of MLX ({error}). Repair: pip install 'mlx[cpu]==0.32.4', "
        "or 'mlx[cuda13]==0.32.4' on an NVIDIA GPU; its own extras cpu and cuda13 do the same"
    ) from error

from . import ops, reference
from .tape import Tape

if TYPE_CHECKING:
    from .cache import Cache
    from .checkpoint import Checkpoint
    from .drafters import (
        AutoregressiveDrafter,
        CombinedDrafter,
        DFlashDrafter,
        Drafter,
        DraftSession,
        LookupDrafter,
        Proposal,
    )
    from .generation import GenerationResponse, generate, stream_generate
    from .hub import load, load_demo, load_drafter
    from .sampling import Sampler, Sampling
    from .session import Round, Session, Stats
    from .targets import Target

    __build__: dict[str, Any]

__version__ = "0.1.0"

_HOMES = {
    "AutoregressiveDrafter": "drafters",
    "Cache": "cache",
    "Checkpoint": "checkpoint",
    "CombinedDrafter": "drafters",
    "DFlashDrafter": "drafters",
    "DraftSession": "drafters",
    "Drafter": "drafters",
    "LookupDrafter": "drafters",
    "Proposal": "drafters",
    "GenerationResponse": "generation",
    "Round": "session",
    "Sampler": "sampling",
    "Sampling": "sampling",
    "Session": "session",
    "Stats": "session",
    "Target": "targets",
    "generate": "generation",
    "load": "hub",
    "load_demo": "hub",
    "load_drafter": "hub",
    "stream_generate": "generation",
}
"""Names that are imported when they are first used: whoever wants `ops` need not load mlx-lm."""

__all__ = [
    "AutoregressiveDrafter",
    "Cache",
    "Checkpoint",
    "CombinedDrafter",
    "DFlashDrafter",
    "DraftSession",
    "Drafter",
    "GenerationResponse",
    "LookupDrafter",
    "Proposal",
    "Round",
    "Sampler",
    "Sampling",
    "Session",
    "Stats",
    "Tape",
    "Target",
    "generate",
    "load",
    "load_demo",
    "load_drafter",
    "ops",
    "reference",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    if name == "__build__":
        value: Any = importlib.import_module(".doctor", __name__).build_info()
    elif name in _HOMES:
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__build__"})
