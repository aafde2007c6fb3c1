"""What the server has done so far, for Prometheus and for the status page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..rounds import Round
from .prefix_cache import PrefixStats

if TYPE_CHECKING:
    from .worker import Worker

_PREFIX = "dflash_native_"


class Totals:
    """Sums since the start. The worker writes them; a reader may see a round half counted."""

    def __init__(self) -> None:
        self.started = time.time()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        """Of prompts, those that were not read again."""
        self.generated_tokens = 0
        self.rounds = 0
        self.drafted_at: list[int] = []
        """Drafts made at position 1, 2, … of a block."""
        self.accepted_at: list[int] = []
        self.requests: dict[str, int] = {}
        """By how they ended: done, cancelled, failed."""
        self.cache: PrefixStats | None = None
        """Of the prefix cache, as the worker last saw it."""

    def count(self, result: Round, delivered: int) -> None:
        """Add a round of which `delivered` tokens were."""
        self.rounds += 1
        self.generated_tokens += delivered
        missing = len(result.drafts) - len(self.drafted_at)
        self.drafted_at += [0] * missing
        self.accepted_at += [0] * missing
        for i in range(len(result.drafts)):
            self.drafted_at[i] += 1
            self.accepted_at[i] += i < result.accepted

    def end(self, how: str) -> None:
        """Count a request that has ended."""
        self.requests[how] = self.requests.get(how, 0) + 1

    def as_object(self) -> dict[str, Any]:
        """For the status page."""
        left_out = ("started", "cache")
        return {name: value for name, value in vars(self).items() if name not in left_out}


class Metrics:
    """The registry behind `/metrics`: totals and the worker as they are when it is asked."""

    def __init__(self, worker: Worker) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Collected(worker))
        ProcessCollector(registry=self.registry)
        self.first_token = Histogram(
            _PREFIX + "first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
            registry=self.registry,
        )
        self.duration = Histogram(
            _PREFIX + "request_seconds",
            "From a request's arrival to the end of its answer.",
            ["path", "status"],
            buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600),
            registry=self.registry,
        )


def memory() -> dict[str, int]:
    """Bytes that MLX holds: in arrays, in its cache of buffers, and at most so far in arrays."""
    return {
        "active": mx.get_active_memory(),
        "cache": mx.get_cache_memory(),
        "peak": mx.get_peak_memory(),
    }


class _Collected(Collector):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        totals, worker = self._worker.totals, self._worker
        for name, help_text, value in (
            ("prompt_tokens", "Tokens of prompts, those from the cache included.", "prompt_tokens"),
            ("cached_tokens", "Tokens of prompts that were not read again.", "cached_tokens"),
            ("generated_tokens", "Tokens that were delivered.", "generated_tokens"),
            ("rounds", "Rounds of draft and verify, plain steps included.", "rounds"),
        ):
            yield CounterMetricFamily(_PREFIX + name, help_text, getattr(totals, value))
        for name, help_text, counts in (
            ("drafted", "Drafts by their position in the block.", totals.drafted_at),
            ("accepted", "Accepted drafts by their position in the block.", totals.accepted_at),
        ):
            family = CounterMetricFamily(_PREFIX + name, help_text, labels=["position"])
            for position, count in enumerate(list(counts), 1):
                family.add_metric([str(position)], count)
            yield family
        ended = CounterMetricFamily(_PREFIX + "requests", "Requests that ended.", labels=["how"])
        for how, count in dict(totals.requests).items():
            ended.add_metric([how], count)
        yield ended
        if totals.cache is not None:
            for name, value in asdict(totals.cache).items():
                full, told = f"{_PREFIX}cache_{name}", f"Of the prefix cache: {name}."
                if name in ("entries", "nbytes", "disk_entries", "disk_nbytes"):
                    yield GaugeMetricFamily(full, told, value)
                else:
                    yield CounterMetricFamily(full, told, value)
        yield _gauge("waiting", "Requests in the queue.", lambda: worker.waiting)
        yield _gauge("active", "Requests that are worked on.", lambda: worker.active)
        yield _gauge("worker_alive", "Whether the worker runs.", lambda: worker.fault() is None)
        yield _gauge("heartbeat_age_seconds", "Since the worker's last sign.", worker.silence)
        held = GaugeMetricFamily(_PREFIX + "memory_bytes", "MLX's memory.", labels=["kind"])
        for kind, count in memory().items():
            held.add_metric([kind], count)
        yield held


def _gauge(name: str, help_text: str, value: Callable[[], float]) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, help_text, float(value()))
