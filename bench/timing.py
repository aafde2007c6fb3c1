"""What the benchmarks share: interleaved timing, the floor that memory sets, the header."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np

from dflash_native import _native

Call = Callable[[int], object]
"""Queues as many independent calls, and returns what has to be evaluated."""

on_cpu = mx.default_device() == mx.cpu


def seconds(call: Call, count: int) -> float:
    """Of `count` calls in one evaluation, for each, from an idle device to an idle device."""
    mx.synchronize()
    start = time.perf_counter()
    mx.eval(call(count))
    mx.synchronize()
    return (time.perf_counter() - start) / count


def interleave(variants: dict[str, Call], repeats: int, queue: int) -> dict[str, list[float]]:
    """Seconds of each variant, round by round, after two rounds to warm up."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(repeats + 2):
        for name, call in variants.items():
            took = seconds(call, queue)
            if round_ >= 2:
                times[name].append(took)
    return times


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """10th, 50th and 90th."""
    low, middle, high = np.percentile(values, [10, 50, 90]).tolist()
    return low, middle, high


def ratios(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Percentiles of the ratio of two variants, round by round."""
    return percentiles([a / b for a, b in zip(above, below, strict=True)])


_POOL = ThreadPoolExecutor(_native.extension.cpu_threads())


def plain_read(memory: np.ndarray) -> None:
    """Read an array of int32 with as many threads as the kernels have (a vectorised maximum)."""
    list(_POOL.map(np.max, np.array_split(memory, _native.extension.cpu_threads())))


def read_or_copy(size: int, queue: int) -> Call:
    """The floor that memory sets for `size` bytes a call: on a CPU a read of them, on a GPU a copy
    that reads half of them and writes as much. Each call has its own memory.
    """
    if on_cpu:
        blocks = [np.ones(size // 4, np.int32) for _ in range(queue)]

        def read(count: int) -> None:
            for block in blocks[:count]:
                plain_read(block)

        return read
    sources = [mx.ones((size // 4,), dtype=mx.float16) for _ in range(queue)]
    mx.eval(sources)
    return lambda count: [x + 0 for x in sources[:count]]


def rotation(size: int, least: int = 1) -> int:
    """How many sets of `size` bytes fill the last-level cache four times (CPU 32 MB, GPU 50 MB)."""
    cache = 32e6 if on_cpu else 50e6
    launches = 1 if on_cpu else 8  # of a GPU at once, so that the host's time does not count
    return max(least, launches, int(-(-4 * cache // size)))


def header(**more: object) -> dict[str, object]:
    """Machine, backend, versions, and what else a benchmark has to say of its run."""
    device = mx.default_device()
    info = mx.device_info(device)
    return {
        "device": str(device.type).rpartition(".")[2],
        "device_name": str(info.get("device_name", platform.processor() or platform.machine())),
        "cpu_isa": _native.extension.cpu_isa(),
        "cpu_threads": _native.extension.cpu_threads(),
        "python": platform.python_version(),
        "mlx": mx.__version__,
        "libmlx": mx.__file__,
        "shaders": _native.extension.shader_hash(),
        **more,
    }


def print_header(**more: object) -> None:
    print(" ".join(f"{key}={value}" for key, value in header(**more).items()))
