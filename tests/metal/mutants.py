"""Mutants of the shipped shaders: each is one small change of one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from .tools import SHADERS

# kind -> (what is looked for in a line of code, what stands there instead)
CHANGES: dict[str, list[tuple[str, str]]] = {
    "barrier dropped": [(r"^\s*(threadgroup|simdgroup)_barrier\(.*\);$", "")],
    "turn less": [(r"(?<=for \(int )(.*? = .+?; )(\w+) < ", r"\1\2 + 1 < ")],
    "bound": [(" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > ")],
    "comparison": [(" == ", " != "), (" != ", " == ")],
    "off by one": [
        (r" \+ 1\b(?!\.)", " + 2"),
        (r" - 1\b", ""),
        (r"(?<=\w) \+ (?=[a-z]\w* \*)", " + 1 + "),
    ],
    "stride": [
        (r"(?<=\w|\)) \* ([A-Za-z_]\w*)\b(?!\()", r" * (\1 + 1)"),
        (r"\b(\d+) \* (?=\w)", r"(\1 + 1) * "),
    ],
    "index": [(r" / (?=\w)", " % "), (r" % (?=\w)", " / ")],
    "sign": [(r"(?<=\w|\)|\]) \+ (?=[a-zA-Z(])", " - "), (r", -(?=\w)", ", ")],
    "operands": [
        (
            r"\bfma_rn\(([^,()]+(?:\([^()]*\))?), ([^,()]+(?:\([^()]*\))?), (.+?)\)(;|\)|$)",
            r"fma_rn(\1, \3, \2)\4",
        ),
        (r"\b(\w+), (\w+)(?=[,)])", r"\2, \1"),
    ],
    "condition dropped": [
        (r"([\w.\[\]]+(?: [<>=!]=? [\w. +]+)?) (&&|\|\|) ", ""),
        (r" (&&|\|\|) !?[\w.\[\]]+(\([^()]*\))?(?: [<>=!]=? [\w. +]+)?(?=[;)])", ""),
        (r"^(\s*(?:\} else )?if )\((\w.*)\) \{$", r"\1(true || (\2)) {"),
    ],
    "choice": [(r" \? ", " || true ? "), (r" \? ", " && false ? ")],
    "constant": [
        (r"\b0\.0f", "1.0f"),
        (r"\b1\.0f", "2.0f"),
        (r"\b(0x7|0x0|1)([0-9a-f]+u)\b", r"\g<1>8\2"),
        (r"(?<=[&>(] )(\d+)\b(?=u?[;)])", r"(\1 + 1)"),
    ],
    "guard dropped": [(r"^(\s*(?:\} else )?if )\((.*)\) \{$", r"\1(false && (\2)) {")],
}


class Mutant(NamedTuple):
    """`old` is the line of the file that becomes `new`."""

    file: str
    line: int
    kind: str
    old: str
    new: str

    def __str__(self) -> str:
        new = self.new.strip() or "(nothing)"
        return f"{self.file}:{self.line} {self.kind}: {self.old.strip()} -> {new}"

    def text(self) -> str:
        """The mutated file."""
        lines = (SHADERS / self.file).read_text().splitlines()
        assert lines[self.line - 1] == self.old
        lines[self.line - 1] = self.new
        return "\n".join(lines) + "\n"


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith(
        ("//", "#", "template", "METAL_FUNC")
    )


def _of_line(kind: str, code: str) -> Iterator[str]:
    """The line with one change each."""
    seen = {code}
    if kind == "bound" and code.lstrip().startswith("for ("):  # past the end of registers, mostly
        return
    for pattern, replacement in CHANGES[kind]:
        for found in re.finditer(pattern, code):
            new = code[: found.start()] + found.expand(replacement) + code[found.end() :]
            if new not in seen:
                seen.add(new)
                yield new


def every(file: str) -> Iterator[Mutant]:
    """All mutants of a file."""
    text, _, _ = (SHADERS / file).read_text().partition("#ifndef DFLASH_JIT")  # lists of instances
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r"\s*//.*", "", line)
        if _is_code(code) and "[[" not in code:
            for kind in CHANGES:
                for new in _of_line(kind, code):
                    yield Mutant(file, number, kind, line, new)


def sample(file: str, of_each_kind: int) -> list[Mutant]:
    """All barriers, and so many of each other kind, evenly spaced."""
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in every(file):
        by_kind.setdefault(mutant.kind, []).append(mutant)
    chosen = []
    for kind, found in by_kind.items():
        count = min(len(found), len(found) if kind == "barrier dropped" else of_each_kind)
        step = len(found) / count
        chosen += [found[int((i + 0.5) * step)] for i in range(count)]
    return chosen
