"""The extension, built for Linux on a mock Metal device: its host code runs in MLX graphs."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from .tools import BENCH, CACHE, CLANGXX, LLVM, ROOT, cached, locked, python_program, run, tree_hash

# Tests of the operations that have shaders, and of what is built on them: as on any backend.
TESTS = [
    f"tests/test_{name}.py"
    for name in (
        "causal_conv1d",
        "gated_delta",
        "gated_delta_gates",
        "kv_write",
        "verify_matmul",
        "verify_attention",
        "ops",
        "cache",
    )
]


def build() -> Path:
    """The path of the module `_ext`; raises BenchError with what the compiler said.

    CMake configures the project as for a release, with mock/mock.cmake on top; only the files that
    changed since the last call are compiled.
    """
    name = f"_ext{sysconfig.get_config_var('EXT_SUFFIX')}"
    versions = [importlib.metadata.version(package) for package in ("mlx", "nanobind")]
    place = hashlib.sha256(repr((ROOT, sys.executable, versions)).encode()).hexdigest()[:8]

    def make(folder: Path) -> None:
        work = CACHE / "mock-build"
        options = {
            "CMAKE_BUILD_TYPE": "Debug",
            "CMAKE_CXX_COMPILER": CLANGXX,
            "CMAKE_CXX_FLAGS": "-w",
            "CMAKE_CXX_FLAGS_DEBUG": "-O0",
            "CMAKE_MAKE_PROGRAM": python_program("ninja"),
            "CMAKE_MODULE_LINKER_FLAGS": f"--ld-path=ld.lld-{LLVM}",
            "CMAKE_PROJECT_INCLUDE": BENCH / "mock" / "mock.cmake",
            "Python_EXECUTABLE": sys.executable,
        }
        cmake = python_program("cmake")
        with locked(work.name):
            defines = [f"-D{key}={value}" for key, value in options.items()]
            stamp = work / "environment"
            same = stamp.exists() and stamp.read_text() == place
            run(cmake, *([] if same else ["--fresh"]), "-S", ROOT, "-B", work, "-GNinja", *defines)
            stamp.write_text(place)
            run(cmake, "--build", work, "--target", "_ext")
            for file in (name, "_built.py"):
                shutil.copyfile(work / file, folder / file)

    return (
        cached("mock", (place, tree_hash("CMakeLists.txt", "cmake", "csrc", "metal")), make) / name
    )


@functools.cache
def load() -> ModuleType:
    """The module `_ext` on the mock device, beside whatever `dflash_native` has loaded."""
    import mlx.core  # noqa: F401  (first: the extension needs libmlx loaded)

    spec = importlib.util.spec_from_file_location("mock._ext", build())
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(schedule: int = 0) -> dict[str, str]:
    """The environment of a process whose `dflash_native` runs on the mock device.

    It imports the package of this checkout. `schedule` is the emulator's, one of SCHEDULES.
    """
    path = [BENCH / "mock" / "site", ROOT / "python", os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(p) for p in path if str(p)),
        "DFLASH_NATIVE_MOCK": str(build()),
        "DFLASH_METAL_SCHEDULE": str(schedule),
    }
