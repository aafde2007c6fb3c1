"""What an installation contains, and what the import says when it does not fit."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from fnmatch import fnmatch
from types import SimpleNamespace

import mlx.core as mx
import pytest

import dflash_native
from dflash_native import _native


@pytest.fixture(scope="module")
def distribution():
    try:
        return importlib.metadata.distribution("dflash-native")
    except importlib.metadata.PackageNotFoundError:
        if os.environ.get("CI"):
            raise
        pytest.skip("dflash-native is not installed here, only importable")


def test_the_installation_has_its_native_and_data_files(distribution):
    """A wheel from a stale cache installed no native file, elsewhere."""
    files = {str(file) for file in distribution.files}
    native = [file for file in files if fnmatch(file, "dflash_native/_ext.*.so")]
    assert len(native) == 1, files
    for part in ("_ext.pyi", "_built.py", "py.typed", "demo/target/model.safetensors"):
        assert f"dflash_native/{part}" in files
    for part in ("demo/draft/model.safetensors", "demo/MODEL_CARD.md", "demo/prompts.txt"):
        assert f"dflash_native/{part}" in files
    assert not [file for file in files if file.startswith(("tests/", "bench/", "csrc/"))]
    assert distribution.version == dflash_native.__version__


def test_it_imports_from_another_folder(distribution, tmp_path):
    program = (
        "import dflash_native, mlx.core as mx;"
        "window = dflash_native.ops.conv_window(mx.zeros((1,3,4)), mx.ones((1,2,4)), [2]);"
        "print(window.sum().item())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "8.0"


def test_the_operations_do_not_load_mlx_lm():
    """Whoever embeds the kernels alone pays for nothing else."""
    program = "import dflash_native, sys; print([m for m in sys.modules if 'mlx_lm' in m])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_another_mlx_is_refused_with_both_versions_and_the_repair():
    """Measured elsewhere: another pair imports, and then every call fails with "incompatible"."""
    message = r"built for mlx 0\.31\.2 but mlx 9\.9 .*pip install mlx=="
    with pytest.raises(ImportError, match=message):
        _native.check_versions("0.31.2", "9.9")
    _native.check_versions(mx.__version__, mx.__version__)


def test_versions_are_compared_before_the_extension_is_loaded(monkeypatch):
    """With another libmlx the extension may not even load: that error names no version."""
    loaded = []
    real = _native.importlib.import_module

    def importing(name):
        loaded.append(name)
        return real(name)

    monkeypatch.setattr(_native.importlib, "import_module", importing)
    monkeypatch.setattr(_native, "MLX_VERSION", "9.9")
    with pytest.raises(ImportError, match=r"built for mlx \d.* but mlx 9\.9 is installed"):
        _native.load()
    assert loaded == ["dflash_native._built"]
    monkeypatch.undo()
    assert _native.extension.MLX_VERSION == mx.__version__


def test_foreign_types_are_noticed_at_import():
    def refuse(x):
        raise TypeError("incompatible function arguments")

    foreign = SimpleNamespace(round_trip=refuse, NANOBIND_VERSION="2.9", MLX_VERSION="0.32.4")
    with pytest.raises(ImportError, match=r"nanobind 2\.9, which does not share types with mlx"):
        _native.check_round_trip(foreign)
    _native.check_round_trip(_native.extension)


def test_every_public_name_is_there():
    for name in dflash_native.__all__:
        assert getattr(dflash_native, name) is not None
    assert set(dflash_native.__all__) <= set(dir(dflash_native))
    importlib.import_module("dflash_native.generation")  # takes the place of no public name
    assert callable(dflash_native.generate) and callable(dflash_native.stream_generate)
    assert dflash_native.__build__["backend"] in {"cpu", "cuda", "metal"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dflash_native.nothing
