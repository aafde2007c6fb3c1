"""The doctor: what it says is so, and an operation that computes something else does not pass."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

import dflash_native
from dflash_native import doctor, ops


def scaled(operation, factor):
    """The operation with its first result off by a factor."""

    def wrong(*args, **kwargs):
        result = operation(*args, **kwargs)
        if isinstance(result, tuple):
            return (result[0] * factor, *result[1:])
        return result * factor

    return wrong


def outcome():
    """Whether each operation passed in every dtype."""
    passed = {}
    for check in doctor.self_test():
        passed[check.operation] = passed.get(check.operation, True) and check.passed
    return passed


def test_every_operation_is_tested(backend):
    checks = list(doctor.self_test())
    assert [check for check in checks if not check.passed] == []
    expected = {
        (name, dtype)
        for name in (*doctor.OPERATIONS, "rollback", "width")
        for dtype in ("float32", "float16", "bfloat16")
    }
    assert {(check.operation, check.dtype) for check in checks} == expected
    assert {"gated_delta_verify", "kv_write"} <= set(doctor.OPERATIONS)


@pytest.mark.parametrize("operation", doctor.OPERATIONS)
def test_a_wrong_operation_fails(operation, monkeypatch):
    monkeypatch.setattr(ops, operation, scaled(getattr(ops, operation), 1.5))
    passed = outcome()
    assert not passed[operation]
    untouched = {name for name in doctor.OPERATIONS if name != operation}
    assert all(passed[name] for name in untouched)


def test_the_last_bit_counts_in_a_rollback(monkeypatch):
    monkeypatch.setattr(ops, "gated_delta_replay", scaled(ops.gated_delta_replay, 1 + 2.0**-23))
    passed = outcome()
    assert passed["gated_delta_replay"]  # within the tolerance of another order of sums
    assert not passed["rollback"]


def test_the_last_bit_counts_in_a_width(backend, monkeypatch):
    exact = ops.verify_matmul

    def wider(x, *args, **kwargs):
        return exact(x, *args, **kwargs) * (1 if x.shape[0] == 1 else 1 + 2.0**-23)

    monkeypatch.setattr(ops, "verify_matmul", wider)
    passed = {(check.operation, check.dtype): check.passed for check in doctor.self_test()}
    assert passed["verify_matmul", "float32"] and not passed["width", "float32"]


@pytest.mark.parametrize(
    ("result", "detail"),
    [
        (lambda cache: cache * mx.nan, "not finite"),
        (lambda cache: cache[:, :, :-1], "expected (2, 3, 16, 32)"),
        (lambda cache: 1 / 0, "division by zero"),
    ],
    ids=["nan", "shape", "raises"],
)
def test_what_has_no_error_is_told(result, detail, monkeypatch):
    monkeypatch.setattr(ops, "kv_write", lambda cache, new, lengths: result(cache))
    checks = [check for check in doctor.self_test() if check.operation == "kv_write"]
    assert all(not check.passed and check.error is None for check in checks)
    assert all(detail in check.detail for check in checks)


def test_backend_follows_the_default_device(backend):
    assert (doctor.backend() == "cpu") == (backend == "cpu")
    assert doctor.build_info()["backend"] == doctor.backend()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_libmlx_is_the_loaded_one():
    (found,) = doctor.loaded_libraries("libmlx.")
    assert Path(found).samefile(Path(mx.__file__).parent / "lib" / "libmlx.so")
    assert doctor.loaded_libraries("libnot_there") == []


class Foreign:
    """A function that takes attributes, as those of ctypes do."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)


def test_images_of_dyld(monkeypatch):
    images = [b"/usr/lib/libSystem.B.dylib", b"/site/mlx/lib/libmlx.dylib"]
    dyld = SimpleNamespace(
        _dyld_image_count=Foreign(lambda: len(images)),
        _dyld_get_image_name=Foreign(images.__getitem__),
    )
    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name: dyld)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert doctor.loaded_libraries("libmlx.") == ["/site/mlx/lib/libmlx.dylib"]


def test_kernels_of_each_backend(monkeypatch):
    found = {}
    for name in ("cpu", "cuda", "metal"):
        monkeypatch.setattr(doctor, "backend", lambda name=name: name)
        found[name] = doctor.kernels()
        assert set(found[name]) == {*doctor.OPERATIONS, "attention", "matmul"}
    extension = doctor.extension
    assert extension.cpu_isa() in found["cpu"]["gated_delta_verify"]
    assert str(extension.cpu_threads()) in found["cpu"]["gated_delta_verify"]
    assert "compiled by NVRTC" in found["cuda"]["gated_delta_verify"]
    assert "slice_update" in found["cuda"]["kv_write"]
    assert extension.shader_hash() in found["metal"]["kv_write"]
    assert "for prompts and with exact=False MLX's" in found["cuda"]["matmul"]


@pytest.mark.parametrize("source", ["/site/dflash_native.metallib", "compiled on first use"])
def test_source_of_the_metal_kernels(source, monkeypatch):
    monkeypatch.setattr(doctor, "backend", lambda: "metal")
    stub = SimpleNamespace(shader_hash=lambda: "abc", metal_kernel_source=lambda: source)
    monkeypatch.setattr(doctor, "extension", stub)
    found = doctor.kernels()["gated_delta_step"]
    assert source in found
    assert ("metallib" in found) == source.endswith("metallib")


def test_build_info_is_exported():
    info = doctor.build_info()
    assert json.loads(json.dumps(info)) == info
    assert dflash_native.__build__ == info
    assert info["built_for_mlx"] == info["versions"]["mlx"] == mx.__version__


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instruction sets of x86-64")
def test_environment_shows():
    code = "import dflash_native, json; print(json.dumps(dflash_native.__build__))"
    wanted = {
        "DFLASH_NATIVE_ISA": "baseline",
        "DFLASH_NATIVE_NUM_THREADS": "1",
        "DFLASH_NATIVE_TILES": "matmul=1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | wanted | {"DFLASH_NATIVE_DEVICE": "ignored"},
        capture_output=True,
        check=True,
    )
    info = json.loads(done.stdout)
    assert info["environment"] == wanted
    if info["backend"] == "cpu":
        assert info["kernels"]["gated_delta_step"] == "native C++, baseline, up to 1 thread"
