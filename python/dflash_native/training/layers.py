"""Layers that target and drafts share. Parameters are fp32 masters; products run in `dtype`."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """`x @ weight.T` in a dtype given with each call. `weight [out, in]` is fp32."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return F.linear(x.to(dtype), self.weight.to(dtype))


class RMSNorm(nn.Module):
    """In and out fp32. `weight` is the factor itself, not its difference from one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, inner)
        self.up_proj = Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        gate = F.silu(self.gate_proj(x, dtype))
        return self.down_proj(gate * self.up_proj(x, dtype), dtype)


def rope_tables(
    positions: int, dim: int, theta: float, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """cos and sin `[positions, dim / 2]` fp32."""
    exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None]
    angles = angles * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x [..., D]` with its first `2 * cos.shape[-1]` columns rotated, in halves (NeoX)."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, T, heads * D]` to `[B, heads, T, D]`."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def initialise(named: Iterable[tuple[str, nn.Parameter]], layers: int) -> None:
    """Normal of deviation 0.02 for matrices, less for those that write to the residual stream."""
    for name, parameter in named:
        if parameter.dim() != 2:
            continue
        writes = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
        nn.init.normal_(parameter, 0.0, 0.02 / math.sqrt(2 * layers) if writes else 0.02)
