"""The shipped kernels on numpy arrays, dispatched as csrc/ dispatches them.

Arrays of activations are float32, float16 or, for bfloat, uint16 (`to_bfloat`); shapes and names
are those of `dflash_native.ops`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .frontend import compile
from .runner import Library, from_bfloat, to_bfloat
from .tools import SHADERS

KINDS = ("float", "half", "bfloat")
NUMPY = {"float": np.float32, "half": np.float16, "bfloat": np.uint16}
KIND_OF = {np.dtype(dtype): kind for kind, dtype in NUMPY.items()}


def encode(x: np.ndarray, kind: str) -> np.ndarray:
    """Floats in the dtype that a kernel of `kind` reads."""
    return to_bfloat(x) if kind == "bfloat" else np.ascontiguousarray(x, NUMPY[kind])


def decode(x: np.ndarray) -> np.ndarray:
    """What a kernel wrote, as float32."""
    return from_bfloat(x) if x.dtype == np.uint16 else x.astype(np.float32)


def to_mx(x: np.ndarray) -> mx.array:
    """The same array for MLX; uint16 is bfloat."""
    return mx.array(x).view(mx.bfloat16) if x.dtype == np.uint16 else mx.array(x)


def from_mx(x: mx.array) -> np.ndarray:
    """Back from MLX, bfloat as uint16."""
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)


def nan_filled(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Memory that nobody has written: NaN in every dtype."""
    x = np.empty(shape, dtype)
    x.reshape(-1).view(np.uint8)[:] = 0xFF
    return x


@functools.cache
def shader(name: str, only: Sequence[str] = (), contract: str = "on") -> Library:
    """metal/<name>.metal for the emulator: the kernels whose names start with one of `only`."""
    patterns = [f"^{prefix}" for prefix in only]
    return compile(SHADERS / f"{name}.metal", only=patterns, contract=contract)


class Inputs(NamedTuple):
    """One call's inputs to the recurrence."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    mask: np.ndarray | None = None

    def part(self, start: int, stop: int) -> Inputs:
        """Inputs start .. stop - 1."""
        return Inputs(*(x if x is None else np.ascontiguousarray(x[:, start:stop]) for x in self))

    def row(self, b: int) -> Inputs:
        """Batch row b alone."""
        return Inputs(*(x if x is None else x[b : b + 1] for x in self))


class Tape(NamedTuple):
    """The innovation tape of one call."""

    g: np.ndarray
    k: np.ndarray
    delta: np.ndarray
    valid: np.ndarray | None = None


class Outputs(NamedTuple):
    """What `gated_delta` wrote; None where it had nothing to write."""

    y: np.ndarray | None
    delta: np.ndarray | None
    state: np.ndarray | None


def gated_delta(
    state: np.ndarray,
    inputs: Inputs | None = None,
    tape: Tape | None = None,
    keep: Sequence[int] = (),
    *,
    commits: bool = False,
    schedule: int = 0,
    contract: str = "on",
) -> Outputs:
    """verify (with or without a tape), step (`commits`) or, without `inputs`, replay."""
    batch, value_heads, value_dim, key_dim = state.shape
    example = inputs or tape
    assert example is not None
    kind = KIND_OF[example.k.dtype]
    decay = "vector" if example.g.ndim == 4 else "scalar"
    given = inputs.k.shape[1] if inputs else 0
    taped = tape.k.shape[1] if tape else 0
    shape = (batch, given, value_heads, value_dim)
    y = nan_filled(shape, NUMPY[kind])
    delta = nan_filled(shape, np.float32)
    state_out = nan_filled(state.shape, state.dtype)
    buffers = {5: state}
    if inputs:
        buffers |= dict(enumerate(inputs[:5])) | {12: y}
        if inputs.mask is not None:
            buffers[6] = inputs.mask
    if inputs and not commits:
        buffers[13] = delta
    if tape:
        buffers |= {7: tape.g, 8: tape.k, 9: tape.delta, 11: np.array(keep, np.int32)}
        if tape.valid is not None:
            buffers[10] = tape.valid
    if commits or tape:
        buffers[14] = state_out
    sizes = (given, taped, example.k.shape[2], value_heads, value_dim)
    buffers |= {15 + i: np.int32(size) for i, size in enumerate(sizes)}
    simdgroups = min(4, math.ceil(value_dim / 4))
    shader("gated_delta", (f"gated_delta_{kind}_{key_dim}_",), contract).run(
        f"gated_delta_{kind}_{key_dim}_{decay}",
        buffers,
        [1, math.ceil(value_dim / (4 * simdgroups)), batch * value_heads],
        [32, simdgroups, 1],
        groups=True,
        constants={
            0: 6 in buffers,
            1: 7 in buffers,
            2: 10 in buffers,
            3: 13 in buffers,
            4: commits,
        },
        schedule=schedule,
    )
    return Outputs(
        y if inputs else None,
        delta if 13 in buffers else None,
        state_out if 14 in buffers else None,
    )


def gates(
    a: np.ndarray,
    b: np.ndarray,
    A_log: np.ndarray,
    dt_bias: np.ndarray,
    schedule: int = 0,
    contract: str = "on",
) -> tuple[np.ndarray, np.ndarray]:
    """gated_delta_gates: g and beta, fp32."""
    kind = KIND_OF[a.dtype]
    g, beta = (nan_filled(a.shape, np.float32) for _ in range(2))
    shader("gated_delta_gates", contract=contract).run(
        f"gated_delta_gates_{kind}",
        [a, b, A_log, dt_bias, g, beta, np.int32(a.shape[2])],
        [a.size],
        [128],
        schedule=schedule,
    )
    return g, beta


def causal_conv1d(
    x: np.ndarray,
    weight: np.ndarray,
    window: np.ndarray,
    schedule: int = 0,
    contract: str = "on",
) -> np.ndarray:
    """causal_conv1d_verify."""
    kind = KIND_OF[x.dtype]
    out = nan_filled(x.shape, x.dtype)
    batch, given, channels = x.shape
    sizes = [np.int32(n) for n in (given, channels, window.shape[1] + 1)]
    shader("causal_conv1d", contract=contract).run(
        f"causal_conv1d_{kind}",
        [x, weight, window, out, *sizes],
        [channels, given, batch],
        [128, 1, 1],
        schedule=schedule,
    )
    return out


def conv_window(
    window: np.ndarray, x: np.ndarray, keep: Sequence[int], schedule: int = 0
) -> np.ndarray:
    """The window after keep[b] of the inputs x."""
    kind = KIND_OF[x.dtype]
    out = nan_filled(window.shape, window.dtype)
    batch, given, channels = x.shape
    sizes = [np.int32(n) for n in (given, channels, window.shape[1] + 1)]
    shader("causal_conv1d").run(
        f"conv_window_{kind}",
        [window, x, np.array(keep, np.int32), out, *sizes],
        [channels, window.shape[1], batch],
        [128, 1, 1],
        schedule=schedule,
    )
    return out


def kv_write(
    cache: np.ndarray, rows: np.ndarray, lengths: Sequence[int], schedule: int = 0
) -> np.ndarray:
    """The cache with new rows at lengths[b], after the copy that a shared cache goes through."""
    kind = KIND_OF[cache.dtype]
    batch, heads, capacity, dim = cache.shape
    given = rows.shape[2]
    out = nan_filled(cache.shape, cache.dtype)
    library = shader("kv_write")
    size = [cache.size // dim, dim, 1]
    library.run(f"kv_copy_{kind}", [cache, out], size, [32, 4, 1], schedule=schedule)
    library.run(
        f"kv_write_{kind}",
        [rows, np.array(lengths, np.int32), out]
        + [np.int32(n) for n in (heads, capacity, given, dim)],
        [dim, given, batch * heads],
        [32, 4, 1],
        schedule=schedule,
    )
    return out


def verify_matmul(
    x: np.ndarray,
    weight: np.ndarray,
    scales: np.ndarray | None = None,
    biases: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    indices: np.ndarray | None = None,
    *,
    bits: int = 4,
    tiles: int = 1,
    column_tiles: int | None = None,
    schedule: int = 0,
    contract: str = "on",
) -> np.ndarray:
    """verify_matmul, or with `indices` verify_gather_matmul. x and bias are in the result's dtype.

    `tiles` and `column_tiles` are the sizes of a threadgroup's part; without them the host's.
    """
    kind, depth, outputs = KIND_OF[x.dtype], x.shape[-1], weight.shape[-2]
    rows = x.size // depth
    pairs = 1 if indices is None else indices.size
    if column_tiles is None:
        column_tiles = 1 if indices is not None or rows <= 8 else 2 if rows <= 16 else 4
    lead = x.shape[:-1] if indices is None else indices.shape
    out = nan_filled((*lead, outputs), x.dtype)
    experts = 1 if indices is None else len(weight)
    repeat = 1 if indices is None else pairs // rows
    buffers = {0: x, 1: weight, 4: out}
    if bias is not None:
        buffers[2] = bias
    if indices is not None:
        buffers[3] = indices.astype(np.int32)
    sizes = (rows, outputs, depth, experts, repeat)
    buffers |= {5 + i: np.int32(size) for i, size in enumerate(sizes)}
    if scales is None:
        name = f"verify_matmul_dense_{kind}_{KIND_OF[weight.dtype]}"
    else:
        assert biases is not None
        group = depth // scales.shape[-1]
        name = f"verify_matmul_affine_{kind}_{KIND_OF[scales.dtype]}_{bits}_{group}"
        buffers |= {10: scales, 11: biases}
    name += f"_{tiles}_{column_tiles}"
    row_blocks = 1 if pairs > 1 else math.ceil(rows / (8 * column_tiles))
    shader("verify_matmul", (name,), contract).run(
        name,
        buffers,
        [math.ceil(outputs / (16 * tiles)) * pairs, row_blocks, 1],
        [32, 8, 1],
        groups=True,
        constants={0: bias is not None, 1: indices is not None},
        schedule=schedule,
    )
    return out


def attend_chunks(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    lengths: Sequence[int],
    scale: float,
    window: int | None = None,
    causal: bool = True,
    mask: np.ndarray | None = None,
    *,
    staged: bool | None = None,
    simdgroups: int | None = None,
    schedule: int = 0,
    contract: str = "on",
) -> tuple[np.ndarray, np.ndarray]:
    """The first kernel of verify_attention: sums [B, Hq, T, chunks, Dv] and statistics
    [B, Hq, T, chunks, 2] of each chunk, NaN where nobody writes.

    `staged` and `simdgroups` pick how the columns are shared out; without them the host's choice.
    """
    kind = KIND_OF[q.dtype]
    batch, heads, inputs, key_dim = q.shape
    key_heads, capacity, value_dim = k.shape[1], k.shape[2], v.shape[3]
    group, chunks = heads // key_heads, math.ceil(capacity / 256)
    columns = group * inputs
    if staged is None:
        staged = kind != "float" and columns > 8
    if simdgroups is None:
        simdgroups = 1 if not staged else 2 if columns <= 32 else 4
    tiles = 2 if staged else 1
    partial = nan_filled((batch, heads, inputs, chunks, value_dim), np.float32)
    statistics = nan_filled((batch, heads, inputs, chunks, 2), np.float32)
    buffers = {0: q, 1: k, 2: v, 3: np.array(lengths, np.int32), 5: partial, 6: statistics}
    if mask is not None:
        buffers[4] = mask
    sizes = (inputs, key_heads, group, capacity, chunks, window or 0)
    buffers |= {7 + i: np.int32(size) for i, size in enumerate(sizes)}
    buffers[13] = np.float32(scale)
    name = f"attend_chunk_{kind}_{key_dim}_{value_dim}_{tiles}_{simdgroups}_{str(staged).lower()}"
    shader("verify_attention", (name,), contract).run(
        name,
        buffers,
        [math.ceil(columns / (8 * tiles * simdgroups)), chunks, batch * key_heads],
        [32, simdgroups, 1],
        groups=True,
        constants={0: mask is not None, 1: causal},
        schedule=schedule,
    )
    return partial, statistics


def verify_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    lengths: Sequence[int],
    scale: float,
    window: int | None = None,
    causal: bool = True,
    mask: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    *,
    schedule: int = 0,
    contract: str = "on",
    **shared_out: Any,
) -> np.ndarray:
    """verify_attention. `shared_out`: the options of `attend_chunks` that change no bits."""
    partial, statistics = attend_chunks(
        *(q, k, v, lengths, scale, window, causal, mask),
        schedule=schedule,
        contract=contract,
        **shared_out,
    )
    batch, heads, inputs, chunks, value_dim = partial.shape
    out = nan_filled((batch, heads, inputs, value_dim), q.dtype)
    buffers = {0: partial, 1: statistics, 2: np.array(lengths, np.int32), 4: out}
    if sinks is not None:
        buffers[3] = sinks
    sizes = (inputs, heads, k.shape[2], chunks, window or 0)
    buffers |= {5 + i: np.int32(size) for i, size in enumerate(sizes)}
    name = f"combine_chunks_{KIND_OF[q.dtype]}_{value_dim}"
    shader("verify_attention", (name,), contract).run(
        name,
        buffers,
        [batch * heads * inputs, value_dim // 32, 1],
        [32, 16, 1],
        groups=True,
        constants={0: mask is not None, 1: causal, 2: sinks is not None},
        schedule=schedule,
    )
    return out
