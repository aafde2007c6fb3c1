"""What a round costs by width: measured once for a target, a drafter and a machine, and kept."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from .drafters.config import DFlashConfig
from .drafters.protocol import Drafter, DraftSession, Proposal, TargetLike
from .policy import Costs
from .sampling import Sampler
from .session import Session
from .targets import Target

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CONTEXT = 64
"""The context at which costs are measured unless another one is asked for: soon read."""
_SECONDS = 6.0
"""After so long no round is repeated."""


def measure(
    target: Target,
    drafter: Drafter,
    context: int = CONTEXT,
    *,
    repeats: int = 9,
    progress: Callable[[int, int], None] | None = None,
) -> dict[int, float]:
    """Median seconds of a round by width after `context` tokens, the widths taken in turn.

    A round is drafted, verified and committed as any other; whether drafts are accepted does not
    matter to its cost, and where a drafter has fewer than asked, its block is filled up. Width 1 is
    a step of plain decoding, queued ahead as there.
    """
    widths = [w for w in WIDTHS if w <= drafter.max_drafts] + [drafter.max_drafts + 1]
    prompt = [(7 * i) % target.vocab_size for i in range(max(2, context))]
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    with Session(target) as plain, Session(target, _Filled(drafter)) as drafting:
        for session in (plain, drafting):
            session.prefill(prompt)
        start = time.perf_counter()
        for repeat in range(repeats + 1):  # the first pays for what is made on first use
            for width in widths:
                mx.synchronize()  # what a plain step has queued
                if width == 1:
                    plain.round()
                rounds = 2 if width == 1 else 1  # the second is as in a row of plain steps
                began = time.perf_counter()
                for _ in range(rounds):
                    (plain if width == 1 else drafting).round(None if width == 1 else width)
                if repeat > 0:
                    seconds[width].append((time.perf_counter() - began) / rounds)
            if progress is not None:
                progress(repeat, repeats)
            if repeat > 0 and time.perf_counter() - start > _SECONDS:
                break
    return {width: median(times) for width, times in seconds.items()}


class _Filled:
    """A drafter whose every proposal has the length that was asked for."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.tap_layers, self.context_rows = drafter.tap_layers, drafter.context_rows
        self.max_drafts = drafter.max_drafts

    def begin(self, target: TargetLike) -> DraftSession:
        return _FilledSession(self._drafter.begin(target))


class _FilledSession:
    def __init__(self, session: DraftSession) -> None:
        self._session = session
        self.observe, self.extend, self.arrays = session.observe, session.extend, session.arrays

    @property
    def finite(self) -> mx.array | None:
        return self._session.finite

    def propose(
        self, pending: mx.array, position: int, count: int, sampler: Sampler | None = None
    ) -> mx.array | Proposal:
        answer = self._session.propose(pending, position, count, sampler)
        if isinstance(answer, Proposal):  # the rounds that are measured draw nothing
            return answer
        return mx.pad(answer, [(0, 0), (0, count - answer.shape[1])])


@dataclass(frozen=True)
class Price:
    """Median seconds of a round of one width."""

    width: int
    exact: float
    stock: float
    """With MLX's own matmul and attention in the target."""


def price_of_exactness(target: Target, drafter: Drafter, context: int) -> list[Price]:
    """By width, from four measurements in turn: exact, MLX's own, and both again."""
    both = [
        Target(target.model, exact=exact) if exact != target.exact else target
        for exact in (True, False)
    ]
    runs = [measure(each, drafter, context, repeats=5) for each in (*both, *both)]
    return [
        Price(width, (runs[0][width] + runs[2][width]) / 2, (runs[1][width] + runs[3][width]) / 2)
        for width in runs[0]
    ]


def cached_or_measured(
    target: Target, drafter: Drafter, contexts: Sequence[int] | None = None, renew: bool = False
) -> Costs:
    """The costs in the cache file, completed by a measurement of what it lacks.

    Without `contexts` anything that is there will do, and CONTEXT is measured where nothing is.
    """
    key, path = fingerprint(target, drafter), cache_file()
    known = {} if renew else _rows(_read(path).get(key))
    wanted = contexts if contexts is not None else ([] if known else [CONTEXT])
    new = {context: measure(target, drafter, context) for context in wanted if context not in known}
    for context, row in new.items():
        keep(target, drafter, context, row)
    return Costs(known | new)


def keep(target: Target, drafter: Drafter, context: int, row: Mapping[int, float]) -> None:
    """Put what was measured into the cache file.

    In one step; a place that cannot be written to is no error: costs are then measured again.
    """
    path, key = cache_file(), fingerprint(target, drafter)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = _read(path)
        known[key] = _rows(known.get(key)) | {context: dict(row)}
        file = tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False)
    except OSError:
        return
    try:
        with file:
            file.write(json.dumps(known, indent=1))
        os.replace(file.name, path)
    except OSError:
        Path(file.name).unlink(missing_ok=True)


def fingerprint(target: Target, drafter: Drafter) -> str:
    """Of all that a cost depends on: shapes and dtypes, not weights; the machine; versions."""
    from .doctor import build_info

    info = build_info()
    parts = [
        _described(target),
        _described(drafter),
        os.cpu_count(),
        [info[name] for name in ("backend", "device", "kernels", "environment", "versions")],
    ]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


def _described(part: object, around: tuple[int, ...] = ()) -> object:
    """A target, a model or a drafter, as far as a cost depends on it; None for anything else.

    Of a drafter these are its class, its public numbers and words, and each drafter, target and
    model in it. What changes from round to round belongs in its `DraftSession`.
    """
    if id(part) in around or isinstance(part, int | float | str | bytes | mx.array):
        return None
    inside = (*around, id(part))
    if isinstance(part, Target):
        return ["exact" if part.exact else "stock", _described(part.model, inside)]
    if isinstance(part, Module):
        arrays = cast("list[tuple[str, mx.array]]", tree_flatten(part.parameters()))
        return [_class(part), [f"{name} {array.shape} {array.dtype}" for name, array in arrays]]
    if isinstance(part, DFlashConfig):
        return repr(part)
    if isinstance(part, list | tuple | dict):
        values = part.values() if isinstance(part, dict) else part
        return [found for each in values if (found := _described(each, inside))]
    if not isinstance(part, Drafter):
        return None
    rows: list[object] = [_class(part), part.max_drafts, part.tap_layers, part.context_rows]
    for name, value in getattr(part, "__dict__", {}).items():
        if isinstance(value, int | float | str) and not name.startswith("_"):
            rows.append([name, value])
        elif found := _described(value, inside):
            rows.append([name, found])
    return rows


def _class(part: object) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"


def kept() -> dict[str, dict[int, dict[int, float]]]:
    """All that the cache file holds: fingerprint, context, width, seconds."""
    return {key: _rows(found) for key, found in _read(cache_file()).items()}


def cache_file() -> Path:
    """$DFLASH_NATIVE_CACHE, else $XDG_CACHE_HOME/dflash-native or ~/.cache/dflash-native."""
    own = os.environ.get("DFLASH_NATIVE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own or Path(base, "dflash-native")).expanduser() / "costs.json"


def _rows(found: object) -> dict[int, dict[int, float]]:
    """What one target's entry says by context and width, as far as it makes sense."""
    rows = {}
    for context, row in found.items() if isinstance(found, dict) else ():
        try:
            seconds = {int(width): float(value) for width, value in row.items()}
            Costs({int(context): seconds})
        except (AttributeError, TypeError, ValueError):
            continue
        rows[int(context)] = seconds
    return rows


def _read(path: Path) -> dict[str, Any]:
    """What is there; nothing where it is missing or damaged."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
