"""Drafters: what proposes the tokens that the target verifies."""

from __future__ import annotations

from .autoregressive import AutoregressiveDrafter, AutoregressiveSession
from .combined import CombinedDrafter, CombinedSession
from .config import DFlashConfig, is_draft
from .dflash import DFlashDrafter, DFlashModel, DFlashSession
from .lookup import LookupDrafter, LookupSession
from .protocol import Drafter, DraftSession, Proposal, Resumable, TargetLike
from .weights import parameter_count, tensor_shapes

__all__ = [
    "AutoregressiveDrafter",
    "AutoregressiveSession",
    "CombinedDrafter",
    "CombinedSession",
    "DFlashConfig",
    "DFlashDrafter",
    "DFlashModel",
    "DFlashSession",
    "DraftSession",
    "Drafter",
    "LookupDrafter",
    "LookupSession",
    "Proposal",
    "Resumable",
    "TargetLike",
    "is_draft",
    "parameter_count",
    "tensor_shapes",
]
