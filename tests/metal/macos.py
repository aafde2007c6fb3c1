"""The wheel for macOS on Apple silicon, built on Linux by the project's own build.

Nothing that only Apple has is needed. The compiler and the linker are clang and lld. The headers of
the C and C++ libraries, and what libSystem exports, come from the wheel of Zig; MLX's headers and
libmlx.dylib from MLX's macOS wheels. Of the other system libraries just that is taken to exist
which MLX's own binaries, made by Apple's linker for the same macOS, take from them, and what
macos/libcxx.txt gives a source for.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from . import macho
from .tools import BENCH, CACHE, ROOT, BenchError, cached, locked, pinned, run, tree_hash

PLATFORM = "macosx_14_0_arm64"
PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
MLX_VERSION = pinned("mlx").partition("==")[2]
ZIG_VERSION = "0.17.1"
ZIG_HEADERS, ZIG_SYSTEM, ZIG_LIBCXX, ZIG_LIBCXXABI = (
    f"ziglang/lib/{name}"
    for name in (
        "libc/include/any-darwin-any",
        "libc/darwin/libSystem.tbd",
        "libcxx/include",
        "libcxxabi/include",
    )
)
MLX = CACHE / f"macos-mlx-{MLX_VERSION}-{PYTHON}"
ZIG = CACHE / f"macos-headers-zig-{ZIG_VERSION}"


def missing_downloads() -> list[str]:
    """What the build needs from the package index and the cache lacks, as requirements."""
    wanted = {f"mlx=={MLX_VERSION}": MLX, f"ziglang=={ZIG_VERSION}": ZIG}
    return [requirement for requirement, folder in wanted.items() if not folder.is_dir()]


def download() -> None:
    """Fetch what is missing."""
    mlx = [f"mlx=={MLX_VERSION}", f"mlx-metal=={MLX_VERSION}"]
    _unpack(MLX, mlx, ("mlx",), "--platform", PLATFORM)
    zig = (ZIG_HEADERS, ZIG_SYSTEM, ZIG_LIBCXX, ZIG_LIBCXXABI)
    _unpack(ZIG, [f"ziglang=={ZIG_VERSION}"], zig)


def _unpack(folder: Path, requirements: list[str], members: tuple[str, ...], *options: str) -> None:
    """The wheels' files whose names start with one of `members`, together in `folder`."""
    with locked(folder.name):
        if folder.is_dir():
            return
        print(f"downloading {' '.join(requirements)}", flush=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as name:
            work = Path(name)
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
            run(*pip, *options, "--dest", work, *requirements)
            for wheel in work.glob("*.whl"):
                with zipfile.ZipFile(wheel) as archive:
                    names = [n for n in archive.namelist() if n.startswith(members)]
                    archive.extractall(work / "files", names)
            (work / "files").rename(folder)


def mlx_binaries() -> list[Path]:
    """What Apple's linker made of MLX: the library and the Python extension."""
    (core,) = (MLX / "mlx").glob("core.cpython-*-darwin.so")
    return [MLX / "mlx/lib/libmlx.dylib", core]


def attested() -> dict[str, set[str]]:
    """System libraries by their path, with symbols that they are known to export."""
    found: dict[str, set[str]] = {}
    for binary in map(macho.read, mlx_binaries()):
        for library in binary.libraries:
            found.setdefault(library, set())
        for symbol, library in binary.imports.items():
            if library:
                found[library].add(symbol)
    found["/usr/lib/libc++.1.dylib"] |= listed()
    return {library: symbols for library, symbols in found.items() if library.startswith("/")}


def listed() -> set[str]:
    """What macos/libcxx.txt says that libc++ exports."""
    lines = (BENCH / "macos/libcxx.txt").read_text().splitlines()
    return {line for line in lines if line.startswith("_")}


def libsystem() -> set[str]:
    """What libSystem exports."""
    return set(re.findall(r"[\w$]+", (ZIG / ZIG_SYSTEM).read_text()))


def _stub(path: Path, install_name: str, symbols: set[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    stub = {"tbd-version": 4, "targets": "[ arm64-macos ]", "install-name": f"'{install_name}'"}
    if "Foundation" in install_name:
        stub["reexported-libraries"] = _of_target("libraries", ["/usr/lib/libobjc.A.dylib"])
    stub["exports"] = _of_target("symbols", sorted(symbols)) if symbols else "[]"
    lines = "".join(f"{key}: {value}\n" for key, value in stub.items())
    path.write_text(f"--- !tapi-tbd\n{lines}...\n")


def _of_target(key: str, values: list[str]) -> str:
    return f"\n  - targets: [ arm64-macos ]\n    {key}: [ {', '.join(values)} ]"


def _sdk(folder: Path) -> None:
    """Headers, stubs of libraries and the toolchain file, where clang and CMake expect them."""
    include = folder / "usr/include"
    shutil.copytree(ZIG / ZIG_HEADERS, include)
    shutil.copytree(BENCH / "macos/include", include, dirs_exist_ok=True)
    libcxx = include / "c++/v1"
    shutil.copytree(ZIG / ZIG_LIBCXX, libcxx)
    shutil.copytree(ZIG / ZIG_LIBCXXABI, libcxx, dirs_exist_ok=True)
    (include / "__config_site").rename(libcxx / "__config_site")
    for header in (libcxx / "__config", *(libcxx / "__configuration").glob("*.h")):
        text = header.read_text()
        removed = r"/\* zig patch: instead of including __config_site.*\*/"
        header.write_text(re.sub(removed, "#include <__config_site>", text))

    for install_name, symbols in attested().items():
        name = Path(install_name).name
        if ".framework/" in install_name:
            path = folder / f"System/Library/Frameworks/{name}.framework/{name}.tbd"
        else:
            path = folder / f"usr/lib/{Path(name).stem}.tbd"
        _stub(path, install_name, symbols)
    (folder / "usr/lib/libc++.tbd").symlink_to("libc++.1.tbd")
    # a target that lld does not know
    system = re.sub(r",\s*arm64e\.x1-\w+", "", (ZIG / ZIG_SYSTEM).read_text())
    (folder / "usr/lib/libSystem.tbd").write_text(system)

    # Linux's pyconfig.h: what it says that the headers read is the same on macOS, or is replaced
    # by their pymacconfig.h. Debian keeps it elsewhere and puts a switch in its place.
    headers = Path(sysconfig.get_path("include"))
    real = headers.parent / (sysconfig.get_config_var("MULTIARCH") or "") / headers.name
    shutil.copytree(headers, folder / "python")
    if (real / "pyconfig.h").exists():
        shutil.copyfile(real / "pyconfig.h", folder / "python/pyconfig.h")
    shutil.copyfile(BENCH / "macos/toolchain.cmake", folder / "toolchain.cmake")


def sdk() -> Path:
    """The folder to build against."""
    if missing_downloads():
        raise BenchError(f"{' '.join(missing_downloads())} missing: `python -m tests.metal setup`")
    own = tree_hash("tests/metal/macos", "tests/metal/macos.py", "tests/metal/macho.py")
    return cached("macos-sdk", (MLX_VERSION, ZIG_VERSION, sys.version, own), _sdk, bench=False)


BUILD_WHEEL = """
import sys, scikit_build_core.build
settings = dict(word.split("=", 1) for word in sys.argv[2:])
scikit_build_core.build.build_wheel(sys.argv[1], settings)
"""
SOURCES = ["CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml"]
SOURCES += ["cmake", "csrc", "metal", "python"]


def _build(folder: Path, settings: Mapping[str, object], **environment: str) -> None:
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-c", BUILD_WHEEL, folder, *words]
    run(*command, cwd=ROOT, env=os.environ | environment)


def defines() -> dict[str, Path]:
    """What CMake is told beyond what it is told on a Mac."""
    return {
        "CMAKE_TOOLCHAIN_FILE": sdk() / "toolchain.cmake",
        "MLX_ROOT": MLX / "mlx",
        "Python_INCLUDE_DIR": sdk() / "python",
    }


def build() -> Path:
    """The path of the wheel; raises BenchError with what the compiler said.

    scikit-build-core builds it as it does on a Mac, told by the variables that its cross builds
    go by; only the files that changed since the last call are compiled.
    """

    def make(folder: Path) -> None:
        work = CACHE / "macos-build"
        settings = {f"cmake.define.{name}": path for name, path in defines().items()}
        settings["build-dir"] = work
        with locked(work.name):
            if not (work / sdk().name).exists():  # CMake keeps what it found in another one
                shutil.rmtree(work, ignore_errors=True)
                (work / sdk().name).mkdir(parents=True)
            suffix = f".cpython-{PYTHON[2:]}-darwin.so"
            platform = "macosx-14.0-arm64"
            _build(folder, settings, _PYTHON_HOST_PLATFORM=platform, SETUPTOOLS_EXT_SUFFIX=suffix)

    folder = cached("macos-wheel", (sdk().name, tree_hash(*SOURCES)), make, bench=False)
    (wheel,) = folder.glob("*.whl")
    return wheel


def build_without_extension() -> Path:
    """A wheel of the files that are the same on all systems."""

    def make(folder: Path) -> None:
        _build(folder, {"wheel.cmake": "false"})

    (wheel,) = cached("python-wheel", tree_hash(*SOURCES), make, bench=False).glob("*.whl")
    return wheel
