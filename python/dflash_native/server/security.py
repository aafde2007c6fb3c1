"""Who may ask: Host and Origin against pages of other sites, keys against everybody else."""

from __future__ import annotations

import hmac
import ipaddress
import re
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError
from .responses import respond
from .settings import Settings

_OPEN_PATHS = frozenset({"/", "/health"})
"""Without a key: the page holds nothing, and health is for whoever restarts the server."""


class Doors:
    """Refuses with 403 a Host or an Origin that is not ours, and with 401 a missing key.

    A page of another site can have its name resolve to 127.0.0.1 (DNS rebinding), but the browser
    then sends that name as the Host. An address in the Host needs no such trick and is let through.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._hosts = {"localhost", settings.host.lower(), *map(str.lower, settings.allowed_hosts)}
        self._origins = frozenset(settings.cors_origins)
        self._keys = [sha256(key.encode()).digest() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers itself, or passes the request on."""
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                await respond(error, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_ours(host):
            raise ApiError(
                403,
                f"the Host {host!r} is not this server's; --allowed-host lets it in",
                code="host_not_allowed",
            )
        if origin is not None and not self._may_call(origin, host):
            raise ApiError(
                403,
                f"pages of {origin!r} may not call this server; --cors-origin lets them",
                code="origin_not_allowed",
            )
        if self._keys and scope["path"] not in _OPEN_PATHS and not self._has_key(headers):
            raise ApiError(
                401,
                "expected an API key in the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _is_ours(self, host: str) -> bool:
        name = re.sub(r":\d+$", "", host.lower())
        if name.startswith("[") and name.endswith("]"):
            name = name[1:-1]
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _may_call(self, origin: str, host: str) -> bool:
        if origin in self._origins or "*" in self._origins:
            return True
        return origin.lower() in (f"http://{host}".lower(), f"https://{host}".lower())

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        digest = sha256(given.strip().encode("latin-1", "replace")).digest()
        # Every key is compared, and each in constant time.
        return sum(hmac.compare_digest(digest, key) for key in self._keys) > 0
