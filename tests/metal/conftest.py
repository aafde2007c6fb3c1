"""The bench's tests need its compilers, and those of oracles the mlx-metal wheel: without them they
are skipped, in CI they fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from . import macos
from .tools import missing, missing_python


def require(packages: list[str]) -> None:
    if packages:
        reason = f"{' '.join(packages)} missing: run `python -m tests.metal setup`"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@pytest.fixture(autouse=True, scope="session")
def compilers() -> None:
    require(missing() + missing_python())


@pytest.fixture(scope="session")
def metallib(compilers: None) -> None:
    """MLX's wheels for macOS are there."""
    require([] if macos.MLX.is_dir() else [f"mlx-metal=={macos.MLX_VERSION}"])


@pytest.fixture(scope="session")
def macos_wheel(compilers: None) -> Path:
    """The wheel for macOS, built."""
    require(macos.missing_downloads())
    return macos.build()
