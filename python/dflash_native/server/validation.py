"""Bodies to requests: JSON that is read strictly, and the sentence for what does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json

from .errors import ApiError
from .schema import REFUSED

_ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_DEPTH = 64
"""Of arrays and objects in one another."""


class JsonRequest(Request):
    """Its JSON is UTF-8 without lone surrogates, finite, and not deep."""

    async def json(self) -> Any:
        """Raises ApiError (400) with what is wrong."""
        try:
            value = from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            sentence = f"expected a body in JSON but {error}"
            raise ApiError(400, sentence, code="invalid_json") from None
        if _deeper(value, MAX_DEPTH):
            raise ApiError(400, f"expected JSON of at most {MAX_DEPTH} levels", code="invalid_json")
        return value


class JsonRoute(APIRoute):
    """A route whose body is read by `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return strictly


def invalid(error: RequestValidationError) -> ApiError:
    """The most precise of the errors that pydantic found, as an answer."""
    found = max(error.errors(), key=lambda each: len(each["loc"]))
    place = _place(found["loc"])
    if not place:
        return ApiError(400, "expected a JSON object, sent as application/json")
    name = ".".join(place)
    if found["type"] == "extra_forbidden":
        reason = REFUSED.get(place[-1], "the server does not know it")
        return ApiError(
            400, f"[{name}] is not supported: {reason}", param=name, code="unsupported_parameter"
        )
    if found["type"] == "missing":
        return ApiError(400, f"[{name}] is required", param=name, code="missing_parameter")
    sentence = found["msg"].replace("Input should be", "expected", 1)
    got = repr(found["input"])
    got = got if len(got) <= 60 else got[:57] + "..."
    return ApiError(400, f"[{name}] {sentence} but got {got}", param=name, code="invalid_value")


def _place(location: Sequence[str | int]) -> list[str]:
    """The path of a field, without what pydantic puts in for the branch of a union."""
    place: list[str] = []
    for part, before in zip(location[1:], location, strict=False):
        role = isinstance(before, int) and part in _ROLES
        kind = isinstance(part, str) and re.fullmatch(r"str|(list|constrained-str)\b.*", part)
        if not role and not (kind and len(location) > 2):
            place.append(str(part))
    return place


def _deeper(value: Any, levels: int) -> bool:
    level = [value]
    for _ in range(levels):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return any(isinstance(each, dict | list) for each in level)
