"""The one thread that owns the models, and the queue before it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator

import mlx.core as mx

from .choices import Engine, work
from .jobs import Done, Failed, Job
from .metrics import Totals

Steps = Generator[None, None, None]
_log = logging.getLogger("dflash_native.server")

STALLED = 120.0
"""Seconds without a sign of the worker after which it counts as dead. A unit of work is one round
or one piece of a prompt."""
RETRY_AFTER = 2
"""Seconds that a client is asked to wait where the queue is full."""


class Refused(Exception):
    """A job that was not taken: the queue is full, or the worker has ended or is about to."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.message, self.code = message, code


class Worker:
    """Runs jobs: up to `parallel` in turn, a unit of work each; the others wait as they came.

    Args:
        load: makes the engine, on the worker's thread: MLX's streams belong to a thread.
        parallel: jobs that are worked on in turn.
        queue: jobs that may wait.
    """

    def __init__(self, load: Callable[[], Engine], *, parallel: int = 4, queue: int = 32) -> None:
        self.totals = Totals()
        self.engine: Engine | None = None
        """Once it is loaded."""
        self._load = load
        self._parallel, self._queue = parallel, queue
        self._waiting: deque[Job] = deque()
        self._turn: deque[tuple[Job, Steps]] = deque()
        self._at_hand: Job | None = None
        self._changed = threading.Condition()
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._stop_at: float | None = None
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="dflash-native worker", daemon=True)

    def start(self) -> Engine:
        """Load, wait until that is done, and begin. Raises what `load` raises."""
        self._thread.start()
        self._ready.wait()
        if self.engine is None:
            self._thread.join()  # MLX can abort a process that ends before its threads
            assert self._error is not None
            raise self._error
        return self.engine

    def submit(self, job: Job) -> None:
        """Take a job. Raises Refused."""
        with self._changed:
            if self.fault() is not None:
                raise Refused("the worker has ended; the server must be restarted", "worker_dead")
            if self._stop_at is not None:
                raise Refused("the server is shutting down", "shutting_down")
            # The free places of the turn are not a part of the queue.
            free = self._parallel - self.active
            if self.waiting >= self._queue + free:
                raise Refused(f"{self.waiting} requests are waiting already", "queue_full")
            self._waiting.append(job)
            self._changed.notify()

    def stop(self, drain: float = 0.0) -> None:
        """Take no more jobs, and give those that are here `drain` seconds to end."""
        with self._changed:
            at = time.monotonic() + drain
            self._stop_at = at if self._stop_at is None else min(at, self._stop_at)
            self._changed.notify()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout)

    @property
    def waiting(self) -> int:
        """Jobs in the queue, without those that nobody waits for any more."""
        return sum(not job.cancelled for job in list(self._waiting))

    @property
    def active(self) -> int:
        """Jobs that are worked on."""
        return len(self._turn) + (self._at_hand is not None)

    @property
    def stopping(self) -> bool:
        """Whether no more jobs are taken."""
        return self._stop_at is not None

    def silence(self) -> float:
        """Seconds since the worker's last sign."""
        return time.monotonic() - self._beat

    def fault(self) -> str | None:
        """Why nothing is worked on any more, or None."""
        if self._error is not None:
            return "the worker has ended"
        if self._ready.is_set() and not self._thread.is_alive() and self._stop_at is None:
            return "the worker has ended"
        if self.silence() > STALLED:
            return f"the worker has given no sign for {self.silence():.0f} seconds"
        return None

    def _run(self) -> None:
        try:
            self.engine = self._load()
            self._beat = time.monotonic()
            self._ready.set()
            while self._take_turns():
                pass
        except BaseException as error:  # whatever it is, nobody may wait for this thread any more
            self._error = error
            if self.engine is not None:
                _log.exception("the worker has ended")
        finally:
            self._ready.set()
            self._leave()
            mx.clear_streams()  # without it MLX can abort when the process ends

    def _take_turns(self) -> bool:
        """One unit of work, or a wait for one. False once the worker shall end."""
        with self._changed:
            self._beat = time.monotonic()
            if self._stop_at is not None:
                idle = not (self._turn or self._waiting)
                if idle or time.monotonic() >= self._stop_at:
                    return False
            for job in [each for each in self._waiting if self._is_over(each)]:
                self._waiting.remove(job)
            if not (self._turn or self._waiting):
                self._changed.wait(1.0)
                return True
            while self._waiting and len(self._turn) < self._parallel:
                job = self._waiting.popleft()
                assert self.engine is not None
                self._turn.append((job, work(self.engine, job, self.totals)))
            job, steps = self._turn.popleft()
            self._at_hand = job
        goes_on = self._advance(job, steps)
        with self._changed:
            if goes_on:
                self._turn.append((job, steps))
            self._at_hand = None
        return True

    def _is_over(self, job: Job) -> bool:
        """Whether a job was left by its client, or had its time; it is ended then."""
        if not job.cancelled and time.monotonic() <= job.deadline:
            return False
        self.totals.end("cancelled" if job.cancelled else "failed")
        job.send(Failed(504, "the request took longer than the server allows", "timeout"))
        return True

    def _advance(self, job: Job, steps: Steps) -> bool:
        """A unit of work of a job; False where it was the last one."""
        try:
            if self._is_over(job):
                steps.close()
                return False
            next(steps)
            return True
        except StopIteration:
            self.totals.end("done")
            job.send(Done())
        except Exception:  # this job is over, the others go on
            _log.exception("a request failed")
            self.totals.end("failed")
            job.send(Failed(500, "the server failed at this request", "internal_error"))
        return False

    def _leave(self) -> None:
        """End every job that is left."""
        dead = self._error is not None
        message = "the worker has ended" if dead else "the server is shutting down"
        code = "worker_dead" if dead else "shutting_down"
        with self._changed:
            if self._stop_at is None:
                self._stop_at = time.monotonic()
            left = [*([self._at_hand] if self._at_hand else []), *(job for job, _ in self._turn)]
            left += self._waiting
            open_steps = [steps for _, steps in self._turn]
            self._at_hand = None
            self._turn.clear()
            self._waiting.clear()
        for job in left:
            self.totals.end("failed")
            job.send(Failed(503, message, code))
        if not dead:
            for steps in open_steps:
                steps.close()
