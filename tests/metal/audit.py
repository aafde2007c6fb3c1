"""Is a wheel for macOS what it has to be? A PASS or FAIL line for each thing that can be read off.

That dyld loads it, and that anything in it runs, only a Mac can show.
"""

from __future__ import annotations

import base64
import csv
import ctypes
import hashlib
import re
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from . import macho, macos
from .tools import ROOT, SHADERS, BenchError

RPATH = "@loader_path/../mlx/lib"
TAG = f"{macos.PYTHON}-{macos.PYTHON}-{macos.PLATFORM}"
EXTENSION = f"dflash_native/_ext.cpython-{macos.PYTHON[2:]}-darwin.so"
LIBMLX, LIBSYSTEM = "@rpath/libmlx.dylib", "/usr/lib/libSystem.B.dylib"


class Wheel:
    """The files of a wheel, and its extension."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with zipfile.ZipFile(path) as archive:
            self.files = {name: archive.read(name) for name in archive.namelist()}
        with tempfile.TemporaryDirectory() as folder:
            module = Path(folder, "module.so")
            module.write_bytes(self.files.get(EXTENSION, b""))
            self.extension = macho.read(module)

    def info(self, name: str) -> str:
        """The text of that file of the .dist-info folder."""
        found = [n for n in self.files if re.fullmatch(rf"[^/]+\.dist-info/{name}", n)]
        if len(found) != 1:
            raise BenchError(f"expected one file .dist-info/{name} but got {found}")
        return self.files[found[0]].decode()


def expect(what: str, expected: object, got: object) -> None:
    if expected != got:
        raise BenchError(f"expected {what} {expected} but got {got}")


def tag(wheel: Wheel) -> str:
    from packaging.utils import parse_wheel_filename

    name, version, _, tags = parse_wheel_filename(wheel.path.name)
    written = re.findall(r"^Tag: (.*)$", wheel.info("WHEEL"), re.MULTILINE)
    expect("the file name's tag", [TAG], [str(t) for t in tags])
    expect("the tag", [TAG], written)
    return f"{name} {version}, {TAG}"


def record(wheel: Wheel) -> str:
    rows = list(csv.reader(wheel.info("RECORD").splitlines()))
    expect("RECORD's files", sorted(wheel.files), sorted(row[0] for row in rows))
    for name, digest, size in rows:
        if not name.endswith("/RECORD"):
            data = wheel.files[name]
            own = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            expect(f"{name} in RECORD", (f"sha256={own}", str(len(data))), (digest, size))
    return f"{len(rows)} files, hashes and sizes are right"


def files(wheel: Wheel) -> str:
    """The Python files are those that the project's build packs on any system."""
    with zipfile.ZipFile(macos.build_without_extension()) as archive:
        expected = {*archive.namelist(), EXTENSION, "dflash_native/_built.py"}
    extra, lost = wheel.files.keys() - expected, expected - wheel.files.keys()
    if extra or lost:
        raise BenchError(f"too many: {sorted(extra)}; missing: {sorted(lost)}")
    return f"the {len(expected) - 2} of a build without the extension, {EXTENSION}, _built.py"


def version_of_mlx(wheel: Wheel) -> str:
    built = wheel.files["dflash_native/_built.py"].decode()
    found = re.findall(r'^MLX_VERSION = "(.*)"$', built, re.MULTILINE)
    expect("_built.py to name", [macos.MLX_VERSION], found)
    required = re.findall(r"^Requires-Dist: (mlx\b[^-;]*)$", wheel.info("METADATA"), re.MULTILINE)
    expect(
        "METADATA to require", [f"=={macos.MLX_VERSION}"], [x.removeprefix("mlx") for x in required]
    )
    return f"{macos.MLX_VERSION} in _built.py and METADATA"


def kind(wheel: Wheel) -> str:
    module = wheel.extension
    expect("a file of kind", "BUNDLE", module.kind)
    expect("exports", {"_PyInit__ext"}, module.exports)
    return "a bundle for arm64 that exports PyInit__ext alone"


def minimum_os(wheel: Wheel) -> str:
    expect("LC_BUILD_VERSION for macOS", "14.0", wheel.extension.minimum_os)
    return "macOS 14.0"


def signature(wheel: Wheel) -> str:
    return macho.verify_signature(wheel.extension)


def rpath(wheel: Wheel) -> str:
    expect("LC_RPATH", [RPATH], wheel.extension.rpaths)
    return RPATH


def libraries(wheel: Wheel) -> str:
    known = {LIBMLX, *macos.attested()}
    unknown = set(wheel.extension.libraries) - known
    if unknown:
        raise BenchError(f"MLX's own binaries do not load {sorted(unknown)}")
    return ", ".join(Path(x).name for x in wheel.extension.libraries) + ", as MLX's binaries"


def imports(wheel: Wheel) -> str:
    """Every undefined symbol, by what shows that it exists."""
    exported = macho.read(macos.mlx_binaries()[0]).exports
    system, taken = macos.libsystem(), macos.attested()
    sources = ("libmlx", "that MLX takes, too", "libcxx.txt", "libSystem", "Python")
    counts, unknown = dict.fromkeys(sources, 0), []
    for symbol, library in wheel.extension.imports.items():
        if library == LIBMLX and symbol in exported:
            counts["libmlx"] += 1
        elif library and symbol in taken.get(library, ()):
            counts["libcxx.txt" if symbol in macos.listed() else "that MLX takes, too"] += 1
        elif library == LIBSYSTEM and symbol in system:
            counts["libSystem"] += 1
        elif library is None and hasattr(ctypes.PyDLL(None), symbol.removeprefix("_")):
            counts["Python"] += 1
        else:
            unknown.append(f"{symbol} of {library}")
    if unknown:
        raise BenchError(f"nothing shows that these exist: {', '.join(unknown)}")
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def nanobind(wheel: Wheel) -> str:
    """The string under which modules find each other's types, and the domain that is part of it."""
    core = macos.mlx_binaries()[1].read_bytes()
    pattern = rb"nanobind_\w+_abi\w+"
    expected, got = (set(re.findall(pattern, x)) for x in (core, wheel.extension.content))
    expect("the ABI tag", expected, got)
    for what, content in (("core", core), ("the extension", wheel.extension.content)):
        expect(f"domains named mlx in {what}:", 1, content.count(b"\0mlx\0"))
    return f"{b''.join(got).decode()}, domain mlx, as MLX's core"


def shaders(wheel: Wheel) -> str:
    """Every line of metal/ that is no comment or include stands in the extension."""
    count, dropped = 0, re.compile(r"#include|#pragma once|using namespace metal;")
    for file in sorted(SHADERS.iterdir()):
        for line in file.read_text().splitlines():
            code = re.sub(r" *//.*", "", line).strip()
            if not code or dropped.match(code):
                continue
            if code.encode() not in wheel.extension.content:
                raise BenchError(f"{file.relative_to(ROOT)}: this line is not embedded: {code}")
            count += 1
    return f"{count} lines of {len(list(SHADERS.iterdir()))} files"


CHECKS: list[Callable[[Wheel], str]] = [
    tag,
    record,
    files,
    version_of_mlx,
    kind,
    minimum_os,
    signature,
    rpath,
    libraries,
    imports,
    nanobind,
    shaders,
]


def audit(path: Path) -> dict[str, tuple[bool, str]]:
    """Name of the check -> whether it passed, and what was found."""
    wheel, results = Wheel(path), {}
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        try:
            results[name] = True, check(wheel)
        except BenchError as error:
            results[name] = False, str(error)
        except KeyError as missing:
            results[name] = False, f"expected the file {missing} but there is none"
    return results
