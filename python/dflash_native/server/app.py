"""The application: routes, and what stands around them."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from .. import __version__
from .access import AccessLog
from .errors import ApiError, error_body
from .limits import BodyLimit
from .metrics import Metrics
from .routes import Server, router
from .security import Doors
from .settings import Settings
from .validation import invalid
from .worker import Worker

_log = logging.getLogger("dflash_native.server")


def create_app(worker: Worker, settings: Settings) -> ASGIApp:
    """The server as an ASGI application over a worker that was started.

    It takes no part in the worker's life: whoever started it stops it.
    """
    metrics = Metrics(worker)
    # Without the pages of documentation: they load scripts from elsewhere.
    app = FastAPI(title="dflash-native", version=__version__, docs_url=None, redoc_url=None)
    app.include_router(router(Server(worker, settings, metrics)))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _failure)
    inner: ASGIApp = BodyLimit(app, settings.max_body_bytes)
    inner = Doors(inner, settings)
    if settings.cors_origins:
        inner = CORSMiddleware(
            inner,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return AccessLog(inner, metrics, as_json=settings.log_json)


async def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status_code, headers=error.headers)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path}"
    message = {404: f"there is no {place} here", 405: f"{place} is not possible"}.get(
        error.status_code, str(error.detail)
    )
    body = error_body(error.status_code, message)
    return JSONResponse(body, error.status_code, headers=error.headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return await _api_error(request, invalid(error))


async def _failure(request: Request, error: Exception) -> JSONResponse:
    _log.error("a request failed", exc_info=error)
    return JSONResponse(error_body(500, "the server failed at this request"), 500)
