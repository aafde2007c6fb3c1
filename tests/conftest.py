"""Every kernel test runs on the backends that are present: the CPU, and a GPU where MLX sees one.

`python -m tests.metal mock python -m pytest ...` runs them on the mock Metal device instead, which
MLX takes for the CPU and which behaves as a GPU.
"""

from __future__ import annotations

import os

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on CUDA MLX's fp32 products have 10 bits otherwise

import mlx.core as mx
import pytest

if "DFLASH_NATIVE_MOCK" in os.environ:
    BACKENDS = {"mock": mx.cpu}
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
