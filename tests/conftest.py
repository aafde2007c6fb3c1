"""Every kernel test runs on the backends that are present: the CPU, and a GPU where MLX sees one."""

from __future__ import annotations

import mlx.core as mx
import pytest

BACKENDS = {"cpu": mx.cpu} | ({"gpu": mx.gpu} if mx.is_available(mx.gpu) else {})


@pytest.fixture(params=list(BACKENDS))
def backend(request):
    """Name of the backend that is MLX's default device during the test."""
    before = mx.default_device()
    mx.set_default_device(BACKENDS[request.param])
    mx.random.seed(0)
    yield request.param
    mx.set_default_device(before)
