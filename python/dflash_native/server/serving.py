"""A server's life: from the socket to the last answer."""

from __future__ import annotations

import logging
import signal
import socket
from types import FrameType

import uvicorn

from .access import set_up_logging
from .app import create_app
from .settings import Settings
from .worker import Worker

_log = logging.getLogger("dflash_native.server")
_GRACE = 5.0
"""Seconds that streams get to send their last event once the worker has ended them."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def run(worker: Worker, settings: Settings, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, then drain: what was begun has `settings.drain` seconds.

    Called on the main thread, with a worker that was started; it has ended at the return.
    """
    set_up_logging(settings.log_json)
    config = uvicorn.Config(
        create_app(worker, settings),
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # any client may send them, and the log would believe it
        timeout_graceful_shutdown=int(settings.drain + _GRACE),
    )
    server = _Server(config, worker, settings.drain)
    # uvicorn has these handlers only while it serves, and raises the signal again once it is done.
    before = {each: signal.signal(each, server.handle_exit) for each in _SIGNALS}
    try:
        server.run(sockets=[listener])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        worker.stop()
        worker.join(6 * _GRACE)  # the unit of work at hand


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Server(uvicorn.Server):
    """uvicorn's, which tells the worker of a stop at once."""

    def __init__(self, config: uvicorn.Config, worker: Worker, drain: float) -> None:
        super().__init__(config)
        self._worker, self._drain = worker, drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second Ctrl-C waits for nothing."""
        again = self.should_exit and sig == signal.SIGINT
        left = self._worker.active + self._worker.waiting
        if left and not again:
            _log.info("stopping: open requests have %g s (%d left)", self._drain, left)
        self._worker.stop(0.0 if again else self._drain)
        super().handle_exit(sig, frame)
