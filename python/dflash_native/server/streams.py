"""A job's events on their way to one client, and what happens when the client goes away."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .answers import Answer
from .errors import error_body
from .jobs import Choice, Done, Event, Failed, Job, Piece, Progress

_KEEPALIVE = 10.0
"""Seconds of silence after which a stream gets a comment, so that nothing between closes it."""
_LAST_WORD = 5.0
"""Seconds beyond a request's time in which its client may read the end."""
_log = logging.getLogger("dflash_native.server")


class Exchange:
    """One job's events in order; it ends with Done or Failed, or with the client's departure."""

    def __init__(self, choices: Sequence[Choice], timeout: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self.job = Job(choices, timeout, self._deliver)
        self.gone = False
        """Whether the client has left."""
        self._watch: asyncio.Task[None] | None = None

    def _deliver(self, event: Event) -> None:
        """On the worker's thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop is closed: nobody is there any more
            self.job.cancel()

    def watch(self, receive: Receive) -> None:
        """Cancel the job as soon as the client leaves. The body must have been read."""

        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone = True
            self.close()
            self._events.put_nowait(None)

        self._watch = asyncio.create_task(leave())

    async def next(self, timeout: float | None = None) -> Event | None:
        """The next event, or None once the client has left. Raises TimeoutError."""
        event = await asyncio.wait_for(self._events.get(), timeout)
        return None if self.gone else event

    def close(self) -> None:
        """Nobody waits any more. Safe to repeat."""
        self.job.cancel()
        if self._watch is not None and self._watch is not asyncio.current_task():
            self._watch.cancel()


class EventStream(Response):
    """Server-sent events of an exchange: one terminal chunk a choice, and `[DONE]` or one error."""

    media_type = "text/event-stream"

    def __init__(
        self, exchange: Exchange, answer: Answer, first: Event, *, include_usage: bool
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._exchange, self._answer, self._first = exchange, answer, first
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the job ends or the client leaves."""
        try:
            async with asyncio.timeout(self._exchange.job.deadline - time.monotonic() + _LAST_WORD):
                await self._send(send)
        except TimeoutError:
            _log.warning("a stream was left unfinished: its client reads too slowly")
        finally:
            self._exchange.close()

    async def _send(self, send: Send) -> None:
        """Each `send` waits for a client that does not read."""
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for text in self._texts():
            body = text.encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _texts(self) -> AsyncIterator[str]:
        exchange, answer = self._exchange, self._answer
        event: Event | None = self._first
        opened: set[int] = set()
        while event is not None:
            if isinstance(event, Piece):
                if event.choice not in opened:
                    opened.add(event.choice)
                    if (opening := answer.opening(event.choice)) is not None:
                        yield self._data(opening)
                yield self._data(answer.chunk(event))
            elif isinstance(event, Done):
                if self._include_usage:
                    yield _event(answer.closing(exchange.job))
                yield "data: [DONE]\n\n"
                return
            elif isinstance(event, Failed):
                yield _event(error_body(event.status, event.message, code=event.code))
                return
            elif isinstance(event, Progress):
                yield f": {event.done} of {event.total} prompt tokens\n\n"
            while True:
                try:
                    event = await exchange.next(_KEEPALIVE)
                    break
                except TimeoutError:
                    yield ": waiting\n\n"

    def _data(self, chunk: dict[str, Any]) -> str:
        if self._include_usage:
            chunk["usage"] = None
        return _event(chunk)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
