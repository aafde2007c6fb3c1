"""Attention of a block over a cache, and the rows that it writes there."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from dflash_native import ops, reference
from dflash_native.cache import AttentionCache

from ..timing import on_cpu
from . import Case, Inputs, Point, Results, Variant, compiled, operation

WHOLE = 8192
"""Rows times keys up to which the reference gives all heads and rows; beyond, the first head's
first and last row."""


@operation("verify_attention", "context")
def attention(at: Point) -> Iterator[Case]:
    """Causal, over `context` committed keys and the block's own."""
    heads, key_heads = at.config.num_attention_heads, at.config.num_key_value_heads
    dim, B, T, keys = at.config.head_dim, at.batch, at.rows, at.context
    repeats, scale, seen = heads // key_heads, dim**-0.5, keys + T
    capacity = -(-seen // AttentionCache.step) * AttentionCache.step
    whole = T * keys <= WHOLE

    def make() -> Inputs:
        cache = [at.normal(B, key_heads, capacity, dim) for _ in range(2)]
        return (at.normal(B, heads, T, dim), *cache, mx.full((B,), keys, dtype=mx.int32))

    def ours(q: mx.array, k: mx.array, v: mx.array, lengths: mx.array) -> Results:
        return [ops.verify_attention(q, k, v, lengths, scale)]

    def fast(q: mx.array, k: mx.array, v: mx.array, lengths: mx.array) -> Results:
        mask = "causal" if T > 1 else None
        k, v = k[:, :, :seen], v[:, :, :seen]
        return [mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)]

    def plain(q: mx.array, k: mx.array, v: mx.array, lengths: mx.array) -> Results:
        k, v = (x[:, :, None, :seen] for x in (k, v))
        q = q.reshape(B, key_heads, repeats, T, dim)
        scores = (q * scale) @ k.swapaxes(-1, -2)
        hidden = mx.arange(seen) > mx.arange(keys, seen)[:, None]
        scores = mx.where(hidden, mx.array(-float("inf"), scores.dtype), scores)
        return [(mx.softmax(scores, axis=-1, precise=True) @ v).reshape(B, heads, T, dim)]

    def expected(q: mx.array, k: mx.array, v: mx.array, lengths: mx.array) -> Results:
        if whole:
            return [reference.verify_attention(q, k, v, lengths, scale)]
        first = q[:, :1, :1], k[:, :1], v[:, :1], lengths
        last = q[:, :1, T - 1 :], k[:, :1], v[:, :1], lengths + (T - 1)
        return [reference.verify_attention(*each, scale) for each in (first, last)]

    def part(results: Results) -> Results:
        (y,) = results
        return [y] if whole else [y[:, :1, :1], y[:, :1, T - 1 :]]

    flops = 4 * B * heads * T * seen * dim
    slow = f"{flops / 1e9:.1f} GFLOP of it take MLX minutes on a CPU"
    skip = slow if on_cpu and flops > 4e9 else ""
    yield Case(
        "verify_attention",
        f"{heads} heads over {key_heads}, D {dim}",
        make,
        [
            Variant("ours", ours),
            Variant("mx.fast", fast, skip=skip),
            Variant("mlx", plain, skip=skip),
            Variant("mx.compile", compiled(plain).function, skip=skip),
        ],
        expected,
        bytes=2 * B * (key_heads * seen + heads * T) * dim * at.mlx_dtype.size,
        flops=flops,
        select=part,
    )


@operation("kv_write", "context")
def kv_write(at: Point) -> Iterator[Case]:
    """New rows into a cache that the caller keeps; MLX's slice assignment is mlx-lm's way."""
    heads, dim, B, T = at.config.num_key_value_heads, at.config.head_dim, at.batch, at.rows
    capacity = -(-(at.context + T) // AttentionCache.step) * AttentionCache.step

    def make() -> Inputs:
        return mx.zeros((B, heads, capacity, dim), at.mlx_dtype), at.normal(B, heads, T, dim)

    def ours(cache: mx.array, new: mx.array) -> Results:
        return [ops.kv_write(cache, new, [at.context] * B)]

    def lm(cache: mx.array, new: mx.array) -> Results:
        start = mx.array([at.context], dtype=mx.int32)
        return [mx.slice_update(cache, new, start, axes=(2,))]

    def expected(cache: mx.array, new: mx.array) -> Results:
        return [reference.kv_write(cache, new, mx.full((B,), at.context, dtype=mx.int32))]

    yield Case(
        "kv_write",
        f"{heads} heads, D {dim}",
        make,
        [Variant("ours", ours), Variant("mlx-lm", lm)],
        expected,
        bytes=2 * B * heads * T * dim * at.mlx_dtype.size,
        flops=0,
        hands_on=True,
    )
