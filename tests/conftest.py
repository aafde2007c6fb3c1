"""Every kernel test runs on the backends that are present: the CPU, and a GPU where MLX sees one.

`python -m tests.metal mock python -m pytest ...` runs them on the mock Metal device instead, which
MLX takes for the CPU and which behaves as a GPU.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter

os.environ.setdefault("DFLASH_NATIVE_CACHE", tempfile.mkdtemp(prefix="dflash-native-"))
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on CUDA MLX's fp32 products have 10 bits otherwise

import mlx.core as mx
import pytest

from dflash_native import modules

if "DFLASH_NATIVE_MOCK" in os.environ:
    BACKENDS = {"mock": mx.cpu}
    modules.Products._pack = lambda self, *layers: None  # as on a GPU
else:
    BACKENDS = {"cpu": mx.cpu} | ({"gpu": mx.gpu} if mx.is_available(mx.gpu) else {})


@pytest.fixture(params=list(BACKENDS))
def backend(request):
    """Name of the backend that is MLX's default device during the test."""
    before = mx.default_device()
    mx.set_default_device(BACKENDS[request.param])
    mx.random.seed(0)
    yield request.param
    mx.set_default_device(before)


@pytest.fixture
def cpu():
    """The CPU is MLX's default device; where the mock device stands for it the test is skipped."""
    if "cpu" not in BACKENDS:
        pytest.skip("of the CPU's kernels")
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def pytest_addoption(parser):
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="of each test's cases the first and every Nth after it",
    )


def pytest_collection_modifyitems(config, items):
    every = config.getoption("--every")
    seen, chosen, left_out = Counter(), [], []
    for item in items:
        name = item.nodeid.partition("[")[0]
        (left_out if seen[name] % every else chosen).append(item)
        seen[name] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen
