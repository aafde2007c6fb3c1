"""The endpoints."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from .answers import Answer
from .errors import ApiError
from .jobs import Choice, Done, Failed, Piece
from .metrics import Metrics, memory
from .page import PAGE_HEADERS, page
from .plans import Planner
from .schema import ChatRequest, CompletionRequest, GenerationRequest
from .settings import Settings
from .streams import EventStream, Exchange
from .validation import JsonRoute
from .worker import RETRY_AFTER, Refused, Worker


class Server:
    """What the endpoints share."""

    def __init__(self, worker: Worker, settings: Settings, metrics: Metrics) -> None:
        engine = worker.engine
        assert engine is not None, "the worker was started"
        self.worker, self.settings, self.metrics = worker, settings, metrics
        self.tokenizer = engine.tokenizer
        self.draft = engine.draft_name
        self.exact = engine.target.exact
        self._planner = Planner(settings, engine.tokenizer, engine.target.vocab_size)
        self._planning = ThreadPoolExecutor(1, "dflash-native prompts")
        self._planned = 0

    async def plan(self, plan: Callable[[Planner], list[Choice]]) -> list[Choice]:
        """Templates and tokenizers take their time with long prompts, and not the loop's.

        Raises ApiError (503) where as many prompts are being read as may be worked on or wait.
        """
        most = self.settings.queue + self.settings.parallel
        if self._planned >= most:
            raise _busy(Refused(f"{self._planned} prompts are read already", "queue_full"))
        self._planned += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._planning, plan, self._planner)
        finally:
            self._planned -= 1

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for a model that is not here."""
        if name is not None and name != self.settings.name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist here; {self.settings.name!r} does",
                param="model",
                code="model_not_found",
            )

    def model(self) -> dict[str, Any]:
        """The model's entry in the list."""
        return {
            "id": self.settings.name,
            "object": "model",
            "created": int(self.worker.totals.started),
            "owned_by": "dflash-native",
            "context_length": self.settings.max_context,
        }

    def submit(self, choices: Sequence[Choice]) -> Exchange:
        """Raises ApiError (503) with Retry-After where the queue is full."""
        exchange = Exchange(choices, self.settings.timeout)
        exchange.job.exact = self.exact
        try:
            self.worker.submit(exchange.job)
        except Refused as refused:
            raise _busy(refused) from None
        return exchange


def _busy(refused: Refused) -> ApiError:
    headers = {"retry-after": str(RETRY_AFTER)}
    return ApiError(503, refused.message, code=refused.code, headers=headers)


def router(server: Server) -> APIRouter:
    """All endpoints of a server."""
    routes = APIRouter(route_class=JsonRoute)

    @routes.get("/", include_in_schema=False)
    async def status_page() -> Response:
        return Response(page(), media_type="text/html", headers=PAGE_HEADERS)

    @routes.get("/health")
    async def health() -> JSONResponse:
        """200 while the worker takes requests; its pulse, not only that of HTTP."""
        return health_of(server.worker)

    @routes.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        text = generate_latest(server.metrics.registry)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    @routes.get("/status")
    async def status() -> dict[str, Any]:
        """What the page at / shows."""
        return status_of(server)

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.model()]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return server.model()

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await _generate(server, request, body, lambda planner: planner.chat(body))

    @routes.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await _generate(server, request, body, lambda planner: planner.completion(body))

    return routes


async def _generate(
    server: Server,
    request: Request,
    body: GenerationRequest,
    plan: Callable[[Planner], list[Choice]],
) -> Response:
    server.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "[stream_options] expected stream=true with it", param="stream_options")
    options = body.stream_options
    choices = await server.plan(plan)
    exchange = server.submit(choices)
    record = request.scope.get("dflash_native.record", {})
    record["job"] = exchange.job
    answer = Answer(
        server.tokenizer,
        server.settings.name,
        chat=isinstance(body, ChatRequest),
        marks=options is not None and options.include_speculation,
    )
    record["id"] = answer.id
    exchange.watch(request.receive)
    try:
        first = await exchange.next()
        if isinstance(first, Failed):
            raise ApiError(first.status, first.message, code=first.code)
        if first is None:
            return Response(status_code=499)  # the client has left; nobody reads it
        if body.stream:
            usage = options is not None and options.include_usage
            return EventStream(exchange, answer, first, include_usage=usage)
        return await _whole(exchange, answer)
    except BaseException:
        exchange.close()
        raise


async def _whole(exchange: Exchange, answer: Answer) -> Response:
    pieces: list[Piece] = []
    while True:
        event = await exchange.next()
        if event is None:
            return Response(status_code=499)
        if isinstance(event, Failed):
            raise ApiError(event.status, event.message, code=event.code)
        if isinstance(event, Piece):
            pieces.append(event)
        if isinstance(event, Done):
            whole = answer.whole(pieces, exchange.job)
            exchange.close()
            text = json.dumps(whole, ensure_ascii=False)
            return Response(text, media_type="application/json")


def health_of(worker: Worker) -> JSONResponse:
    """The answer of `/health`."""
    fault = worker.fault() or ("the server is shutting down" if worker.stopping else None)
    state = {
        "state": "busy" if worker.active else "idle",
        "heartbeat_age_seconds": round(worker.silence(), 3),
        "active": worker.active,
        "waiting": worker.waiting,
    }
    if fault is not None:
        return JSONResponse({"status": "unavailable", "reason": fault, "worker": state}, 503)
    return JSONResponse({"status": "ok", "worker": state})


def status_of(server: Server) -> dict[str, Any]:
    """The answer of `/status`."""
    worker = server.worker
    cache = worker.totals.cache
    return {
        "model": server.settings.name,
        "draft": server.draft,
        "exact": server.exact,
        "max_context": server.settings.max_context,
        "uptime_seconds": round(time.time() - worker.totals.started, 1),
        "worker": {
            "fault": worker.fault(),
            "active": worker.active,
            "waiting": worker.waiting,
            "parallel": server.settings.parallel,
            "queue": server.settings.queue,
            "heartbeat_age_seconds": round(worker.silence(), 3),
        },
        "totals": worker.totals.as_object(),
        "cache": None if cache is None else asdict(cache),
        "memory": memory(),
    }
