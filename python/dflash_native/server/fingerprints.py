"""What the arrays of a checkpoint depend on, in one name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from .. import __version__, _native
from ..drafters import CombinedDrafter, Drafter
from ..targets import Target


def fingerprint(target: Target, drafter: Drafter | None = None, **settings: object) -> str:
    """A sha256, in hexadecimal digits, of all that a checkpoint's arrays depend on.

    Of target and drafter every byte of the weights, with names, dtypes, shapes and configuration,
    whatever they are called and wherever they lie; exact and prefill of the target; MLX's device,
    the kernels' sources, and the versions of this package, mlx and mlx-lm. `settings` are what a
    caller has besides, such as a chunk size or whatever a drafter of its own depends on beyond its
    `model`. Nothing is sampled or kept: a call reads every weight, with all cores.
    """
    parts = {
        "target": _model(target.model),
        "exact": target.exact,
        "prefill": target.prefill,
        "dtype": str(target.dtype),
        "drafter": _drafter(drafter),
        "settings": sorted((name, repr(value)) for name, value in settings.items()),
        "device": str(mx.default_device().type),
        "shaders": _native.extension.shader_hash(),
        "versions": [__version__, _native.MLX_VERSION, version("mlx-lm")],
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _drafter(drafter: Drafter | None) -> Any:
    if drafter is None:
        return None
    if isinstance(drafter, CombinedDrafter):
        return ["combined", _drafter(drafter.lookup), _drafter(drafter.other)]
    model = getattr(drafter, "model", None)
    return [
        f"{type(drafter).__module__}.{type(drafter).__qualname__}",
        drafter.tap_layers,
        drafter.context_rows,
        repr(getattr(drafter, "config", None)),
        _model(model) if isinstance(model, Module) else None,
    ]


def _model(model: Module) -> list[Any]:
    weights = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_digest, _bytes(weights)))
    return [
        repr(getattr(model, "args", None)),
        [
            (name, str(array.dtype), array.shape, digest)
            for (name, array), digest in zip(weights, digests, strict=True)
        ],
    ]


def _bytes(weights: list[tuple[str, mx.array]]) -> Iterator[memoryview]:
    """On the caller's thread: MLX's streams belong to one."""
    for _, array in weights:
        yield memoryview(array.reshape(-1).view(mx.uint8))  # type: ignore[arg-type]


def _digest(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
