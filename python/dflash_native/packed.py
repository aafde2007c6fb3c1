"""A weight in the layout that the CPU's products read best."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class PackedWeight:
    """What `ops.pack_matmul` makes of a weight [N, K], or [E, N, K] of experts.

    Sixteen outputs stand side by side, k after k. Rows past N and values past K are zero.
    """

    weight: mx.array
    """Dense: [ceil(N / 16), K, 16]; fp16 with K made even; bf16 [ceil(N / 16), ceil(K / 2), 16, 2].
    Quantised: MLX's words, [ceil(N / 16), K * bits / 32, 16] uint32. Experts stand in front."""

    scales: mx.array | None
    """[ceil(N / 16), K / group_size, 16], or None where the weight is dense."""

    biases: mx.array | None
    """As scales."""

    outputs: int
    """N."""

    inputs: int
    """K."""

    group_size: int | None
    """Or None where the weight is dense."""

    bits: int | None
    """4, 8, or None where the weight is dense."""

    @property
    def dtype(self) -> mx.Dtype:
        """Of the values: the weight's, or that of scales and biases."""
        return self.weight.dtype if self.scales is None else self.scales.dtype

    @property
    def nbytes(self) -> int:
        """Memory of the packed arrays."""
        parts = (self.weight, self.scales, self.biases)
        return sum(part.nbytes for part in parts if part is not None)
