"""The operations of verify and rollback.

Shapes: B batch, T inputs of this call, Hk and Hv key and value heads (Hv a multiple of Hk), Dk and
Dv head dims (Dk a multiple of 32 up to 256), C channels, K taps. Activations are fp32, fp16 or
bf16; state, decay, beta and innovations are fp32. The recurrence, per value head, with key head
`hk = hv // (Hv // Hk)` (gated delta rule, arXiv:2412.06464, eq. 10):

    delta_t = beta_t (v_t - g_t S_{t-1} k_t),   S_t = g_t S_{t-1} + delta_t k_t^T,   y_t = S_t q_t

Callers normalise q and k and fold the scale into q; no operation applies one.

The bits of row i of a result depend on row i's inputs and on the history before them, never on T,
on B or on other rows. Operations are lazy and run on `stream` (default: MLX's). Each raises
ValueError where a shape, a dtype or a host value is wrong, TypeError where something is no array.
Values on the device (`keep`, `lengths`) out of range raise at evaluation on the CPU and fill their
row with NaN on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ._arguments import Rows
from ._arguments import check_arrays as _check_arrays
from ._arguments import per_row as _rows
from ._arguments import size as _size
from ._native import extension
from .packed import PackedWeight
from .rowwise import add_rms_norm, rms_norm, rms_norm_gated, rope, sigmoid_gate, swiglu
from .tape import Tape

if TYPE_CHECKING:
    from . import _ext
else:
    _ext = extension

__all__ = [
    "PackedWeight",
    "Tape",
    "add_rms_norm",
    "causal_conv1d_verify",
    "conv_window",
    "gated_delta_gates",
    "gated_delta_replay",
    "gated_delta_step",
    "gated_delta_verify",
    "kv_write",
    "pack_matmul",
    "rms_norm",
    "rms_norm_gated",
    "rope",
    "sigmoid_gate",
    "swiglu",
    "verify_attention",
    "verify_gather_matmul",
    "verify_matmul",
    "verify_matmuls",
]

HEAD_DIMS = (32, 64, 96, 128, 256)
"""Of keys and values alike, in `verify_attention`."""


def _check_tape(operation: str, tape: Tape) -> None:
    if not isinstance(tape, Tape):
        raise TypeError(f"[{operation}] expected tape to be a Tape but got {type(tape).__name__}.")
    _check_arrays(operation, **{"tape.g": tape.g, "tape.k": tape.k, "tape.delta": tape.delta})


def gated_delta_gates(
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, mx.array]:
    """Decay and write strength: `exp(-exp(A_log) softplus(a + dt_bias))` and `sigmoid(b)`.

    Args:
        a, b: [B, T, Hv], activations.
        A_log, dt_bias: [Hv], taken to fp32 first.

    Returns:
        g and beta, [B, T, Hv] fp32. `g` is the linear decay, not its log.
    """
    _check_arrays("gated_delta_gates", a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    return _ext.gated_delta_gates(a, b, A_log, dt_bias, stream)


def gated_delta_verify(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    tape: Tape | None = None,
    keep: Rows | None = None,
    mask: mx.array | None = None,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, Tape, mx.array]:
    """Runs T inputs without committing them, and records the tape that can commit any prefix.

    With the previous call's `tape` and `keep`, those inputs are replayed first, in registers, and
    the state after them is the new checkpoint: a round reads and writes the state once.

    Args:
        q, k: [B, T, Hk, Dk].
        v: [B, T, Hv, Dv].
        g: [B, T, Hv], or [B, T, Hv, Dk] for a decay of each key dimension; fp32, linear.
        beta: [B, T, Hv], fp32.
        state: [B, Hv, Dv, Dk], fp32: the previous checkpoint, or the state where there is no tape.
        tape: what the previous verify recorded; given with `keep` or not at all.
        keep: [B], inputs of `tape` to commit, 0 .. its T.
        mask: [B, T] bool. A masked input gives y = 0 and delta = 0, leaves the state's bits alone
            and is skipped by replay.

    Returns:
        y [B, T, Hv, Dv] in v's dtype; the tape of this call; the checkpoint before its inputs
        [B, Hv, Dv, Dk] (`state` itself where there was no tape).
    """
    name = "gated_delta_verify"
    _check_arrays(name, q=q, k=k, v=v, g=g, beta=beta, state=state)
    if tape is not None:
        _check_tape(name, tape)
    kept = None
    if keep is not None:
        limit = None if tape is None else _size(tape.delta, 1)
        kept = _rows(name, "keep", keep, _size(state, 0) or 0, limit)
    y, delta, checkpoint = _ext.gated_delta_verify(
        q, k, v, g, beta, state, tape, kept, mask, stream
    )
    return y, Tape(g, k, delta, mask), checkpoint


def gated_delta_step(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, mx.array]:
    """Runs T inputs and commits them: plain decoding and prefill. Arguments as for verify.

    Returns:
        y [B, T, Hv, Dv] in v's dtype and the state after all inputs, [B, Hv, Dv, Dk] fp32.
    """
    _check_arrays("gated_delta_step", q=q, k=k, v=v, g=g, beta=beta, state=state)
    return _ext.gated_delta_step(q, k, v, g, beta, state, mask, stream)


def gated_delta_replay(
    state: mx.array,
    tape: Tape,
    keep: Rows,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """The state after the first `keep[b]` inputs of `tape`: bit for bit that of as many
    single steps.

    Args:
        state: [B, Hv, Dv, Dk] fp32, the checkpoint that the tape's call started from.
        keep: [B], 0 .. T of the tape.
    """
    _check_arrays("gated_delta_replay", state=state)
    _check_tape("gated_delta_replay", tape)
    kept = _rows("gated_delta_replay", "keep", keep, _size(state, 0) or 0, _size(tape.delta, 1))
    return _ext.gated_delta_replay(state, tape, kept, stream)


def causal_conv1d_verify(
    x: mx.array,
    weight: mx.array,
    window: mx.array,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """`silu(conv(x))`, depthwise and causal; in fp32 in the order of the taps, rounded once.

    Args:
        x: [B, T, C], activations.
        weight: [C, K] or [C, K, 1], the last tap on the newest input.
        window: [B, K - 1, C], the inputs before x.

    Returns:
        [B, T, C] in x's dtype.
    """
    _check_arrays("causal_conv1d_verify", x=x, weight=weight, window=window)
    return _ext.causal_conv1d_verify(x, weight, window, stream)


def conv_window(
    window: mx.array,
    x: mx.array,
    keep: Rows,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """The window [B, K - 1, C] after the first `keep[b]` rows of x [B, T, C]."""
    _check_arrays("conv_window", window=window, x=x)
    kept = _rows("conv_window", "keep", keep, _size(x, 0) or 0, _size(x, 1))
    return _ext.conv_window(window, x, kept, stream)


def kv_write(
    cache: mx.array,
    new: mx.array,
    lengths: Rows,
    *,
    after: mx.array | None = None,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Writes new rows at each batch row's own length.

    The cache is donated: written in place unless something else still holds it. A step that is
    queued while the last one runs finds it held, and would copy all of it.

    Args:
        cache: [B, H, capacity, D].
        new: [B, H, T, D], in the cache's dtype.
        lengths: [B], the row that the first new one gets, 0 .. capacity - T. On the host they
            spare CUDA some launches.
        after: any array. Given, the cache is written in place whatever else holds it, once `after`
            is computed: the result of what reads the rows that are written over. For an owner of
            the cache who knows of all its readers. (On CUDA MLX decides, as without.)

    Returns:
        The cache, [B, H, capacity, D].
    """
    _check_optional("kv_write", after=after)
    _check_arrays("kv_write", cache=cache, new=new)
    limit = None
    if cache.ndim == new.ndim == 4 and new.shape[2] <= cache.shape[2]:
        limit = cache.shape[2] - new.shape[2]
    at = _rows("kv_write", "lengths", lengths, _size(cache, 0) or 0, limit)
    starts = None if isinstance(lengths, mx.array) else [int(length) for length in lengths]
    return _ext.kv_write(cache, new, at, starts, after, stream)


def verify_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    lengths: Rows,
    scale: float,
    window: int | None = None,
    causal: bool = True,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Softmax attention of T rows over caches that already hold the rows' own keys and values.

    Row i stands at position `lengths[b] + i`. It sees every committed key (those before
    `lengths[b]`) and of the block's T keys those up to its own, all with `causal=False`, or those
    of its `mask`. Keys past the block are never read into a result. A row that sees nothing gives
    zeros. Softmax in fp32, one rounding at the end.

    Keys are taken in chunks of 256 absolute positions; a key that a row does not see is skipped,
    not weighted zero. So the bits of a row depend on what it sees alone.

    Args:
        q: [B, Hq, T, D].
        k: [B, Hkv, capacity, D], in q's dtype; Hq a multiple of Hkv.
        v: [B, Hkv, capacity, Dv], in q's dtype. Dv = D of `HEAD_DIMS`, or D 192 with Dv 128.
        lengths: [B], 0 .. capacity - T.
        scale: factor of the scores.
        window: a row sees a key only where row position - key position < window; at least 1.
        mask: [T, T] bool, row by key of the block, True where seen; replaces `causal`.
        sinks: [Hq] fp32, a further score of each head without a value.

    Returns:
        [B, Hq, T, Dv] in q's dtype.
    """
    _check_arrays("verify_attention", q=q, k=k, v=v)
    for name, array in (("mask", mask), ("sinks", sinks)):
        if array is not None:
            _check_arrays("verify_attention", **{name: array})
    rows, capacity = _size(q, 2), _size(k, 2)
    limit = None if rows is None or capacity is None or rows > capacity else capacity - rows
    at = _rows("verify_attention", "lengths", lengths, _size(q, 0) or 0, limit)
    return _ext.verify_attention(q, k, v, at, scale, window, causal, mask, sinks, stream)


def _check_optional(operation: str, **arrays: object) -> None:
    _check_arrays(operation, **{name: each for name, each in arrays.items() if each is not None})


def _weight(
    operation: str,
    weight: mx.array | PackedWeight,
    scales: mx.array | None,
    biases: mx.array | None,
    group_size: int,
    bits: int,
) -> tuple[mx.array, mx.array | None, mx.array | None, int, int, tuple[int, int] | None]:
    """weight, scales, biases, group_size and bits, and N and K of a packed weight."""
    if not isinstance(weight, PackedWeight):
        _check_arrays(operation, weight=weight)
        _check_optional(operation, scales=scales, biases=biases)
        return weight, scales, biases, group_size, bits, None
    if scales is not None or biases is not None:
        raise ValueError(f"[{operation}] expected no scales and biases beside a packed weight.")
    size = weight.outputs, weight.inputs
    parts = weight.weight, weight.scales, weight.biases
    return *parts, weight.group_size or 0, weight.bits or 0, size


def pack_matmul(
    weight: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    *,
    group_size: int = 64,
    bits: int = 4,
    stream: mx.Stream | mx.Device | None = None,
) -> PackedWeight:
    """A weight as the CPU's products read it at the speed of memory. Of the same size, but for N
    that is no multiple of 16 and, in 16 bits, K that is odd. For CPU streams.

    Args:
        weight, scales, biases, group_size, bits: as for `verify_matmul`, or, with experts in front,
            for `verify_gather_matmul`.
    """
    name = "pack_matmul"
    _check_arrays(name, weight=weight)
    _check_optional(name, scales=scales, biases=biases)
    parts = _ext.pack_matmul(weight, scales, biases, group_size, bits, stream)
    outputs, inputs = weight.shape[-2:]
    if scales is None:
        return PackedWeight(*parts, outputs, inputs, None, None)
    return PackedWeight(*parts, outputs, inputs * 32 // bits, group_size, bits)


def verify_matmul(
    x: mx.array,
    weight: mx.array | PackedWeight,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    bias: mx.array | None = None,
    *,
    group_size: int = 64,
    bits: int = 4,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """`x @ w.T + bias`, where a row's bits do not depend on how many rows there are.

    Products and sums are fp32: k in order, in panels of 128 or in the groups of a quantised weight,
    whose scale and bias multiply the group's sums; then the bias, then one rounding.

    Args:
        x: [..., K], activations.
        weight: dense [N, K] in fp32, fp16 or bf16; or affine as MLX quantises, uint32
            [N, K * bits / 32] with scales and biases; or what `pack_matmul` made of either, on the
            CPU: the same bits, sooner.
        scales, biases: [N, K / group_size], activations' dtypes: w = scale * q + bias.
        bias: [N].
        group_size, bits: 32, 64 or 128, and 4 or 8, where scales are given; a packed weight has
            its own.

    Returns:
        [..., N] in MLX's promoted dtype of x and weight, or of x and scales.
    """
    name = "verify_matmul"
    _check_arrays(name, x=x)
    _check_optional(name, bias=bias)
    w, s, b, group_size, bits, packed = _weight(name, weight, scales, biases, group_size, bits)
    return _ext.verify_matmul(x, w, s, b, bias, group_size, bits, packed, stream)


_MATMUL_DEFAULTS: dict[str, Any] = {
    "scales": None,
    "biases": None,
    "bias": None,
    "group_size": 64,
    "bits": 4,
}


def verify_matmuls(
    x: mx.array,
    weights: Sequence[Mapping[str, Any]],
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> list[mx.array]:
    """`verify_matmul` of x with each weight: the same bits.

    On CUDA weights of one format take one launch, which spares the host most of the cost of
    projections that belong together (q, k and v, say).

    Args:
        x: [..., K].
        weights: for each `verify_matmul`'s arguments after x, by name.
    """
    name = "verify_matmul"
    _check_arrays(name, x=x)
    given = []
    for each in weights:
        part = {**_MATMUL_DEFAULTS, **each}
        bias = part.pop("bias")
        _check_optional(name, bias=bias)
        w, s, b, group_size, bits, packed = _weight(name, **part)
        given.append((w, s, b, bias, group_size, bits, packed))
    results: list[mx.array] = _ext.verify_matmuls(x, given, stream)
    return results


def verify_gather_matmul(
    x: mx.array,
    weight: mx.array | PackedWeight,
    indices: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    bias: mx.array | None = None,
    *,
    group_size: int = 64,
    bits: int = 4,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """`x[r, j] @ w[indices[r, j]].T + bias[indices[r, j]]`: each row by its experts.

    Args:
        x: [R..., k, K], or [R..., 1, K] where the k experts of a row take the same x.
        weight: [E, N, K] or [E, N, K * bits / 32], or packed; else as for `verify_matmul`.
        indices: [R..., k], integers, 0 .. E - 1.
        scales, biases: [E, N, K / group_size].
        bias: [E, N].

    Returns:
        [R..., k, N], each row with the bits of `verify_matmul`.
    """
    name = "verify_gather_matmul"
    _check_arrays(name, x=x, indices=indices)
    _check_optional(name, bias=bias)
    w, s, b, group_size, bits, packed = _weight(name, weight, scales, biases, group_size, bits)
    return _ext.verify_gather_matmul(x, w, indices, s, b, bias, group_size, bits, packed, stream)
