"""The bench's tests need its compilers: without them they are skipped, in CI they fail."""

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
def macos_wheel(compilers: None) -> Path:
    """The wheel for macOS, built."""
    require(macos.missing_downloads())
    return macos.build()
