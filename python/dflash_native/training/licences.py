"""Whether a distribution, and each of its files, is under a permissive licence.

A source is accepted when its metadata names permissive licences only *and* every licence file that
it ships is the text of one. A file of an accepted source is dropped when it names a copyleft
licence anywhere, or an SPDX identifier that is not permissive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from email.message import Message

PERMISSIVE = frozenset(
    "0BSD Apache-2.0 BSD-1-Clause BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 CNRI-Python HPND ISC "
    "MIT MIT-0 MIT-CMU PSF-2.0 Python-2.0 Python-2.0.1 Unlicense Zlib ZPL-2.1".split()
)
"""SPDX identifiers."""

_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "CC0 1.0 Universal (CC0 1.0) Public Domain Dedication": "CC0-1.0",
    "Historical Permission Notice and Disclaimer (HPND)": "HPND",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "Zope Public License": "ZPL-2.1",
    "zlib/libpng License": "Zlib",
}

_FREE_TEXT = {
    "apache": "Apache-2.0",
    "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license version 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license 2.0": "Apache-2.0",
    "apache v2": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "bsd-like": "BSD-3-Clause",
    "mit license": "MIT",
    "new bsd": "BSD-3-Clause",
    "new bsd license": "BSD-3-Clause",
    "the mit license": "MIT",
}

_TEXTS = {
    "Apache-2.0": r"apache license,? version 2\.0|apache license version 2\.0",
    "MIT": r"permission is hereby granted, free of charge, to any person obtaining a copy",
    "BSD-3-Clause": r"redistribution and use in source and binary forms",
    "ISC": r"permission to use, copy, modify, and(?:/or)? distribute this software",
    "HPND": r"permission to use, copy, modify, and distribute",
    "PSF-2.0": r"python software foundation license",
    "Unlicense": r"this is free and unencumbered software released into the public domain",
    "Zlib": r"altered source versions must be plainly marked as such",
    "ZPL-2.1": r"zope public license",
    "CC0-1.0": r"cc0 1\.0 universal",
    "BSL-1.0": r"boost software license",
}

_PYTHON = "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2"
_PYTHON_PASSAGES = re.compile(
    r"A\. HISTORY OF THE SOFTWARE.*?B\. TERMS AND CONDITIONS"
    r"|previously distributed under the GNU General Public License \(GPL\)",
    re.DOTALL,
)
"""Where Python's own licence speaks of the GPL without being under it."""

COPYLEFT = re.compile(
    r"\b(?:[AL]?GPL(?:v?[23])?|EUPL|CDDL|MPL(?:[ -]?v?[12](?:\.\d)?)?|CC[ -]BY\b|OFL|SSPL|BUSL)\b"
    r"|(?i:\b(?:general|affero|lesser|library|mozilla|eclipse|common|netscape|server side) "
    r"(?:general )?public licen[sc]e)|(?i:\bcreative commons attribution|\bcopyleft\b)"
    r"|(?i:\bopen font licen[sc]e|\bbusiness source licen[sc]e)"
)
"""What no text may name: licences that bind a derived work, or that are no open-source licence."""

_SPDX_LINE = re.compile(r"SPDX-License-Identifier:[ \t]*([^\n*#>]+)")
_OPERATORS = frozenset(("AND", "OR", "WITH"))


class LicenceError(ValueError):
    """A source that is not, or not provably, under a permissive licence."""


def check_expression(expression: str, where: str) -> set[str]:
    """The SPDX identifiers of `expression`, which are all permissive; LicenceError if not."""
    words = re.findall(r"[\w.+-]+", expression)
    identifiers = {word for word in words if word not in _OPERATORS}
    strange = identifiers - PERMISSIVE
    if strange or not identifiers:
        raise LicenceError(
            f"[licences] expected permissive SPDX identifiers in {where} but got {expression!r}"
        )
    return identifiers


def check_metadata(metadata: Message) -> set[str]:
    """The SPDX identifiers that a distribution's core metadata names; LicenceError if unclear.

    `License-Expression` decides alone. Else every classifier, or without any the free-text
    `License` field, must be known here.
    """
    where = f"the metadata of {metadata['Name']}"
    expression = metadata["License-Expression"]
    if expression:
        return check_expression(expression, where)
    names = [
        text.rpartition(" :: ")[2]
        for text in metadata.get_all("Classifier", [])
        if text.startswith("License ::") and not text.endswith(":: OSI Approved")
    ]
    known = {_CLASSIFIERS.get(name) for name in names}
    if None in known:
        raise LicenceError(f"[licences] expected permissive classifiers in {where} but got {names}")
    field = (metadata["License"] or "").strip()
    if COPYLEFT.search(field):
        raise LicenceError(f"[licences] expected a permissive licence in {where} but got {field!r}")
    if names:
        return {name for name in known if name}
    if field in PERMISSIVE:
        return {field}
    if field.lower() in _FREE_TEXT:
        return {_FREE_TEXT[field.lower()]}
    if len(field) > 200:
        return check_text(field, where)
    raise LicenceError(f"[licences] expected a permissive licence in {where} but got {field!r}")


def check_text(text: str, where: str) -> set[str]:
    """The permissive licences whose text this is; LicenceError for others and for none."""
    if _PYTHON in text:
        text = _PYTHON_PASSAGES.sub("", text)
    found = COPYLEFT.search(text)
    if found:
        raise LicenceError(f"[licences] expected a permissive text in {where} but got {found[0]!r}")
    flat = " ".join(text.lower().split())
    known = {name for name, phrase in _TEXTS.items() if re.search(phrase, flat)}
    if not known:
        raise LicenceError(f"[licences] expected a known licence text in {where} but got another")
    return known


def check_source(metadata: Message, licence_files: Mapping[str, str]) -> set[str]:
    """The licences of a distribution from its metadata and its licence files, name to text.

    Raises LicenceError unless both are there and both are permissive.
    """
    named = check_metadata(metadata)
    if not licence_files:
        raise LicenceError(f"[licences] expected a licence file in {metadata['Name']} but got none")
    for name, text in sorted(licence_files.items()):
        check_text(text, f"{name} of {metadata['Name']}")
    return named


def refusal(text: str) -> str | None:
    """Why one file of an accepted source is left out, or None: what it names, as it stands."""
    found = COPYLEFT.search(text)
    if found:
        return found[0]
    for line in _SPDX_LINE.findall(text):
        try:
            check_expression(line, "a file")
        except LicenceError:
            return f"SPDX {line.strip()}"
    return None


def is_licence_file(path: str) -> bool:
    """Whether a path inside a wheel is one of its own licence files."""
    folder, _, name = path.rpartition("/")
    inside = re.fullmatch(r"[^/]+\.dist-info(/licen[sc]es(/.*)?)?", folder) is not None
    return inside and re.match(r"(licen[sc]e|copying)", name, re.IGNORECASE) is not None


def summary(names: Iterable[str]) -> str:
    """`MIT AND PSF-2.0`: sorted, as one SPDX expression."""
    return " AND ".join(sorted(names))
