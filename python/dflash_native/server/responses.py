"""Answers from outside of the routes."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from .errors import ApiError


async def respond(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with an error."""
    response = JSONResponse(error.body, error.status_code, headers=error.headers)
    await response(scope, receive, send)
