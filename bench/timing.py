"""What the benchmarks share: interleaved timing, what memory allows at best, percentiles."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np

from dflash_native import _native

Call = Callable[[int], object]
"""Queues as many independent calls, and returns what has to be evaluated."""

Progress = Callable[[str], None]
"""Told what is being done."""

on_cpu = mx.default_device() == mx.cpu


def seconds(call: Call, count: int) -> float:
    """Of `count` calls in one evaluation, for each, from an idle device to an idle device."""
    mx.synchronize()
    start = time.perf_counter()
    mx.eval(call(count))
    mx.synchronize()
    return (time.perf_counter() - start) / count


def interleave(
    variants: Mapping[str, Call],
    repeats: int,
    queue: int | Mapping[str, int],
    most_seconds: float = math.inf,
) -> dict[str, list[float]]:
    """Seconds of each variant, round by round, after two rounds to warm up.

    `queue` calls are evaluated together, a number for all or one for each. After `most_seconds` no
    round but the third is begun.
    """
    queues = queue if isinstance(queue, Mapping) else dict.fromkeys(variants, queue)
    times: dict[str, list[float]] = {name: [] for name in variants}
    start = time.perf_counter()
    for round_ in range(repeats + 2):
        if round_ >= 5 and time.perf_counter() - start > most_seconds:
            break
        for name, call in variants.items():
            took = seconds(call, queues[name])
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


def bootstrap(groups: Sequence[Sequence[float]], trials: int = 2000) -> tuple[float, float, float]:
    """The geometric mean of positive ratios with its 95 % interval: low, mean, high.

    A trial draws groups (prompts) with replacement and within each its values (repeats), so the
    interval covers other prompts of this kind, not only other runs of these.
    """
    random = np.random.default_rng(0)
    logs = [np.log(group) for group in groups]

    def trial() -> float:
        drawn = (logs[at] for at in random.integers(len(logs), size=len(logs)))
        return float(np.mean([random.choice(group, len(group)).mean() for group in drawn]))

    low, high = np.percentile([trial() for _ in range(trials)], [2.5, 97.5])
    mean = np.mean([group.mean() for group in logs])
    return float(np.exp(low)), float(np.exp(mean)), float(np.exp(high))


_POOL = ThreadPoolExecutor(_native.extension.cpu_threads())


def on_all_threads(function: Callable[..., object], *memory: np.ndarray) -> None:
    """Calls `function` with a part of each array on as many threads as the kernels have."""
    parts = [np.array_split(each, _native.extension.cpu_threads()) for each in memory]
    list(_POOL.map(function, *parts))


def read_or_copy(size: int, queue: int) -> Call:
    """The floor that memory sets for `size` bytes a call: on a CPU a read of them, on a GPU a copy
    that reads half of them and writes as much. Each call has its own memory.
    """
    if on_cpu:
        blocks = [np.ones(max(1, size // 4), np.int32) for _ in range(queue)]

        def read(count: int) -> None:
            for block in blocks[:count]:
                on_all_threads(np.max, block)

        return read
    sources = [mx.ones((max(1, size // 4),), dtype=mx.float16) for _ in range(queue)]
    mx.eval(sources)
    return lambda count: [x + 0 for x in sources[:count]]


def rotation(size: int, least: int = 1) -> int:
    """How many sets of `size` bytes fill the last-level cache four times (CPU 32 MB, GPU 50 MB).

    At most 256 sets, and no more than 8 GB of them or an eighth of the machine's memory.
    """
    cache = 32e6 if on_cpu else 50e6
    launches = 1 if on_cpu else 8  # of a GPU at once, so that the host's time does not count
    wanted = max(least, launches, int(-(-4 * cache // max(1, size))))
    most = min(8e9, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 8)
    return max(1, min(wanted, 256, int(most // max(1, size))))
