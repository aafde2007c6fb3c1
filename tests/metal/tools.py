"""Where things are, how compilers are run, and a cache of what they made."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parents[1]
SHIM = BENCH / "shim"
SHADERS = ROOT / "metal"
CACHE = Path(os.environ.get("DFLASH_METAL_CACHE") or "~/.cache/dflash-native-metal").expanduser()
LLVM = "22"
CLANG, CLANGXX = f"clang-{LLVM}", f"clang++-{LLVM}"
NM, DIS = f"llvm-nm-{LLVM}", f"llvm-dis-{LLVM}"
# what shows that a Debian package is there -> the package
PACKAGES = {CLANG: f"clang-{LLVM}", NM: f"llvm-{LLVM}", f"ld.lld-{LLVM}": f"lld-{LLVM}"}
LIEF = "lief==1.0.0"  # reads Mach-O; another version may name things otherwise
X86 = ["-march=x86-64-v3"]


class BenchError(Exception):
    """Something the user can act on; the message says what."""


class ToolError(BenchError):
    """A compiler or another tool failed."""


def missing() -> list[str]:
    """Debian packages that the bench needs and this machine lacks."""
    return [package for program, package in PACKAGES.items() if not shutil.which(program)]


def python_program(name: str) -> Path:
    """Where the Python package of that name puts its program, in this environment."""
    return Path(sysconfig.get_path("scripts"), name)


def pinned(name: str) -> str:
    """What the project's build requires of the Python package of that name, as `name==version`."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    (found, *_) = (x.partition(";")[0] for x in build if re.match(rf"{name}\b(?!\[)", x))
    return found


def missing_python() -> list[str]:
    """What the builds and the audit need and this Python environment lacks, as requirements."""
    found = [name for name in ("cmake", "ninja") if not python_program(name).exists()]
    packages = {"nanobind": pinned("nanobind"), "scikit_build_core": pinned("scikit-build-core")}
    packages["lief"] = LIEF
    return found + [x for name, x in packages.items() if not importlib.util.find_spec(name)]


def run(*command: str | Path, **options: Any) -> str:
    """Run a tool and return what it printed; BenchError with its complaint if it fails."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, capture_output=True, **options)
    except FileNotFoundError:
        raise BenchError(f"{words[0]} is missing: run `python -m tests.metal setup`") from None
    out, complaint = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    if done.returncode:
        raise ToolError(f"{' '.join(words)[:300]}\nfailed:\n{(out + complaint)[-4000:]}")
    return out


def tree_hash(*names: str) -> str:
    """Of the files and of the folders' files of those names in the repository's root."""
    digest = hashlib.sha256()
    for name in names:
        path = ROOT / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            built = file.suffix in (".pyc", ".so") or file.name == "_built.py"
            if file.is_file() and not built:
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _bench_hash() -> str:
    """Of the bench's own sources, so that no build product outlives a change."""
    digest = hashlib.sha256()
    for path in sorted(BENCH.rglob("*")):
        code = path.suffix in (".py", ".cpp", ".cmake", ".h", ".hpp", ".txt") or path.name in (
            "metal_stdlib",
            "__config_site",
        )
        if code and not path.name.startswith("test_"):
            digest.update(str(path.relative_to(BENCH)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """One process at a time."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cached(name: str, key: object, make: Callable[[Path], None], bench: bool = True) -> Path:
    """The folder CACHE/name-hash, filled by `make(folder)` the first time.

    The hash covers `key` and, with `bench`, the bench's sources. Processes that want the same
    folder at the same time wait for the first of them.
    """
    digest = hashlib.sha256(((_bench_hash() if bench else "") + repr(key)).encode()).hexdigest()[
        :16
    ]
    final = CACHE / f"{name}-{digest}"
    if final.is_dir():
        return final
    with locked(f"{name}-{digest}"):
        if not final.is_dir():
            work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=CACHE))
            try:
                make(work)
                work.rename(final)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return final


def emulator_objects() -> list[Path]:
    """The run-time that every emulated kernel is linked with, compiled."""
    sources = sorted((BENCH / "emulator").glob("*.cpp"))

    def make(folder: Path) -> None:
        flags = [*X86, "-O2", "-fPIC", "-std=c++20", "-fvisibility=hidden"]
        for source in sources:
            run(CLANGXX, *flags, "-c", source, "-o", folder / f"{source.stem}.o")

    folder = cached("emulator", (), make)
    return [folder / f"{source.stem}.o" for source in sources]


def use_cache(folder: Path) -> None:
    """Keep what is compiled from now on in another folder; the emulator is taken along."""
    global CACHE
    emulator = emulator_objects()[0].parent
    folder.mkdir()
    (folder / emulator.name).symlink_to(emulator)
    CACHE = folder
