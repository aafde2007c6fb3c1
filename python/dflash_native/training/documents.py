"""The texts inside a source: what a wheel or the standard library holds, cleaned and filtered."""

from __future__ import annotations

import ast
import gzip
import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any, Literal

from . import licences

Kind = Literal["code", "prose", "chat"]

VENDORED = re.compile(
    r"(?:^|/)_?(?:vendor(?:ed)?|extern(?:al|als)?|third[_-]?party|site-packages|node_modules"
    r"|typeshed|bundled)(?:/|$)"
)
"""Folders of other people's work, whose licences are not the source's."""

_CODE = (".py", ".pyi")
_PROSE = (".rst", ".md", ".txt")
_SERVICE = re.compile(r"/service-\d+\.json(?:\.gz)?$")
_TEST = re.compile(r"(?:^|/)(?:tests?|testing)(?:/|$)|(?:^|/)test_[^/]*$|_test\.py$")

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
"""Around one message of a chat: `<|im_start|>role`, a line break, the text, `<|im_end|>`."""


@dataclass(frozen=True)
class Document:
    """One text with where it comes from."""

    path: str
    """`source/path/inside/it`, unique; its hash decides between training and held-out."""
    kind: Kind
    text: str

    @property
    def is_test(self) -> bool:
        return _TEST.search(self.path) is not None


class Wheel:
    """A wheel on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def licence(self) -> set[str]:
        """Its licences. Raises licences.LicenceError unless all are permissive."""
        with zipfile.ZipFile(self.path) as archive:
            files = {
                name: archive.read(name).decode("utf-8", "replace")
                for name in archive.namelist()
                if licences.is_licence_file(name)
            }
            return licences.check_source(_metadata(archive), files)

    def documents(self, name: str) -> Iterator[Document]:
        """Its texts before any filter, vendored folders left out. `name` is the source's."""
        with zipfile.ZipFile(self.path) as archive:
            for path in sorted(archive.namelist()):
                info = PurePosixPath(path)
                if VENDORED.search(path) or ".dist-info/" in path:
                    continue
                if info.suffix in (*_CODE, *_PROSE) or _SERVICE.search(path):
                    data = archive.read(path)
                    data = gzip.decompress(data) if path.endswith(".gz") else data
                    yield from _read(f"{name}/{path}", data.decode("utf-8", "replace"))
            description = _metadata(archive).get_payload()
            if isinstance(description, str):
                yield Document(f"{name}/README", "prose", description)


class StandardLibrary:
    """The Python standard library in a folder such as `/usr/lib/python3.13`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def licence(self) -> set[str]:
        """{"PSF-2.0"}. Raises licences.LicenceError where `LICENSE.txt` is missing or another."""
        path = self.folder / "LICENSE.txt"
        if not path.is_file():
            raise licences.LicenceError(f"[licences] expected Python's licence at {path}")
        found = licences.check_text(path.read_text(encoding="utf-8"), str(path))
        if "PSF-2.0" not in found:
            raise licences.LicenceError(f"[licences] expected Python's licence in {path}")
        return {"PSF-2.0"}

    def documents(self, name: str) -> Iterator[Document]:
        """Its texts before any filter."""
        for path in sorted(self.folder.rglob("*")):
            inside = path.relative_to(self.folder).as_posix()
            if path.suffix in (*_CODE, *_PROSE) and not VENDORED.search(inside):
                yield from _read(f"{name}/{inside}", path.read_text("utf-8", errors="replace"))


def _metadata(archive: zipfile.ZipFile) -> Message:
    path = next(n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
    return Parser().parsestr(archive.read(path).decode("utf-8", "replace"))


def _read(path: str, text: str) -> Iterator[Document]:
    if _SERVICE.search(path):
        for number, part in enumerate(_service_texts(text)):
            yield Document(f"{path}#{number}", "prose", part)
    else:
        yield Document(path, "code" if path.endswith(_CODE) else "prose", text)


class _Text(HTMLParser):
    """HTML to text: a line for each paragraph and item."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in ("p", "li", "note", "important"):
            self.parts.append("\n- " if tag == "li" else "\n")

    def handle_data(self, data: str) -> None:
        self.parts.append(re.sub(r"\s+", " ", data))


def _service_texts(text: str) -> Iterator[str]:
    """The documentation strings of an AWS service model, some 8 kB to a document."""
    lines: list[str] = []
    size = 0
    for documentation in _documentation(json.loads(text)):
        lines.append(documentation)
        size += len(documentation)
        if size > 8000:
            yield "\n\n".join(lines)
            lines, size = [], 0
    if lines:
        yield "\n\n".join(lines)


def _documentation(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        found = value.get("documentation")
        if isinstance(found, str) and len(found) > 120:
            yield html_text(found)
        for part in value.values():
            yield from _documentation(part)


def html_text(html: str) -> str:
    """The text of an HTML fragment, a line for each paragraph and each item of a list."""
    parser = _Text()
    parser.feed(html)
    parser.close()
    lines = (" ".join(line.split()) for line in "".join(parser.parts).split("\n"))
    return "\n".join(line for line in lines if line.strip(" -"))


def clean(text: str) -> str:
    """`text` with line feeds only, four spaces for a tab, and without a leading licence notice."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\t", "    ")
    lines = text.split("\n")
    end = next((i for i, line in enumerate(lines) if line and not line.startswith("#")), 0)
    head = "\n".join(lines[:end])
    if re.search(r"licen[sc]e|copyright", head, re.IGNORECASE):
        text = "\n".join(lines[end:])
    return text.strip("\n") + "\n"


def is_ordinary(text: str) -> bool:
    """Whether a text looks written by people: sizes, line lengths, few digits, mostly ASCII."""
    if not 400 <= len(text) <= 400_000 or "<|" in text:
        return False
    lines = text.rstrip("\n").split("\n")
    return (
        len(text) <= 90 * len(lines)
        and max(map(len, lines)) <= 400
        and sum(map(text.count, "0123456789")) <= 0.12 * len(text)
        and sum(character > "\x7f" for character in text) <= 0.02 * len(text)
    )


_ASKS = (
    "Write a Python function `{name}`: {summary}",
    "{summary} Please write this as a Python function called {name}.",
    "I need a function `{name}`. {summary}",
    "How would you write `{name}` in Python? {summary}",
)
_EXPLAIN = (
    "What does this function do?\n\n```python\n{code}\n```",
    "Explain this code.\n\n```python\n{code}\n```",
    "Write a docstring for this function.\n\n```python\n{code}\n```",
)


def message(role: str, text: str) -> str:
    """One message of a chat, as the chat template writes it."""
    return f"{IM_START}{role}\n{text}{IM_END}\n"


def chats(document: Document, random: Random) -> Iterator[str]:
    """Short exchanges made of a module's documented functions: what was asked for, or explained."""
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    lines = document.text.split("\n")
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith(("_", "test")):
            continue
        summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if not 20 <= len(summary) <= 300 or not 80 <= len(code) <= 1500:
            continue
        if random.random() < 0.7:
            ask = random.choice(_ASKS).format(name=node.name, summary=summary)
            answer = f"```python\n{code}\n```"
        else:
            node.body = node.body[1:] or [ast.Pass()]
            ask = random.choice(_EXPLAIN).format(code=ast.unparse(node))
            answer = summary
        yield message("user", ask) + message("assistant", answer)
