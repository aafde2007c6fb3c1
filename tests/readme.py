"""The examples of README.md and docs/, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def block(heading: str) -> str:
    """The first Python block below a heading, which stands once in all pages."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    found = [below for text in texts for below in re.split(rf"\n##+ {heading}\n", text)[1:]]
    assert len(found) == 1, (heading, len(found))
    return re.findall(r"```python\n(.*?)```", found[0], re.DOTALL)[0]
