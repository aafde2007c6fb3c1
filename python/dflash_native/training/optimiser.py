"""Muon for the hidden matrices, AdamW for embeddings, codebooks, vectors and convolutions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_TABLES = ("embed_tokens", "codebook")


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz in bf16: `[N, rows, columns]` with all singular values moved near 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return x.mT if tall else x


class MuonAdamW:
    """Both optimisers behind one `step(scale)`; `scale` multiplies every learning rate.

    `muon_rate` is for square matrices; a matrix of more rows than columns gets it times the root of
    their ratio. `table_rate` is for embeddings and codebooks, `vector_rate` for the rest.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        muon_rate: float = 0.02,
        vector_rate: float = 3e-3,
        table_rate: float = 2e-3,
        momentum: float = 0.95,
        decay: float = 0.02,
    ) -> None:
        self.muon_rate, self.momentum, self.decay = muon_rate, momentum, decay
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
        tables, vectors = [], []
        for name, parameter in named:
            if any(word in name for word in _TABLES):
                tables.append(parameter)
            elif parameter.dim() == 2 and min(parameter.shape) > 16:
                by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
            else:
                vectors.append(parameter)
        self._matrices = [
            (group, torch.zeros(len(group), *shape, device=group[0].device))
            for shape, group in by_shape.items()
        ]
        groups = [(vectors, vector_rate), (tables, table_rate)]
        self._adamw = torch.optim.AdamW(
            [{"params": group, "lr": rate, "base": rate} for group, rate in groups if group],
            betas=(0.9, 0.98),
            eps=1e-10,
            weight_decay=0.0,
            fused=vectors[0].is_cuda,
        )

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Apply the gradients, and drop them."""
        for group in self._adamw.param_groups:
            group["lr"] = group["base"] * scale
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        for parameters, average in self._matrices:
            gradient = torch.stack([_gradient(p) for p in parameters])
            average.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(average, self.momentum)).float()
            rows, columns = update.shape[1:]
            rate = self.muon_rate * scale * max(1.0, rows / columns) ** 0.5
            for parameter, change in zip(parameters, update, strict=True):
                parameter.mul_(1 - rate * self.decay).sub_(change, alpha=rate)
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` restores."""
        return {"adamw": self._adamw.state_dict(), "muon": [m for _, m in self._matrices]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adamw.load_state_dict(state["adamw"])
        for (_, average), saved in zip(self._matrices, state["muon"], strict=True):
            average.copy_(saved)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
