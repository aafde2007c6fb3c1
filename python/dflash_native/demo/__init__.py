"""The demo pair: a small trained target, its DFlash draft and twenty prompts, as plain files.

`MODEL_CARD.md` beside this file tells what they are. A successor replaces the files, not code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

TARGET = Path(__file__).parent / "target"
"""A folder in mlx-lm's quantised layout: 8 bits, groups of 64. `mlx_lm.load` reads it too."""

DRAFT = Path(__file__).parent / "draft"
"""A DFlash checkpoint in bf16."""

BLOCK_SIZES = {"cpu": 6, "cuda": 16, "metal": 16}
"""The fixed block at which the pair decodes fastest, by backend. Measured, see bench/results; of
metal nothing is known yet, and the draft's own block stands."""

_PROMPT = re.compile(r"^=== (?P<name>\w+) \((?P<kind>[^)]+)\)\n", re.MULTILINE)


class Prompt(NamedTuple):
    """The beginning of a file, for the target to continue."""

    name: str
    kind: str
    """What sort of text it is, such as "parser" or "test"."""
    text: str
    """Whole lines, 96 to 128 of the target's tokens."""


def prompts() -> list[Prompt]:
    """The shipped prompts, always in the same order."""
    return parse_prompts((Path(__file__).parent / "prompts.txt").read_text(encoding="utf-8"))


def parse_prompts(text: str) -> list[Prompt]:
    """The prompts of a text, each after a line `=== name (kind)`; none where there is no such."""
    _, *fields = _PROMPT.split(text)
    return [Prompt(*fields[i : i + 3]) for i in range(0, len(fields), 3)]
