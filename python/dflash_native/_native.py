"""Imports the extension after mlx, and proves that the two share their types."""

from __future__ import annotations

import importlib
from types import ModuleType

import mlx.core as mx

MLX_VERSION: str = vars(mx)["__version__"]  # mlx's stubs do not declare it

NANOBIND_OF_MLX = "3.1.0"
"""The nanobind that mlx 0.32.4 was built with; another one has another type registry."""


def check_versions(built_for: str, running: str) -> None:
    """Raises ImportError unless the extension's mlx is the one that runs."""
    if built_for != running:
        raise ImportError(
            f"dflash_native was built for mlx {built_for} but mlx {running} is installed, and "
            f"mlx's C++ ABI changes between versions. Repair: pip install mlx=={built_for}, or "
            f"build dflash-native again for mlx {running}."
        )


def check_round_trip(extension: ModuleType) -> None:
    """Raises ImportError unless an mlx array passes through the extension."""
    try:
        same = extension.round_trip(mx.array([1.0, 2.0])).tolist() == [1.0, 2.0]
    except TypeError:
        same = False
    if not same:
        raise ImportError(
            f"dflash_native was built with nanobind {extension.NANOBIND_VERSION}, which does not "
            f"share types with mlx {MLX_VERSION} (built with nanobind {NANOBIND_OF_MLX}). Repair: "
            f"pip install --force-reinstall --no-cache-dir dflash-native "
            f"mlx=={extension.MLX_VERSION}."
        )


def load() -> ModuleType:
    """The extension, checked; ImportError says what is wrong and how to repair it."""
    try:
        extension = importlib.import_module("dflash_native._ext")
    except ImportError as error:
        raise ImportError(
            f"dflash_native's extension does not load with mlx {MLX_VERSION}: {error}. Repair: "
            "pip install --force-reinstall --no-cache-dir dflash-native."
        ) from error
    check_versions(extension.MLX_VERSION, MLX_VERSION)
    check_round_trip(extension)
    return extension


extension = load()
