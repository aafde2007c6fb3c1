"""The small operations of a layer, each row of the last axis by itself; part of `ops`.

fp32 inside and rounded once, to MLX's promoted dtype. On a CPU stream native kernels run, in any
layout of their inputs. (MLX's own elementwise kernels walk through all rows at once there, and the
last few values of that walk get other bits.) On a GPU they are MLX's own kernels, whose rows are
independent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from ._arguments import Rows, check_arrays, per_row, size
from ._native import extension

if TYPE_CHECKING:
    from . import _ext
else:
    _ext = extension

Stream = mx.Stream | mx.Device | None


def _check(operation: str, weight: mx.array | None, **arrays: mx.array) -> None:
    check_arrays(operation, **arrays)
    if weight is not None:
        check_arrays(operation, weight=weight)


def rms_norm(
    x: mx.array, weight: mx.array | None, eps: float, *, stream: Stream = None
) -> mx.array:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis.

    Args:
        x: [..., D].
        weight: [D], or None for ones.
    """
    _check("rms_norm", weight, x=x)
    return _ext.rms_norm(x, weight, eps, stream)


def rms_norm_gated(
    x: mx.array, gate: mx.array, weight: mx.array | None, eps: float, *, stream: Stream = None
) -> mx.array:
    """`rms_norm(x, weight, eps) * silu(gate)`, in x's dtype: the norm after the gated delta rule.

    Args:
        x, gate: [..., D].
        weight: [D], or None for ones.
    """
    _check("rms_norm_gated", weight, x=x, gate=gate)
    return _ext.rms_norm_gated(x, gate, weight, eps, stream)


def add_rms_norm(
    x: mx.array, residual: mx.array, weight: mx.array | None, eps: float, *, stream: Stream = None
) -> tuple[mx.array, mx.array]:
    """`x + residual`, rounded, and the `rms_norm` of that.

    Args:
        x, residual: [..., D].
        weight: [D], or None for ones.
    """
    _check("add_rms_norm", weight, x=x, residual=residual)
    return _ext.add_rms_norm(x, residual, weight, eps, stream)


def swiglu(gate: mx.array, up: mx.array, *, stream: Stream = None) -> mx.array:
    """`silu(gate) * up`, of one shape."""
    check_arrays("swiglu", gate=gate, up=up)
    return _ext.swiglu(gate, up, stream)


def sigmoid_gate(x: mx.array, gate: mx.array, *, stream: Stream = None) -> mx.array:
    """`x * sigmoid(gate)`, of one shape."""
    check_arrays("sigmoid_gate", x=x, gate=gate)
    return _ext.sigmoid_gate(x, gate, stream)


def rope(
    x: mx.array,
    lengths: Rows,
    dims: int,
    *,
    base: float | None = None,
    freqs: mx.array | None = None,
    scale: float = 1.0,
    traditional: bool = False,
    stream: Stream = None,
) -> mx.array:
    """Rotary positions as `mx.fast.rope` applies them, at each batch row's own offset.

    Args:
        x: [B, H, T, D], D up to 1024; row t stands at position `lengths[b] + t`.
        lengths: [B].
        dims: even; the first so many of D are turned, the rest stays.
        base: pair i turns by `scale * position * base ** (-2 i / dims)` radians, or
        freqs: [dims / 2], by `scale * position / freqs[i]`; one of the two.
        traditional: pairs are neighbours, else entries i and i + dims / 2.
    """
    check_arrays("rope", x=x)
    if freqs is not None:
        check_arrays("rope", freqs=freqs)
    at = per_row("rope", "lengths", lengths, size(x, 0) or 0, None)
    return _ext.rope(x, at, dims, base, freqs, scale, traditional, stream)
