"""DFlash and DFlash2 drafts for training: many blocks of one text in one pass.

The formats are those of the published checkpoints; `drafters/` runs them with a cache. Parameter
names are the checkpoint's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import MLP, Linear, RMSNorm, initialise, rope_tables, rotate, split_heads
from .shapes import DraftShape


class BlockAttention(nn.Module):
    """Queries from the blocks; keys and values from context and blocks by the same projections."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, head = shape.hidden_size, shape.head_dim
        self.q_proj = Linear(hidden, shape.num_attention_heads * head)
        self.k_proj = Linear(hidden, shape.num_key_value_heads * head)
        self.v_proj = Linear(hidden, shape.num_key_value_heads * head)
        self.o_proj = Linear(shape.num_attention_heads * head, hidden)
        self.q_norm = RMSNorm(head, shape.rms_norm_eps)
        self.k_norm = RMSNorm(head, shape.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, place: Place, index: int) -> Tensor:
        """`x [B, Q, H]`, `context [B, S, H]` to `[B, Q, H]`."""
        shape, dtype = self.shape, place.dtype
        q = split_heads(self.q_proj(x, dtype), shape.num_attention_heads)
        q = rotate(self.q_norm(q), *place.block_rope).to(dtype)
        rows = torch.cat([context.to(dtype), x.to(dtype)], 1)
        k = self.k_norm(split_heads(self.k_proj(rows, dtype), shape.num_key_value_heads))
        v = split_heads(self.v_proj(rows, dtype), shape.num_key_value_heads)
        known = context.shape[1]
        k = torch.cat(
            [
                rotate(k[:, :, :known], *place.context_rope),
                rotate(k[:, :, known:], *place.block_rope),
            ],
            2,
        ).to(dtype)
        repeats = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(repeats, 1) for part in (k, v))
        mask = place.masks[shape.layer_types[index]]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(y.transpose(1, 2).flatten(-2), dtype)


class Place:
    """Where the blocks of a pass stand and what they see; the same for every layer."""

    def __init__(
        self,
        shape: DraftShape,
        anchors: Tensor,
        context: int,
        tables: tuple[Tensor, Tensor],
        dtype: torch.dtype,
        lengths: Tensor | None,
    ) -> None:
        block, device = shape.block_size, anchors.device
        slots = torch.arange(block, device=device)
        positions = (anchors[:, :, None] + slots).flatten(1)
        self.dtype = dtype
        self.block_rope = tuple(table[positions][:, None] for table in tables)
        self.context_rope = tuple(table[:context] for table in tables)

        keys = torch.arange(context, device=device)
        known = keys < anchors.repeat_interleave(block, 1)[:, :, None]
        near = positions[:, :, None] - keys < shape.sliding_window
        numbers = torch.arange(positions.shape[1], device=device) // block
        own = (numbers[:, None] == numbers).expand(len(anchors), -1, -1)
        if lengths is not None:
            in_use = slots < lengths[:, :, None]
            own = own & in_use.flatten(1)[:, None]
        self.masks = {
            "full_attention": torch.cat([known, own], -1)[:, None],
            "sliding_attention": torch.cat([known & near, own], -1)[:, None],
        }


class BlockConv(nn.Module):
    """DFlash2's grouped dynamic convolution over the rows of each block.

    `out[i, c] = sum_t (base[side, t, c] + delta[i, side, t, c // G]) x[i - t, c]`: side 0 on a
    sublayer's input, side 1 on its output, delta from the input.
    """

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.block, self.taps = shape.block_size, shape.conv_kernel_size
        self.group = shape.conv_group_size
        groups = shape.hidden_size // self.group
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, shape.hidden_size))
        self.kernel_projection = Linear(shape.hidden_size, 2 * self.taps * groups)

    def kernels(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both sides' kernels `[B, Q, taps, H]` fp32 for the sublayer's input `x [B, Q, H]`."""
        delta = self.kernel_projection(x, dtype).float().unflatten(-1, (2, self.taps, -1))
        both = self.base_kernel + delta.repeat_interleave(self.group, -1)
        return both[:, :, 0], both[:, :, 1]

    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        """`x [B, Q, H]` to the same shape, fp32."""
        rows = x.float().unflatten(1, (-1, self.block))
        kernel = kernel.unflatten(1, (-1, self.block))
        total = kernel[:, :, :, 0] * rows
        for tap in range(1, self.taps):
            earlier = F.pad(rows, (0, 0, tap, 0))[:, :, : self.block]
            total = total + kernel[:, :, :, tap] * earlier
        return total.flatten(1, 2)


class CandidateSelector(nn.Module):
    """DFlash2's scores of a step from one token to the next, beside the head's logits."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        codebook = (shape.vocab_size, shape.selector_rank)
        self.top_k = shape.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(codebook))
        self.successor_codebook = nn.Parameter(torch.empty(codebook))
        self.hidden_projection = Linear(shape.hidden_size, shape.selector_rank)

    def steps(self, hidden: Tensor, before: Tensor, dtype: torch.dtype) -> Tensor:
        """`<A[before] * (P hidden), B[c]>` for every c: `[..., V]` in `dtype`."""
        query = self.hidden_projection(hidden, dtype)
        query = query * F.embedding(before, self.predecessor_codebook).to(dtype)
        return F.linear(query, self.successor_codebook.to(dtype))

    def select(
        self, hidden: Tensor, logits: Tensor, anchor: Tensor, noise: Tensor | None = None
    ) -> Tensor:
        """The path `[B, n]` from `anchor [B]` through the best candidates of each slot.

        `hidden [B, n, H]` normed, `logits [B, n, V]` fp32. Where tokens are drawn, `noise [B, n,
        V]`, Gumbel noise times the temperature, is added to the candidates' scores.
        """
        step = self.hidden_projection(hidden, logits.dtype)
        unary, candidates = logits.topk(self.top_k, -1)
        path = []
        for slot in range(logits.shape[1]):
            query = step[:, slot] * F.embedding(anchor, self.predecessor_codebook)
            successors = F.embedding(candidates[:, slot], self.successor_codebook)
            scores = unary[:, slot] + (successors @ query[:, :, None]).squeeze(-1)
            if noise is not None:
                scores = scores + noise[:, slot].gather(-1, candidates[:, slot])
            best = scores.argmax(-1, keepdim=True)
            anchor = candidates[:, slot].gather(-1, best)[:, 0]
            path.append(anchor)
        return torch.stack(path, 1)


class DraftLayer(nn.Module):
    """A pre-norm layer; the residual stream is fp32."""

    def __init__(self, shape: DraftShape, index: int) -> None:
        super().__init__()
        self.index = index
        self.self_attn = BlockAttention(shape)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.convolves = shape.is_dflash2
        if self.convolves:
            self.attention_conv = BlockConv(shape)
            self.mlp_conv = BlockConv(shape)

    def forward(self, x: Tensor, context: Tensor, place: Place) -> Tensor:
        inner = self.input_layernorm(x)
        if self.convolves:
            before, after = self.attention_conv.kernels(inner, place.dtype)
            inner = self.attention_conv(inner, before)
        y = self.self_attn(inner, context, place, self.index)
        x = x + (self.attention_conv(y, after) if self.convolves else y.float())

        inner = self.post_attention_layernorm(x)
        if not self.convolves:
            return x + self.mlp(inner, place.dtype).float()
        before, after = self.mlp_conv.kernels(inner, place.dtype)
        return x + self.mlp_conv(self.mlp(self.mlp_conv(inner, before), place.dtype), after)


class Draft(nn.Module):
    """A DFlash or DFlash2 draft. Embeddings and head are the target's."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = Linear(len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(shape, i) for i in range(len(shape.layer_types)))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        if shape.is_dflash2:
            self.candidate_selector = CandidateSelector(shape)
        initialise(self.named_parameters(), len(shape.layer_types))
        for name, parameter in self.named_parameters():
            if name.endswith("base_kernel"):
                parameter.data[:, 0] = 1.0  # of one tap: at first the convolution is the identity
            elif name.endswith("kernel_projection.weight"):
                nn.init.zeros_(parameter)
            elif name.endswith("predecessor_codebook"):
                nn.init.zeros_(parameter)  # at first the selector adds nothing
            elif name.endswith("successor_codebook"):
                nn.init.normal_(parameter, 0.0, shape.selector_rank**-0.5)

    def rope(self, positions: int) -> tuple[Tensor, Tensor]:
        """Tables for `forward`, on the model's device."""
        device = self.fc.weight.device
        return rope_tables(positions, self.shape.head_dim, self.shape.rope_theta, device)

    def forward(
        self,
        embedded: Tensor,
        taps: Tensor,
        anchors: Tensor,
        tables: tuple[Tensor, Tensor],
        dtype: torch.dtype,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Normed hidden states `[B, N, block, H]` fp32 of N blocks a row.

        `embedded [B, N * block, H]`: anchors and mask tokens; `taps [B, S, n * H]` of the text;
        `anchors [B, N]`: the blocks' positions, whose context is what stands before them; `lengths
        [B, N]`: where a block is shorter, the slots from there on are seen by nobody.
        """
        context = self.hidden_norm(self.fc(taps, dtype))
        place = Place(self.shape, anchors, taps.shape[1], tables, dtype, lengths)
        x = embedded.float()
        for layer in self.layers:
            x = layer(x, context, place)
        return self.norm(x).unflatten(1, (-1, self.shape.block_size))
