"""What the operator chose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits and doors of a server; the defaults are those of the command line."""

    name: str
    """The model's id in requests and answers."""
    host: str = "127.0.0.1"
    api_keys: tuple[str, ...] = ()
    """Without any, everyone who reaches the port may use it."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call; "*" for all. A page of the server itself always may."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header beside `localhost` and IP addresses."""
    parallel: int = 4
    """Requests that are worked on in turn."""
    queue: int = 32
    """Requests that may wait for that; beyond them the answer is 503."""
    max_context: int = 4096
    """Most tokens of a prompt and its answer."""
    max_tokens: int | None = None
    """Most tokens that a request may ask for, and the default; None: what the context allows."""
    max_body_bytes: int = 8 << 20
    timeout: float = 600.0
    """Seconds from a request's arrival to the end of its answer."""
    drain: float = 30.0
    """Seconds that open requests get at a graceful stop."""
    temperature: float = 0.0
    """Of requests that name none."""
    log_json: bool = False
