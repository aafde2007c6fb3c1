"""The wheel for macOS passes its audit, and the audit notices what is wrong with another."""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from . import audit, macho, macos
from .audit import EXTENSION, RPATH, TAG
from .tools import ROOT, SHADERS, BenchError, python_program, run

Files = dict[str, bytes]


def failed(path: Path) -> set[str]:
    return {name for name, (passed, _) in audit.audit(path).items() if not passed}


def test_the_wheel_passes(macos_wheel: Path) -> None:
    results = audit.audit(macos_wheel)
    assert len(results) == len(audit.CHECKS) and failed(macos_wheel) == set(), results


def replaced(file: str, old: bytes, new: bytes) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        (name,) = (name for name in files if name.endswith(file))
        assert len(old) == len(new) and old in files[name], old
        files[name] = files[name].replace(old, new)

    return change


def damaged(offset_of: Callable[[bytes], int]) -> Callable[[Files], None]:
    """One bit of the extension is another."""

    def change(files: Files) -> None:
        content = bytearray(files[EXTENSION])
        content[offset_of(bytes(content))] ^= 1
        files[EXTENSION] = bytes(content)

    return change


def without(file: str) -> Callable[[Files], None]:
    return lambda files: files.__delitem__(file)


def with_another(file: str) -> Callable[[Files], None]:
    return lambda files: files.update({file: b""})


FAULTS: dict[str, tuple[Callable[[Files], None], set[str]]] = {
    "no _built.py": (
        lambda files: files.pop("dflash_native/_built.py") and None,
        {"files", "version of mlx"},
    ),
    "a bit of a hash in the signature": (damaged(lambda x: len(x) - 100), {"signature"}),
    "a bit of the code": (damaged(lambda x: 200_000), {"signature"}),
    "another rpath": (
        replaced(EXTENSION, RPATH.encode(), RPATH.replace("lib", "bin").encode()),
        {"rpath", "signature"},
    ),
    "a symbol that libmlx lacks": (
        replaced(EXTENSION, b"__ZN3mlx4core10contiguousE", b"__ZN3mlx4core10contiguouzE"),
        {"imports", "signature"},
    ),
    "a symbol that libc++ lacks": (
        replaced(EXTENSION, b"__ZNSt3__16thread6detachEv", b"__ZNSt3__16thread6detachEw"),
        {"imports", "signature"},
    ),
    "a symbol that libSystem lacks": (
        replaced(EXTENSION, b"\0_strtol\0", b"\0_strto7\0"),
        {"imports", "signature"},
    ),
    "a symbol that Python lacks": (
        replaced(EXTENSION, b"\0_PyErr_Clear\0", b"\0_PyErr_Cleaz\0"),
        {"imports", "signature"},
    ),
    "a library that MLX does without": (
        replaced(EXTENSION, b"/usr/lib/libobjc.A.dylib", b"/usr/lib/libobjc.B.dylib"),
        {"libraries", "imports", "signature"},
    ),
    "another minimum version": (
        replaced(EXTENSION, b"\1\0\0\0\0\0\x0e\0", b"\1\0\0\0\0\0\x0f\0"),
        {"minimum os", "signature"},
    ),
    "another ABI of nanobind": (
        replaced(EXTENSION, b"libcpp_abi1_a1_v22", b"libcpp_abi1_a1_v21"),
        {"nanobind", "signature"},
    ),
    "another domain of nanobind": (
        replaced(EXTENSION, b"\0mlx\0", b"\0mly\0"),
        {"nanobind", "signature"},
    ),
    "another shader": (
        replaced(EXTENSION, b"threadgroup_barrier(", b"threadgroup_carrier("),
        {"shaders", "signature"},
    ),
    "another tag in WHEEL": (replaced("/WHEEL", TAG.encode(), TAG[:-1].encode() + b"5"), {"tag"}),
    "another version of mlx": (
        replaced("/_built.py", macos.MLX_VERSION.encode(), macos.MLX_VERSION[:-1].encode() + b"x"),
        {"version of mlx"},
    ),
    "a module lost": (without("dflash_native/tape.py"), {"files"}),
    "a file too many": (with_another("dflash_native/_ext.so"), {"files"}),
}


def rewritten(wheel: Path, out: Path, change: Callable[[Files], None]) -> Path:
    """The same wheel with other files, RECORD as it has to be then."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files)
    (record,) = (name for name in files if name.endswith("/RECORD"))
    del files[record]
    rows = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows += f"{name},sha256={digest},{len(data)}\n"
    files[record] = f"{rows}{record},,\n".encode()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out


@pytest.mark.parametrize("name", FAULTS)
def test_the_audit_notices(name: str, macos_wheel: Path, tmp_path: Path) -> None:
    change, noticed = FAULTS[name]
    assert failed(rewritten(macos_wheel, tmp_path / macos_wheel.name, change)) == noticed


def test_the_audit_notices_a_file_name_and_a_record(macos_wheel: Path, tmp_path: Path) -> None:
    other = tmp_path / macos_wheel.name.replace("macosx_14_0", "macosx_13_0")
    assert failed(rewritten(macos_wheel, other, lambda files: None)) == {"tag"}
    with zipfile.ZipFile(macos_wheel) as archive, zipfile.ZipFile(other, "w") as out:
        for name in archive.namelist():
            data = archive.read(name)
            out.writestr(name, data + b"#" if name.endswith("tape.py") else data)
    assert failed(other) == {"tag", "record"}


def test_a_file_that_is_no_extension(macos_wheel: Path, tmp_path: Path) -> None:
    def linux(files: Files) -> None:
        files[EXTENSION] = b"\x7fELF" + bytes(100)

    path = rewritten(macos_wheel, tmp_path / macos_wheel.name, linux)
    with pytest.raises(BenchError, match="expected a Mach-O file for arm64"):
        audit.audit(path)


XCRUN = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
while [ $# -gt 0 ]; do
  case $1 in
    -o) : > "$2" ;;
    -MF) dependencies=$2 ;;
    -MT) echo "$2:" > "$dependencies" ;;
  esac
  shift
done
"""


@pytest.mark.parametrize("works", [True, False])
def test_a_metallib_is_built_where_xcodes_metal_works(
    works: bool, macos_wheel: Path, tmp_path: Path
) -> None:
    """A stand-in for `xcrun`: what CMake asks of it, and that the metallib is installed."""
    program = tmp_path / "xcrun"
    program.write_text(XCRUN if works else "#!/bin/sh\nexit 72\n")
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    cmake, build = python_program("cmake"), tmp_path / "build"
    defines = [f"-D{key}={value}" for key, value in macos.defines().items()]
    ninja = f"-DCMAKE_MAKE_PROGRAM={python_program('ninja')}"
    run(cmake, "-S", ROOT, "-B", build, "-GNinja", ninja, *defines, env=environment)
    target = "dflash_native_metallib"
    if not works:
        with pytest.raises(BenchError, match=f"unknown target '{target}'"):
            run(cmake, "--build", build, "--target", target, env=environment)
        return
    run(cmake, "--build", build, "--target", target, env=environment)
    lines = (tmp_path / "calls").read_text().splitlines()
    *_, link = calls = [line for line in lines if " -o " in line]
    compiled = {Path(word).name for call in calls for word in call.split() if "/metal/" in word}
    assert compiled == {file.name for file in SHADERS.glob("*.metal")}
    assert all("-mmacosx-version-min=14.0" in call for call in calls)
    assert link.endswith("dflash_native.metallib") and (build / "dflash_native.metallib").exists()
    assert "dflash_native.metallib" in (build / "cmake_install.cmake").read_text()


def test_what_apple_signed_verifies(macos_wheel: Path) -> None:
    """The check of signatures, on what Apple's linker signed."""
    for path in macos.mlx_binaries():
        assert macho.verify_signature(macho.read(path)).startswith("ad hoc, the hashes of")
