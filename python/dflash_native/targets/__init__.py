"""Targets: models of mlx-lm, run over this package's caches and operations."""

from .base import FAMILIES, Target

__all__ = ["FAMILIES", "Target"]
