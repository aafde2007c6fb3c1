"""The gated delta rule in plain PyTorch: step by step, and in chunks for training.

Shapes here: `q, k [B, T, H, Dk]` normalised and scaled, `v [B, T, H, Dv]`, `g [B, T, H]` the
logarithm of the decay, `beta [B, T, H]`, state `[B, H, Dk, Dv]`, all fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def sequential(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token after the other. Returns `y [B, T, H, Dv]` and the last state.

    `S = exp(g) S; S = S + k (beta (v - k S)); y = q S` for every token.
    """
    if state is None:
        state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1])
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        read = (k[:, t, :, None] @ state).squeeze(-2)
        innovation = (v[:, t] - read) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * innovation[:, :, None]
        outputs.append((q[:, t, :, None] @ state).squeeze(-2))
    return torch.stack(outputs, 1), state


class _UnitLowerInverse(torch.autograd.Function):
    """`(I + A)^-1` of a strictly lower triangular `A [..., C, C]`, C a power of two.

    Inverses of 1x1 blocks are combined to 2x2, 4x4, ... blocks. The product of `I + A^(2^i)`, which
    is shorter, overflows where keys repeat.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        size = a.shape[-1]
        index = torch.arange(size, device=a.device)
        inverse = torch.eye(size, device=a.device, dtype=a.dtype).expand_as(a)
        block = 1
        while block < size:
            row, column = index[:, None] // block, index[None] // block
            below = (row // 2 == column // 2) & (row > column)
            inverse = inverse - inverse @ torch.where(below, a, 0) @ inverse
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ gradients[0] @ transposed).tril(-1)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """What `sequential` gives from a zero state, `chunk` (a power of two) tokens at a time.

    Within a chunk the innovations solve `(I + A) U = beta (v - exp(G) K S)` with `A = tril(beta K
    K^T exp(G_i - G_j), -1)`, G the running sum of g; from chunk to chunk only S is carried.
    """
    tokens, missing = q.shape[1], -q.shape[1] % chunk
    if missing:
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (q, k, v))
        g, beta = (F.pad(x, (0, 0, 0, missing)) for x in (g, beta))

    # [B, T, H, ...] to [B, H, chunks, C, ...]
    q, k, v = (x.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4).contiguous() for x in (q, k, v))
    g, beta = (x.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2).contiguous() for x in (g, beta))
    total = g.cumsum(-1)
    lower = torch.ones(chunk, chunk, device=q.device, dtype=torch.bool).tril()
    steps = total[..., :, None] - total[..., None, :]
    decay = torch.exp(torch.where(lower, steps, float("-inf")))

    keys = k * beta[..., None]
    inverse = _UnitLowerInverse.apply(((keys @ k.transpose(-1, -2)) * decay).tril(-1))
    innovations = inverse @ (v * beta[..., None])
    reads = inverse @ (keys * total.exp()[..., None])
    writes = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    whole = total[..., -1].exp()[..., None, None]

    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    states, updates = [], []
    # unbind, and not an index each: its gradient is one stack.
    parts = (part.unbind(2) for part in (innovations, reads, writes, whole))
    for innovation, read, write, kept in zip(*parts, strict=True):
        update = innovation - read @ state
        states.append(state)
        updates.append(update)
        state = kept * state + write @ update
    y = (q * total.exp()[..., None]) @ torch.stack(states, 2)
    y = y + ((q @ k.transpose(-1, -2)) * decay) @ torch.stack(updates, 2)
    return y.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :tokens]
