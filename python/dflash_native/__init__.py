"""Block speculative decoding on hybrid models, with state rollback that is exact to the bit."""

from __future__ import annotations

import mlx.core  # noqa: F401  (first: the extension needs libmlx loaded)

from . import _native, ops, reference
from .tape import Tape

__version__ = "0.1.0"

__all__ = ["Tape", "ops", "reference"]
