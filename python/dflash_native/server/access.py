"""The access log: one line a request, written when its answer has ended."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .jobs import Job
from .metrics import Metrics

_log = logging.getLogger("dflash_native.access")


class AccessLog:
    """Logs each request and times it for `/metrics`; its id is also in the header x-request-id."""

    def __init__(self, app: ASGIApp, metrics: Metrics, *, as_json: bool) -> None:
        self._app, self._metrics, self._as_json = app, metrics, as_json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        record: dict[str, Any] = {}
        scope["dflash_native.record"] = record
        status = 499  # the client left before there was any

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if "id" in record:
                    name = record["id"].encode()
                    message = {**message, "headers": [*message["headers"], (b"x-request-id", name)]}
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            seconds = time.monotonic() - start
            self._time(scope, record, status, seconds)
            line = _fields(scope, record, status, seconds)
            # The page asks for the status every other second.
            level = logging.DEBUG if line["path"] == "/status" else logging.INFO
            _log.log(level, json.dumps(line) if self._as_json else _plain(line))

    def _time(self, scope: Scope, record: dict[str, Any], status: int, seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "other")  # not what a client may invent
        self._metrics.duration.labels(path, str(status)).observe(seconds)
        job: Job | None = record.get("job")
        if job is not None and job.first_token is not None:
            self._metrics.first_token.observe(job.first_token - job.arrived)


def _fields(scope: Scope, record: dict[str, Any], status: int, seconds: float) -> dict[str, Any]:
    path = (scope.get("raw_path") or b"").decode("ascii", "backslashreplace")
    client = scope.get("client") or ("-", 0)
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "client": client[0],
        "method": scope["method"],
        "path": path,
        "status": status,
        "seconds": round(seconds, 3),
    }
    job: Job | None = record.get("job")
    if job is not None:
        line |= {
            "id": record["id"],
            "prompt_tokens": job.prompt_tokens,
            "cached_tokens": job.cached_tokens,
            "completion_tokens": job.completion_tokens,
            "complete": job.ended,
        }
        if job.first_token is not None:
            line["first_token_seconds"] = round(job.first_token - job.arrived, 3)
    return line


def _plain(line: dict[str, Any]) -> str:
    shown = [f"{line.pop(name)}" for name in ("time", "client", "method", "path", "status")]
    return " ".join(shown + [f"{name}={value}" for name, value in line.items()])


def set_up_logging(as_json: bool) -> None:
    """Send the server's own log to standard error and the access log to standard output."""
    for name, stream in (("access", sys.stdout), ("server", sys.stderr)):
        logger = logging.getLogger(f"dflash_native.{name}")
        handler = logging.StreamHandler(stream)
        if name == "server":
            handler.setFormatter(_JsonLines() if as_json else logging.Formatter(_FORMAT))
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


_FORMAT = "%(asctime)s %(levelname)s %(message)s"


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One object a line, the traceback inside."""
        found = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "message": record.getMessage(),
        }
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found)
