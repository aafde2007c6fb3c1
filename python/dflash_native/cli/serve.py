"""`dflash-native serve`: an OpenAI-compatible server over one model."""

from __future__ import annotations

import ipaddress
import math
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from .console import OptionError, check_block_size, err
from .loading import check_draft, demo_pair, named_pair, own_drafter

try:
    from ..server.choices import Engine
    from ..server.prefix_cache import PrefixCache, fingerprint
    from ..server.serving import bind
    from ..server.serving import run as run_server
    from ..server.settings import Settings
    from ..server.worker import Worker
except ImportError as error:
    raise ImportError(
        f"the server needs the packages of the extra server, of which {error.name} is missing: "
        "pip install fastapi uvicorn prometheus_client"
    ) from error

DEMO_NAME = "dflash-native-demo"
_CONTEXT = 4096
"""Where a model does not say how long its texts may be."""


def run(
    *,
    model: str | None,
    draft: str | None,
    dtype: str | None,
    block_size: int | None,
    exact: bool,
    port: int,
    prefill_step_size: int,
    max_context: int | None,
    name: str | None,
    cache: dict[str, Any],
    **chosen: Any,
) -> None:
    """Load, then serve until Ctrl-C or SIGTERM; see `dflash-native serve --help`.

    `cache` are arguments of `PrefixCache`, and `chosen` are fields of `Settings`.
    """
    _check_options(model, draft, block_size, prefill_step_size, max_context, cache, chosen)
    listener = _listener(chosen["host"], port)  # first: a port that is taken shows at once

    def load() -> Engine:
        engine = _engine(model, draft, dtype, block_size, exact, prefill_step_size)
        return replace(engine, prefix_cache=_prefix_cache(engine, **cache))

    worker = Worker(load, parallel=chosen["parallel"], queue=chosen["queue"])
    engine = worker.start()
    longest = _context_of(engine.target.model)
    settings = Settings(
        name=name or _name_of(model),
        max_context=min(max_context or longest, longest),
        **chosen,
    )
    _announce(settings, listener.getsockname())
    run_server(worker, settings, listener)


def _listener(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise OptionError(f"expected --port in 0 … 65535 (0 takes a free one) but got {port}")
    try:
        return bind(host, port)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"cannot listen at --host {host} --port {port}: {reason}") from None


def _engine(
    model: str | None,
    draft: str | None,
    dtype: str | None,
    block_size: int | None,
    exact: bool,
    prefill_step_size: int,
) -> Engine:
    """On the worker's thread."""
    target, tokenizer, drafter = (
        demo_pair(dtype or "float32", exact)
        if model is None
        else named_pair(model, draft, dtype or "stored", exact)
    )
    if drafter is not None:
        if model is None:
            drafter = own_drafter(draft, drafter)
        check_block_size(block_size, drafter.max_drafts + 1)
    costs = None
    if drafter is not None and block_size is None:
        from ..costs import cached_or_measured

        with err().status("measuring what a round costs"):
            costs = cached_or_measured(target, drafter)
    return Engine(
        target=target,
        tokenizer=tokenizer,
        drafter=drafter,
        draft_name=draft or (DEMO_NAME if model is None else None),
        costs=costs,
        block_size=block_size,
        prefill_step_size=prefill_step_size,
    )


def _prefix_cache(
    engine: Engine, budget_bytes: int, directory: Path | None, disk_budget_bytes: int | None
) -> PrefixCache | None:
    """None where it has no room at all."""
    if budget_bytes == 0 and directory is None:
        return None
    step = engine.prefill_step_size
    # Blocks of one are plain decoding: their checkpoints hold nothing of the draft.
    drafter = None if engine.block_size == 1 else engine.drafter
    key = fingerprint(engine.target, drafter, prefill_step_size=step)
    return PrefixCache(key, budget_bytes, directory=directory, disk_budget_bytes=disk_budget_bytes)


def _name_of(model: str | None) -> str:
    """The folder's name, or the hub id."""
    if model is None:
        return DEMO_NAME
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def _context_of(model: Any) -> int:
    """The most tokens that the model was made for."""
    args = model.args
    found = (getattr(args, "text_config", None) or {}).get("max_position_embeddings")
    return int(found or getattr(args, "max_position_embeddings", None) or _CONTEXT)


def _announce(settings: Settings, address: tuple[Any, ...]) -> None:
    host, port = address[:2]
    host = f"[{host}]" if ":" in host else host
    lines = [f"{settings.name} at http://{host}:{port}/v1, status at http://{host}:{port}/"]
    if not ipaddress.ip_address(address[0]).is_loopback and not settings.api_keys:
        lines.append("everyone who reaches this port may use it: --api-key closes it")
    if "*" in settings.cors_origins and not settings.api_keys:
        lines.append("every web page that is open here may use it: --api-key closes it")
    for line in lines:
        err().print(line, soft_wrap=True)


def _check_options(
    model: str | None,
    draft: str | None,
    block_size: int | None,
    prefill_step_size: int,
    max_context: int | None,
    cache: dict[str, Any],
    chosen: dict[str, Any],
) -> None:
    """Refuse before anything is loaded."""
    check_draft(model, draft)
    if block_size is not None and model is not None and draft is None:
        raise OptionError("expected --block-size only with a draft but got no --draft")
    check_block_size(block_size)
    low = {
        "--prefill-step-size": (prefill_step_size, 1),
        "--max-context": (max_context, 2),
        "--parallel": (chosen["parallel"], 1),
        "--queue": (chosen["queue"], 0),
        "--max-tokens": (chosen["max_tokens"], 1),
        "--max-body-bytes": (chosen["max_body_bytes"], 1),
        "--timeout": (chosen["timeout"], 1),
        "--drain": (chosen["drain"], 0),
        "--prefix-cache-bytes": (cache["budget_bytes"], 0),
        "--prefix-cache-disk-bytes": (cache["disk_budget_bytes"], 0),
    }
    for option, (value, least) in low.items():
        if value is not None and not least <= value < math.inf:
            raise OptionError(f"expected {option} of at least {least} but got {value}")
    if cache["disk_budget_bytes"] is not None and cache["directory"] is None:
        raise OptionError("expected --prefix-cache-disk-bytes only with --prefix-cache-dir")
    if not 0 <= chosen["temperature"] <= 2:
        raise OptionError(f"expected --temperature in 0 … 2 but got {chosen['temperature']}")
    if not all(key and key == key.strip() for key in chosen["api_keys"]):
        raise OptionError("expected --api-key not to be empty and to have no spaces around it")
