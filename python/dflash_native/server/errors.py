"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class ApiError(HTTPException):
    """An answer with this status, one sentence, and what OpenAI's clients look at.

    `param` names the field of the request, `code` is for programs. The error's type follows from
    the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return error_body(self.status_code, self.detail, self.param, self.code)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The JSON of an error with this status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
