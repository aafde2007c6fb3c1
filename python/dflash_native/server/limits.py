"""How much of a request is read, and for how long."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .responses import respond

BODY_SECONDS = 60.0
"""For a whole body to arrive."""


class BodyLimit:
    """413 for a body over `most` bytes, when it says so or when it gets there; 408 for a slow one.

    The connection is closed then, since the rest of the body would come. 415 for a body that is not
    called JSON: a browser sends any other kind without asking this server first. 400 for a body of
    two lengths: a proxy may take the other one, and the rest for the next request.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on; its body is counted as the route reads it."""
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        if "content-length" in headers and "transfer-encoding" in headers:
            sentence = "expected content-length or transfer-encoding but got both"
            await respond(ApiError(400, sentence, headers=_CLOSE), scope, receive, send)
            return
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            if kind != "application/json":
                raise ApiError(415, f"expected content-type application/json but got {kind!r}")
            if int(headers.get("content-length") or 0) > self._most:
                raise self._too_large()
        except ApiError as error:
            await respond(error, scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        count, reading = 0, True

        async def counted() -> Message:
            nonlocal count, reading
            if not reading:  # what comes now is the client's departure
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, "the body took too long", headers=_CLOSE) from None
            count += len(message.get("body", b""))
            reading = message["type"] == "http.request" and message.get("more_body", False)
            if count > self._most:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"expected a body of at most {self._most} bytes",
            code="body_too_large",
            headers=_CLOSE,
        )


_CLOSE = {"connection": "close"}
