"""Kernels of MLX on numpy arrays, dispatched as MLX dispatches them.

Each takes the `Library` that holds the kernel: Apple's compilation of it (`oracle`), or ours of
MLX's header. Arrays are float32, float16 or, for bfloat, uint16.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .launch import KIND_OF, nan_filled
from .runner import Library

TYPES = {"float": "float", "half": "float16_t", "bfloat": "bfloat16_t"}
NUMPY_NAMES = {"float": "float32", "half": "float16", "bfloat": "bfloat16"}
NOTHING = np.zeros(8, np.int64)  # shapes and strides that a kernel without a batch does not read


def _type(x: np.ndarray) -> str:
    return TYPES[KIND_OF[x.dtype]]


def sdpa_vector_name(kind: str, key_dim: int, value_dim: int) -> str:
    return f"sdpa_vector_{TYPES[kind]}_{key_dim}_{value_dim}"


def sdpa_vector(
    library: Library,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    keys: int,
    scale: float,
    *,
    causal: bool = False,
    mask: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    query_transposed: bool = False,
    schedule: int = 0,
) -> np.ndarray:
    """Attention of q [Hq, T, D] over the first `keys` of k [Hkv, capacity, D] and v.

    `mask` is [Hq, T, keys], of bool or of the dtype of q, which adds; `sinks` is [Hq].
    """
    heads, inputs, key_dim = q.shape
    key_heads, capacity, value_dim = v.shape
    out = nan_filled((heads, inputs, value_dim), q.dtype)
    buffers: dict[int, Any] = {0: q, 1: k, 2: v, 3: out, 10: np.float32(scale)}
    buffers |= {4: np.int32(heads // key_heads), 5: np.int32(keys)}
    buffers |= {6: np.uint64(capacity * key_dim), 7: np.uint64(key_dim)}
    buffers |= {8: np.uint64(capacity * value_dim), 9: np.uint64(value_dim)}
    is_bool = mask is not None and mask.dtype == np.bool_
    if mask is not None:
        buffers |= {11 if is_bool else 12: mask, 13: np.int32(1), 14: np.int32(keys)}
        buffers |= {15: np.int32(inputs * keys)}
    if sinks is not None:
        buffers |= {16: sinks, 17: np.int32(heads)}
    constants = {20: mask is not None, 21: query_transposed, 22: causal, 25: sinks is not None}
    constants |= {23: is_bool, 24: mask is not None and not is_bool}
    name = sdpa_vector_name(KIND_OF[q.dtype], key_dim, value_dim)
    how: dict[str, Any] = {"groups": True, "constants": constants, "schedule": schedule}
    library.run(name, buffers, [heads, inputs, 1], [1024, 1, 1], **how)
    return out


def affine_name(kernel: str, kind: str, group: int, bits: int) -> str:
    """Of affine_qmv, affine_qmv_fast, affine_qmm_t, with _aligned, and affine_gather_qmv."""
    name = f"{kernel.removesuffix('_aligned')}_{TYPES[kind]}_gs_{group}_b_{bits}"
    if "gather" in kernel:
        return name
    if "qmm" in kernel:
        return f"{name}_alN_{str(kernel.endswith('_aligned')).lower()}_batch_0"
    return f"{name}_batch_0_pr_0_hgs_0_r_4"


def affine_product(
    library: Library,
    kernel: str,
    x: np.ndarray,
    weight: np.ndarray,
    scales: np.ndarray,
    biases: np.ndarray,
    bits: int,
    schedule: int = 0,
) -> np.ndarray:
    """x [M, K] times the transpose of a quantised weight [N, K bits / 32]."""
    (rows, depth), outputs = x.shape, len(weight)
    out = nan_filled((rows, outputs), x.dtype)
    sizes = [np.int32(depth), np.int32(outputs)]
    batch = [np.int32(0), NOTHING, NOTHING, np.int32(0), NOTHING, NOTHING, NOTHING, NOTHING]
    if "qmm" in kernel:
        grid, threads = [math.ceil(outputs / 32), math.ceil(rows / 32), 1], [32, 2, 2]
        sizes.append(np.int32(rows))
    else:
        grid, threads = [rows, math.ceil(outputs / 8), 1], [32, 2, 1]
    name = affine_name(kernel, KIND_OF[x.dtype], depth // scales.shape[1], bits)
    buffers = [weight, scales, biases, x, out, *sizes, *batch]
    library.run(name, buffers, grid, threads, groups=True, schedule=schedule)
    return out


def affine_gather_qmv(
    library: Library,
    x: np.ndarray,
    weight: np.ndarray,
    scales: np.ndarray,
    biases: np.ndarray,
    rows: np.ndarray,
    experts: np.ndarray,
    bits: int,
    schedule: int = 0,
) -> np.ndarray:
    """Row rows[i] of x [M, K] times the transpose of weight[experts[i]] [N, K bits / 32]."""
    (_, depth), outputs = x.shape, weight.shape[1]
    pairs = len(rows)
    out = nan_filled((pairs, outputs), x.dtype)
    strides = [np.array([a[0].size], np.int64) for a in (weight, scales, biases)]
    buffers = [weight, scales, biases, x, rows.astype(np.uint32), experts.astype(np.uint32), out]
    buffers += [np.int32(depth), np.int32(outputs)]
    buffers += [np.int32(1), np.array([len(x), 1, depth], np.int32), np.array([depth], np.int64)]
    buffers += [np.int32(1), np.array([len(weight)], np.int32), *strides]
    one = np.array([1], np.int64)
    buffers += [np.int32(1), np.array([pairs], np.int32), one, one]
    group = depth // scales.shape[2]
    name = affine_name("affine_gather_qmv", KIND_OF[x.dtype], group, bits)
    grid = [1, math.ceil(outputs / 8), pairs]
    library.run(name, buffers, grid, [32, 2, 1], groups=True, schedule=schedule)
    return out


def gemv_name(kind: str) -> str:
    """The one for at least 4 outputs and no special shape."""
    return f"gemv_{NUMPY_NAMES[kind]}_bm4_bn1_sm1_sn32_tm4_tn4_nc0_axpby0"


def gemv(library: Library, weight: np.ndarray, x: np.ndarray, schedule: int = 0) -> np.ndarray:
    """weight [N, K] times x [K], N at least 4."""
    outputs, depth = weight.shape
    out = nan_filled((outputs,), x.dtype)
    buffers = {0: weight, 1: x, 3: out, 4: np.int32(depth), 5: np.int32(outputs)}
    buffers |= {6: np.int32(depth), 7: np.float32(1), 8: np.float32(0), 9: np.int32(1)}
    buffers |= {10: np.ones(1, np.int32), 11: NOTHING, 12: NOTHING, 13: NOTHING, 14: np.int32(0)}
    grid = [math.ceil(outputs / 16), 1, 1]
    name = gemv_name(KIND_OF[x.dtype])
    library.run(name, buffers, grid, [32, 1, 4], groups=True, schedule=schedule)
    return out


def gated_delta_name(kernel: str, kind: str, key_heads: int, value_heads: int) -> str:
    """Of seq_gated_delta and gated_delta_fused_chunk."""
    last = 8 if "chunk" in kernel else 1
    return f"{kernel}_{TYPES[kind]}_128_128_{key_heads}_{value_heads}_{last}"


def gated_delta(
    library: Library,
    kernel: str,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
    *,
    save_states: bool = False,
    schedule: int = 0,
) -> tuple[np.ndarray, ...]:
    """y and the state after the inputs; with `save_states` the state before each input too.

    Shapes are those of `dflash_native.ops`; g and beta are in the dtype of q; dims are 128.
    """
    batch, inputs, value_heads, value_dim = v.shape
    y, after = nan_filled(v.shape, v.dtype), nan_filled(state.shape, state.dtype)
    saved = nan_filled((batch, value_heads, inputs, value_dim, k.shape[3]), np.float32)
    buffers = dict(enumerate([q, k, v, state, g, beta, y, after, np.int32(inputs)]))
    constants = {}
    if save_states:
        buffers[9] = saved
        constants[200] = True
    name = gated_delta_name(kernel, KIND_OF[q.dtype], k.shape[2], value_heads)
    grid = [32, value_dim // 8 if "chunk" in kernel else value_dim, batch * value_heads]
    library.run(name, buffers, grid, [32, 4, 1], constants=constants, schedule=schedule)
    return (y, after, saved) if save_states else (y, after)


def rows_name(kernel: str, kind: str) -> str:
    """Of block_softmax, looped_softmax, block_logsumexp and looped_logsumexp."""
    return f"{kernel}_{NUMPY_NAMES[kind]}"


def of_rows(library: Library, kernel: str, x: np.ndarray, schedule: int = 0) -> np.ndarray:
    """softmax of the rows of x, or their logsumexp."""
    out = nan_filled(x.shape if "softmax" in kernel else x.shape[:1], x.dtype)
    name = rows_name(kernel, KIND_OF[x.dtype])
    threads = 256 if "block" in kernel else 1024
    buffers = [x, out, np.int32(x.shape[1])]
    library.run(name, buffers, [len(x)], [threads], groups=True, schedule=schedule)
    return out
