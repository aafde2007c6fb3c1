"""The examples of README.md, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def block(heading: str) -> str:
    """The first Python block below a heading."""
    _, found, below = README.read_text(encoding="utf-8").partition(f"\n### {heading}\n")
    assert found, heading
    return re.findall(r"```python\n(.*?)```", below, re.DOTALL)[0]
