"""Whole forwards of a target: plain steps and verifies of T rows, ours, stock and mlx-lm's.

A forward is `Target.forward(..., commit=False)`, logits, argmax and `cache.commit` of all its T
inputs, whose tape the next forward of that width replays; every call starts at the same context.
`exact` and `stock` are the target with exact=True and exact=False; `mlx-lm` is mlx-lm's own model
with its own prompt cache. A round queues several forwards, each handed to the device before the
next is built, as plain decoding does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache

from dflash_native import Cache, Target
from dflash_native.cache import AttentionCache

from .timing import Call, interleave, on_cpu, percentiles, ratios

WAYS = ("exact", "stock", "mlx-lm")
QUEUE = 1 if on_cpu else 4
"""Forwards of a variant in a round: a CPU gains nothing by a queue."""


def filled(target: Target, context: int, capacity: int) -> Cache:
    """A cache as after `context` inputs, of random values."""
    cache = target.make_cache()
    cache.reserve(capacity)
    for layer in cache.layers:
        fields = ("keys", "values") if isinstance(layer, AttentionCache) else ("window", "state")
        for name in fields:
            old = getattr(layer, name)
            setattr(layer, name, (0.1 * mx.random.normal(old.shape)).astype(old.dtype))
            mx.eval(getattr(layer, name))
    cache.lengths = [context]
    return cache


def copied(target: Target, source: Cache) -> Cache:
    """A cache with the keys and values of `source`, shared, and states of its own."""
    cache = target.make_cache()
    for at, layer in enumerate(source.layers):
        if isinstance(layer, AttentionCache):
            cache.layers[at] = layer
        else:
            cache.layers[at].advance(layer.window, layer.state)
    cache.lengths = list(source.lengths)
    return cache


def run(target: Target, tokens: mx.array, cache: Cache) -> mx.array:
    """The logits of one verify, all of whose inputs are committed."""
    logits = target.logits(target.forward(tokens, cache, commit=False)[0])
    cache.commit([tokens.shape[1]])
    return logits


def check(target: Target, tokens: mx.array, source: Cache) -> None:
    """A verify against the single steps of the same tokens. Raises AssertionError."""
    cache = copied(target, source)
    steps = [run(target, tokens[:, t : t + 1], cache) for t in range(tokens.shape[1])]
    alone = mx.concatenate(steps, axis=1)
    mx.eval(alone)
    block = run(target, tokens, copied(target, source))
    if not mx.isfinite(block).all().item() or not mx.array_equal(alone, block).item():
        raise AssertionError("[forwards] expected a verify with the bits of single steps.")


def ours(target: Target, tokens: mx.array, source: Cache) -> Call:
    """Forwards of a target."""
    cache, start = copied(target, source), list(source.lengths)

    def call(count: int) -> list[mx.array]:
        chosen = []
        for _ in range(count):
            chosen.append(mx.argmax(run(target, tokens, cache), axis=-1))
            cache.lengths = list(start)
            mx.async_eval(chosen[-1])
        return chosen

    return call


def theirs(model: Module, tokens: mx.array, source: Cache) -> Call:
    """Forwards of mlx-lm's model."""
    caches, start = make_prompt_cache(model), source.lengths[0]
    for cache, layer in zip(caches, source.layers, strict=True):
        if isinstance(layer, AttentionCache):
            cache.keys, cache.values = layer.keys + 0, layer.values + 0
        else:
            cache[0], cache[1] = layer.window, layer.state

    def call(count: int) -> list[mx.array]:
        chosen = []
        for _ in range(count):
            for cache in caches:
                if isinstance(cache, KVCache):
                    cache.offset = start
            chosen.append(mx.argmax(model(tokens, cache=caches), axis=-1))
            mx.async_eval(chosen[-1])
        return chosen

    return call


def bytes_read(model: Module, source: Cache, rows: int) -> int:
    """Weights, the embedding table only where it is the head, and what the caches hold.

    Of a layer's experts as many as `rows` independent routers would pick on average.
    """
    text = getattr(model, "language_model", model)
    args, total = text.args, 0.0
    experts = getattr(args, "num_experts", 0)
    picked = 1 - (1 - args.num_experts_per_tok / experts) ** rows if experts else 1.0
    for name, value in tree_flatten(model.parameters()):
        if "embed_tokens" not in name or args.tie_word_embeddings:
            total += value.nbytes * (picked if "switch_mlp" in name else 1.0)
    for layer in source.layers:
        share = source.lengths[0] / layer.capacity if isinstance(layer, AttentionCache) else 1
        total += share * sum(array.nbytes for array in layer.arrays())
    return int(total)


def slope(times: dict[int, list[float]]) -> tuple[float, float, float] | None:
    """Percentiles of one more row's cost, in % of a plain step: a line through each round's wider
    forwards. None where there are fewer than two of those.
    """
    wide = [T for T in times if T > 1]
    if len(wide) < 2:
        return None
    rounds = np.array([times[T] for T in wide])
    return percentiles(np.polyfit(wide, rounds, 1)[0] / np.array(times[1]) * 100)


def measure(
    targets: dict[str, Target],
    source: Cache,
    rows: Sequence[int],
    repeats: int,
    most_seconds: float,
    copy_gb_s: float,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for each way and T, and a row for each way with the cost of one more row.

    Raises AssertionError where an exact verify does not have the bits of single steps.
    """
    model, most = targets["exact"].model, max(rows)
    vocabulary = targets["exact"].vocab_size
    tokens = {T: mx.random.randint(0, vocabulary, (1, T), dtype=mx.int32) for T in rows}
    mx.eval(tokens)
    check(targets["exact"], tokens[most], source)
    variants: dict[tuple[str, int], Call] = {}
    for T in rows:
        for way, target in targets.items():
            variants[way, T] = ours(target, tokens[T], source)
        if T in (1, most):
            variants["mlx-lm", T] = theirs(model, tokens[T], source)
    named = {f"{way} {T}": call for (way, T), call in variants.items()}
    taken = interleave(named, repeats, QUEUE, most_seconds)
    times = {key: taken[f"{key[0]} {key[1]}"] for key in variants}
    found = []
    for (way, T), measured in times.items():
        low, middle, high = percentiles(measured)
        size = bytes_read(model, source, T)
        found.append(
            {
                "context": source.lengths[0],
                "way": way,
                "rows": T,
                "ms": middle * 1e3,
                "ms_low": low * 1e3,
                "ms_high": high * 1e3,
                "of_plain": ratios(measured, times[way, 1]),
                "of_mlx_lm": ratios(measured, times["mlx-lm", T]) if T in (1, most) else None,
                "tok_s": T / middle,
                "bytes": size,
                "gb_s": size / middle / 1e9,
                "of_copy": size / middle / 1e9 / copy_gb_s,
            }
        )
    slopes = [
        {
            "context": source.lengths[0],
            "way": way,
            "one_more_row_percent": slope({T: t for (w, T), t in times.items() if w == way}),
        }
        for way in targets
    ]
    return found, slopes
