"""What DFlash2 adds to DFlash: grouped dynamic convolutions and the candidate selector."""

from __future__ import annotations

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from ..modules import Products
from ..sampling import NOISE_OF, Proposes, Sampler
from .config import DFlashConfig
from .protocol import Proposal


class GroupedDynamicConv(Module):
    """A causal convolution over the rows of one block whose kernel depends on the row.

    `out[i, c] = sum_t (base[side, t, c] + delta[i, side, t, c // G]) * x[i - t, c]`, rows before
    the block count as zero. Side 0 works on a sublayer's input, side 1 on its output, both with the
    input's `delta`.
    """

    def __init__(self, config: DFlashConfig, products: Products) -> None:
        super().__init__()
        self.matmul = products.matmul
        self.taps, self.group = config.conv_kernel_size, config.conv_group_size
        groups = config.hidden_size // self.group
        self.base_kernel = mx.zeros((2, self.taps, config.hidden_size))
        self.kernel_projection = Linear(config.hidden_size, 2 * self.taps * groups, bias=False)

    def kernels(self, x: mx.array) -> mx.array:
        """A sublayer's normed input `x [1, B, H]` to both kernels `[2, 1, B, K, H/G, G]` fp32."""
        batch, block, hidden = x.shape
        groups = hidden // self.group
        delta = self.matmul(self.kernel_projection, x).astype(mx.float32)
        delta = delta.reshape(batch, block, 2, self.taps, groups, 1)
        base = self.base_kernel.astype(mx.float32)
        base = base.reshape(2, self.taps, groups, self.group)
        return mx.moveaxis(base + delta, 2, 0)

    def __call__(self, x: mx.array, kernel: mx.array) -> mx.array:
        """`x [1, B, H]` with one side's `kernel [1, B, K, H/G, G]` to `[1, B, H]` in x's dtype."""
        block = x.shape[1]
        rows = x.astype(mx.float32).reshape(*x.shape[:2], -1, self.group)
        padded = mx.pad(rows, [(0, 0), (self.taps - 1, 0), (0, 0), (0, 0)])
        total = kernel[:, :, 0] * rows
        for tap in range(1, self.taps):
            first = self.taps - 1 - tap
            total = total + kernel[:, :, tap] * padded[:, first : first + block]
        return total.reshape(x.shape).astype(x.dtype)


class CandidateSelector(Module):
    """Chooses a path through every slot's best candidates by the scores of slots and steps."""

    def __init__(self, config: DFlashConfig, products: Products) -> None:
        super().__init__()
        self.matmul = products.matmul
        self.top_k = config.selector_top_k
        codebook = (config.vocab_size, config.selector_rank)
        self.predecessor_codebook = mx.zeros(codebook)
        self.successor_codebook = mx.zeros(codebook)
        self.hidden_projection = Linear(config.hidden_size, config.selector_rank, bias=False)

    def propose(
        self,
        hidden: mx.array,
        logits: mx.array,
        anchor: mx.array,
        proposes: Proposes = "argmax",
        sampler: Sampler | None = None,
        position: int = 0,
    ) -> mx.array | Proposal:
        """The path from the anchor, int32 `[1, n]`.

        `hidden [1, n, H]` after the final norm, `logits [1, n, V]` after multiplier and softcap,
        `anchor [1, 1]` int. Slot j chooses among its candidates by the fp32 scores
        `unary[c] + <A[pred] * (P h_j), B[c]>`, `pred` the choice of slot j - 1: their argmax,
        ties to the lowest id, or with a sampler and `proposes` "coupled" or "drawn" a draw from
        `softmax(scores / temperature)` for the positions from `position` on.
        """
        logits = logits[0].astype(mx.float32)
        candidates = top_candidates(logits, self.top_k)
        unary = mx.take_along_axis(logits, candidates, axis=-1)
        step = self.matmul(self.hidden_projection, hidden)[0].astype(mx.float32)
        successors = self.successor_codebook[candidates].astype(mx.float32) * step[:, None]
        # The best candidate of a slot for each one of the slot before: the walk only looks up.
        before = mx.concatenate(
            [mx.broadcast_to(anchor.astype(mx.int32), (1, self.top_k)), candidates[:-1]]
        )
        predecessors = self.predecessor_codebook[before].astype(mx.float32)
        scores = unary[:, None] + predecessors @ successors.swapaxes(1, 2)
        noisy = scores
        if sampler is not None and proposes != "argmax":
            noise = sampler.noise(logits, position, NOISE_OF[proposes])
            scores = sampler.tempered(scores)
            noisy = scores + mx.take_along_axis(noise, candidates, axis=-1)[:, None]
        best = mx.argmax(noisy, axis=-1)
        tokens = mx.take_along_axis(candidates, best.astype(mx.int32), axis=-1)
        at, path, rows = best[0, :1], [tokens[0, :1]], [scores[0, :1]]
        for slot in range(1, best.shape[0]):
            path.append(tokens[slot][at])
            rows.append(scores[slot][at])
            at = best[slot][at]
        drafts = mx.concatenate(path)[None]
        if sampler is None or proposes != "drawn":
            return drafts
        chances = mx.softmax(mx.concatenate(rows), axis=-1)
        probabilities = mx.put_along_axis(mx.zeros_like(logits), candidates, chances, axis=-1)
        return Proposal(drafts, probabilities)


def top_candidates(logits: mx.array, count: int) -> mx.array:
    """Ids of the `count` largest of `logits [n, V]` fp32, int32 `[n, count]` in ascending order.

    Equal logits go by the lower id, also at the border, so that the set does not hang on a
    partition's order.
    """
    vocab = logits.shape[-1]
    bits = mx.view(logits, mx.int32).astype(mx.int64)
    rank = mx.where(bits < 0, -(2**31) - bits, bits)  # in the order of the floats, -0 equal to 0
    key = rank * vocab - mx.arange(vocab, dtype=mx.int64)
    chosen = mx.argpartition(key, vocab - count, axis=-1)[:, vocab - count :]
    return mx.sort(chosen, axis=-1).astype(mx.int32)
