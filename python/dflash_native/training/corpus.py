"""The corpus: named sources, checked licences, filters, near-duplicates dropped, a held-out part.

`sources.json` beside this file is the list that ships; the texts do not.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from . import licences
from .documents import Document, Kind, StandardLibrary, Wheel, chats, clean, is_ordinary

SOURCES = Path(__file__).parent / "sources.json"
HELD_OUT: dict[Kind, int] = {"code": 50, "prose": 10}
"""One document of so many of a kind is held out, by the hash of its path."""

_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")
_REPEATS = 0.45
_HELD_REPEATS = 0.2
_LINE = 20
_CHAT_SHARE = 0.03
_CHAT_SOURCE = 40_000


@dataclass(frozen=True)
class Source:
    """One line of `sources.json`."""

    name: str
    version: str
    licence: str
    """An SPDX expression, what `licences` finds."""
    file: str
    """The wheel's name; empty for the standard library."""
    sha256: str
    megabytes: float
    """At most so much of its text is taken (1e6 characters)."""

    @property
    def label(self) -> str:
        return f"{self.name}-{self.version}"


def read_sources(path: Path = SOURCES) -> list[Source]:
    """The sources in the order of the file."""
    return [Source(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def write_sources(sources: Iterable[Source], path: Path = SOURCES) -> None:
    """One source a line, by name."""
    ordered = sorted(sources, key=lambda source: source.name.lower())
    lines = [json.dumps(vars(source), ensure_ascii=False) for source in ordered]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def fetch(source: Source, folder: Path) -> Path:
    """The wheel of a source in `folder`, downloaded by pip unless it is there.

    Raises ValueError where its SHA-256 is not the listed one.
    """
    path = folder / source.file
    if not path.is_file():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"--dest={folder}"]
        command += ["--only-binary=:all:", "--python-version=3.12"]
        command += [f"--platform={platform}" for platform in _PLATFORMS]
        subprocess.run([*command, f"{source.name}=={source.version}"], check=True)
    digest = sha256(path)
    if digest != source.sha256:
        raise ValueError(f"[corpus] expected SHA-256 {source.sha256} of {path} but got {digest}")
    return path


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def open_source(source: Source, wheels: Path, library: Path | None) -> Wheel | StandardLibrary:
    """A source on the disk, its licence checked against the listed one.

    Raises licences.LicenceError for another licence, ValueError for another file.
    """
    if source.file:
        opened: Wheel | StandardLibrary = Wheel(fetch(source, wheels))
    elif library is None:
        raise ValueError(f"[corpus] expected the folder of {source.label} but got none")
    else:
        opened = StandardLibrary(library)
    found = licences.summary(opened.licence())
    if found != source.licence:
        raise licences.LicenceError(
            f"[corpus] expected {source.label} under {source.licence} but got {found}"
        )
    return opened


class Builder:
    """Takes documents one by one, keeps those that pass, and counts what became of all."""

    def __init__(self, seed: int = 0) -> None:
        self.train: list[Document] = []
        self.held: list[Document] = []
        self.counts: Counter[str] = Counter()
        self._seen: set[str] = set()
        self._lines: set[int] = set()
        self._random = Random(seed)

    def add(self, documents: Iterable[Document], limit: float) -> int:
        """Add a source's documents up to `limit` characters, tests last. Returns the characters."""
        kept = 0
        for document in sorted(documents, key=lambda d: (d.is_test, _hash(d.path))):
            self.counts["files"] += 1
            if kept >= limit:
                self.counts["over the source's limit"] += 1
                continue
            if licences.refusal(document.text) is not None:
                self.counts["names another licence"] += 1
                continue
            text = clean(document.text)
            if not is_ordinary(text):
                self.counts["not ordinary text"] += 1
                continue
            cleaned = Document(document.path, document.kind, text)
            if self._is_new(cleaned):
                kept += len(text)
                held = _hash(document.path) % HELD_OUT[document.kind] == 0
                (self.held if held else self.train).append(cleaned)
        return kept

    def finish(self) -> None:
        """Drop held-out texts that repeat training lines, and add chats made of training code."""
        trained = {line for d in self.train for line in _distinct(d.text)}
        before = len(self.held)
        self.held = [d for d in self.held if _share(_distinct(d.text), trained) <= _HELD_REPEATS]
        self.counts["held-out texts like training texts"] = before - len(self.held)
        self.counts["kept"] = len(self.train) + len(self.held)
        budget = _CHAT_SHARE * sum(len(d.text) for d in self.train)
        code = [d for d in self.train if d.kind == "code" and not d.is_test]
        code = [d for d in code if len(d.text) < _CHAT_SOURCE]
        self._random.shuffle(code)
        made: list[Document] = []
        for document in code:
            for number, text in enumerate(chats(document, self._random)):
                made.append(Document(f"{document.path}#chat{number}", "chat", text))
                budget -= len(text)
            if budget <= 0:
                break
        self.train += made
        self._random.shuffle(self.train)

    def _is_new(self, document: Document) -> bool:
        digest = hashlib.md5(document.text.encode()).hexdigest()
        lines = _distinct(document.text)
        repeats = digest in self._seen or _share(lines, self._lines) > _REPEATS
        self._seen.add(digest)
        self._lines |= lines
        if repeats:
            self.counts["near-duplicates"] += 1
        return not repeats


def _hash(path: str) -> int:
    return int(hashlib.sha1(path.encode()).hexdigest(), 16)


def _distinct(text: str) -> set[int]:
    return {hash(line) for line in map(str.strip, text.split("\n")) if len(line) > _LINE}


def _share(lines: set[int], among: set[int]) -> float:
    return sum(line in among for line in lines) / len(lines) if lines else 0.0


def build(
    sources: Iterable[Source], wheels: Path, library: Path | None, folder: Path
) -> dict[str, Any]:
    """Write `train.jsonl.xz`, `held.jsonl.xz` and `corpus.json`; returns the last one's figures."""
    builder = Builder()
    table = []
    for source in sources:
        opened = open_source(source, wheels, library)
        kept = builder.add(opened.documents(source.label), source.megabytes * 1e6)
        table.append({"source": source.label, "licence": source.licence, "characters": kept})
        print(f"{source.label:<40} {source.licence:<24} {kept / 1e6:7.2f} MB", flush=True)
    builder.finish()
    return write(builder, table, folder)


def write(builder: Builder, table: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Write what a builder kept, and `corpus.json` with its figures, which are returned."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in (("train", builder.train), ("held", builder.held)):
        with lzma.open(folder / f"{name}.jsonl.xz", "wt", preset=0, encoding="utf-8") as stream:
            for document in documents:
                stream.write(json.dumps(vars(document), ensure_ascii=False) + "\n")
    characters: Counter[str] = Counter()
    for document in builder.train:
        characters[document.kind] += len(document.text)
    figures = {
        "files": dict(builder.counts),
        "train_documents": len(builder.train),
        "held_documents": len(builder.held),
        "train_characters": dict(characters),
        "held_characters": sum(len(d.text) for d in builder.held),
        "sources": table,
    }
    (folder / "corpus.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def read_documents(path: Path) -> Iterator[Document]:
    """The documents of a `.jsonl.xz` that `build` wrote."""
    with lzma.open(path, "rt", encoding="utf-8") as stream:
        for line in stream:
            yield Document(**json.loads(line))


def make_list(
    wheels: Path, library: Path | None, version: str, megabytes: dict[str, float], default: float
) -> tuple[list[Source], list[str]]:
    """The sources for the wheels in a folder, and why each of the others is refused."""
    sources, refused = [], []
    if library is not None:
        licence = licences.summary(StandardLibrary(library).licence())
        sources.append(Source("cpython", version, licence, "", "", megabytes.get("cpython", 12)))
    for path in sorted(wheels.glob("*.whl")):
        name, release = path.name.split("-")[:2]
        try:
            licence = licences.summary(Wheel(path).licence())
        except licences.LicenceError as error:
            refused.append(f"{path.name}: {error}")
            continue
        limit = megabytes.get(name.lower(), default)
        sources.append(Source(name, release, licence, path.name, sha256(path), limit))
    return sources, refused
