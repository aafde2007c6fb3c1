"""Imports the extension after mlx, and proves that the two share their types."""

from __future__ import annotations

import importlib
from types import ModuleType

import mlx.core as mx

MLX_VERSION: str = vars(mx)["__version__"]  # mlx's stub does not list it
NANOBIND_OF_MLX = "3.1.0"
"""The nanobind that mlx 0.32.4 was built with; another one has another type registry."""


def check_versions(built_for: str, running: str) -> None:
    """Raises ImportError unless the extension's mlx is the one that runs."""
    if built_for != running:
        raise ImportError(
            f"dflash_native was built for mlx {built_for} but mlx {running} is installed, and "
            f"mlx's C++ ABI changes between versions. Repair: pip install mlx=={built_for}"
        )


def check_round_trip(extension: ModuleType) -> None:
    """Raises ImportError unless an mlx array passes through the extension.

    Nothing is evaluated: that would start MLX's threads, and a fork after the import would hang.
    """
    sent = mx.zeros((2, 3), dtype=mx.float16)
    try:
        back = extension.round_trip(sent)
        same = isinstance(back, mx.array) and (back.shape, back.dtype) == (sent.shape, sent.dtype)
    except TypeError:
        same = False
    if not same:
        raise ImportError(
            f"dflash_native was built with nanobind {extension.NANOBIND_VERSION}, which does not "
            f"share types with mlx {MLX_VERSION} (built with nanobind {NANOBIND_OF_MLX}). Repair: "
            f"build dflash_native again with nanobind {NANOBIND_OF_MLX} (pip install "
            "--no-cache-dir . in its source does)"
        )


def load() -> ModuleType:
    """The extension, checked; ImportError says what is wrong and how to repair it."""
    try:
        built = importlib.import_module("dflash_native._built")
    except ImportError as error:
        raise ImportError(
            "dflash_native has no extension here: this is its source, not an installation. "
            "Repair: pip install . in its source, and import from another folder"
        ) from error
    check_versions(built.MLX_VERSION, MLX_VERSION)  # first: another libmlx may not even load
    try:
        extension = importlib.import_module("dflash_native._ext")
    except ImportError as error:
        raise ImportError(
            f"dflash_native's extension, built for mlx {built.MLX_VERSION}, does not load with mlx "
            f"{MLX_VERSION}: {error}. Repair: pip install --force-reinstall "
            f"mlx=={built.MLX_VERSION}"
        ) from error
    check_round_trip(extension)
    return extension


extension = load()
