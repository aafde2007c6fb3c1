"""Drafters: what proposes the tokens that the target verifies."""

from __future__ import annotations

from .config import DFlashConfig, is_draft
from .dflash import DFlashDrafter, DFlashModel, DFlashSession
from .protocol import Drafter, DraftSession, Proposal, TargetLike
from .weights import parameter_count, tensor_shapes

__all__ = [
    "DFlashConfig",
    "DFlashDrafter",
    "DFlashModel",
    "DFlashSession",
    "DraftSession",
    "Drafter",
    "Proposal",
    "TargetLike",
    "is_draft",
    "parameter_count",
    "tensor_shapes",
]
