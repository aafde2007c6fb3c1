"""The bench's tests need its compilers: without them they are skipped, in CI they fail."""

from __future__ import annotations

import os

import pytest

from .tools import missing, missing_python


@pytest.fixture(autouse=True, scope="session")
def compilers() -> None:
    packages = missing() + missing_python()
    if packages:
        reason = f"{' '.join(packages)} missing: run `python -m tests.metal setup`"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
