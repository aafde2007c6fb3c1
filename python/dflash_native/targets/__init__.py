"""Targets: models of mlx-lm, run over this package's caches and operations."""

from .base import FAMILIES, Prefill, Target

__all__ = ["FAMILIES", "Prefill", "Target"]
