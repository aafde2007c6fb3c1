"""The target: a Qwen3.5 text model (GatedDeltaNet, gated attention) for training and decoding.

Parameter names are those of the Hugging Face layout without their prefix; norms hold the factor
itself, where that layout stores its difference from one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import gated_delta
from .layers import MLP, Linear, RMSNorm, initialise, rope_tables, rotate, split_heads
from .shapes import TargetShape

LayerCache = tuple[Tensor, Tensor]
"""GatedDeltaNet: convolution window `[B, taps - 1, C]` and state `[B, Hv, Dk, Dv]` fp32.
Attention: keys and values `[B, Hkv, capacity, D]`."""


class _Conv(nn.Module):
    """Holds `weight [C, 1, taps]` under the name that the layout gives it."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class GatedDeltaNet(nn.Module):
    """The linear-attention layer."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, heads = shape.hidden_size, shape.linear_num_value_heads
        channels = 2 * shape.key_dim + shape.value_dim
        self.in_proj_qkv = Linear(hidden, channels)
        self.in_proj_z = Linear(hidden, shape.value_dim)
        self.in_proj_b = Linear(hidden, heads)
        self.in_proj_a = Linear(hidden, heads)
        self.conv1d = _Conv(channels, shape.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = RMSNorm(shape.linear_value_head_dim, shape.rms_norm_eps)
        self.out_proj = Linear(shape.value_dim, hidden)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`x [B, T, H]` to `[B, T, H]`, from a zero state."""
        tokens, taps = x.shape[1], self.shape.linear_conv_kernel_dim
        padded = F.pad(self.in_proj_qkv(x, dtype), (0, 0, taps - 1, 0))
        weight = self.conv1d.weight.to(dtype)
        mixed = padded[:, :tokens] * weight[:, 0, 0]
        for tap in range(1, taps):
            mixed = mixed + padded[:, tap : tap + tokens] * weight[:, 0, tap]
        y = gated_delta.chunked(*self._heads(mixed), *self._gates(x, dtype))
        return self._finish(y, x, dtype)

    def step(self, x: Tensor, cache: LayerCache, dtype: torch.dtype) -> Tensor:
        """One token `x [B, 1, H]`; the cache is updated in place."""
        window, state = cache
        rows = torch.cat([window, self.in_proj_qkv(x, dtype)], 1)
        window.copy_(rows[:, 1:])
        mixed = (rows * self.conv1d.weight.to(dtype)[:, 0].t()).sum(1, keepdim=True)
        q, k, v = (part[:, 0] for part in self._heads(mixed))
        g, beta = (part[:, 0] for part in self._gates(x, dtype))
        state.mul_(g.exp()[..., None, None])
        innovation = (v - (k[:, :, None] @ state).squeeze(-2)) * beta[..., None]
        flat = state.view(-1, *state.shape[2:])
        flat.baddbmm_(k.flatten(0, 1)[:, :, None], innovation.flatten(0, 1)[:, None])
        return self._finish((q[:, :, None] @ state).transpose(1, 2), x, dtype)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k `[B, T, Hv, Dk]` normalised, q scaled, v `[B, T, Hv, Dv]`, fp32."""
        shape = self.shape
        sizes = (shape.key_dim, shape.key_dim, shape.value_dim)
        q, k, v = F.silu(mixed).float().split(sizes, -1)
        q, k = (x.unflatten(-1, (shape.linear_num_key_heads, -1)) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q = q * shape.linear_key_head_dim**-0.5
        repeats = shape.linear_num_value_heads // shape.linear_num_key_heads
        q, k = (x.repeat_interleave(repeats, 2) for x in (q, k))
        return q, k, v.unflatten(-1, (shape.linear_num_value_heads, -1))

    def _gates(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        a, b = self.in_proj_a(x, dtype).float(), self.in_proj_b(x, dtype).float()
        return -self.A_log.exp() * F.softplus(a + self.dt_bias), torch.sigmoid(b)

    def _finish(self, y: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        z = self.in_proj_z(x, dtype).float().unflatten(-1, y.shape[-2:])
        return self.out_proj((self.norm(y.to(dtype)) * F.silu(z)).flatten(-2), dtype)


class GatedAttention(nn.Module):
    """Full attention with a sigmoid gate on its output; the gate's rows lie in `q_proj`."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, head = shape.hidden_size, shape.head_dim
        self.q_proj = Linear(hidden, 2 * shape.num_attention_heads * head)
        self.k_proj = Linear(hidden, shape.num_key_value_heads * head)
        self.v_proj = Linear(hidden, shape.num_key_value_heads * head)
        self.o_proj = Linear(shape.num_attention_heads * head, hidden)
        self.q_norm = RMSNorm(head, shape.rms_norm_eps)
        self.k_norm = RMSNorm(head, shape.rms_norm_eps)

    def _project(
        self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shape = self.shape
        both = self.q_proj(x, dtype).unflatten(-1, (shape.num_attention_heads, -1))
        q, gate = both.chunk(2, -1)
        k = split_heads(self.k_proj(x, dtype), shape.num_key_value_heads)
        v = split_heads(self.v_proj(x, dtype), shape.num_key_value_heads)
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin).to(dtype)
        return q, rotate(self.k_norm(k), cos, sin).to(dtype), v, gate.flatten(-2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """`x [B, T, H]` to `[B, T, H]`; `cos, sin [T, rotary / 2]`."""
        q, k, v, gate = self._project(x, cos, sin, dtype)
        repeats = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(repeats, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._finish(y, gate, dtype)

    def step(
        self,
        x: Tensor,
        cache: LayerCache,
        position: Tensor,
        cos: Tensor,
        sin: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """One token `x [B, 1, H]` at `position [1]` int64; the cache is updated in place."""
        keys, values = cache
        q, k, v, gate = self._project(x, cos[position], sin[position], dtype)
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        visible = torch.arange(keys.shape[2], device=x.device) <= position
        grouped = q.view(q.shape[0], keys.shape[1], -1, q.shape[-1])
        scores = (grouped @ keys.transpose(-1, -2)).float() * self.shape.head_dim**-0.5
        weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), -1).to(dtype)
        return self._finish((weights @ values).view_as(q), gate, dtype)

    def _finish(self, y: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
        y = y.transpose(1, 2).flatten(-2)
        return self.o_proj(y * torch.sigmoid(gate.float()).to(dtype), dtype)


class Layer(nn.Module):
    """A pre-norm layer; the residual stream is fp32."""

    def __init__(self, shape: TargetShape, index: int) -> None:
        super().__init__()
        self.is_linear = shape.is_linear(index)
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(shape)
        else:
            self.self_attn = GatedAttention(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        inner = self.input_layernorm(x)
        if self.is_linear:
            x = x + self.linear_attn(inner, dtype).float()
        else:
            x = x + self.self_attn(inner, cos, sin, dtype).float()
        return x + self.mlp(self.post_attention_layernorm(x), dtype).float()

    def step(
        self,
        x: Tensor,
        cache: LayerCache,
        position: Tensor,
        cos: Tensor,
        sin: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        inner = self.input_layernorm(x)
        if self.is_linear:
            x = x + self.linear_attn.step(inner, cache, dtype).float()
        else:
            x = x + self.self_attn.step(inner, cache, position, cos, sin, dtype).float()
        return x + self.mlp(self.post_attention_layernorm(x), dtype).float()


class Target(nn.Module):
    """Embeddings (which are the head, too), layers and the final norm."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, i) for i in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        initialise(self.named_parameters(), shape.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if name.endswith("conv1d.weight"):
                nn.init.uniform_(parameter, -0.5, 0.5)
            elif name.endswith("A_log"):
                parameter.data.copy_(torch.linspace(1, 8, parameter.numel()).log())
            elif name.endswith("dt_bias"):
                time = torch.linspace(math.log(0.002), math.log(0.1), parameter.numel()).exp()
                parameter.data.copy_(time + torch.log(-torch.expm1(-time)))

    def rope(self, positions: int) -> tuple[Tensor, Tensor]:
        """Tables for `forward` and `step`, on the model's device."""
        device = self.embed_tokens.weight.device
        return rope_tables(positions, self.shape.rotary_dim, self.shape.rope_theta, device)

    def forward(
        self,
        tokens: Tensor,
        tables: tuple[Tensor, Tensor],
        dtype: torch.dtype,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """`tokens [B, T]` to the normed hidden states `[B, T, H]` fp32 and the taps.

        The taps `[B, T, len(taps) * H]` in `dtype` are the residual stream after those layers, in
        their order; None without any.
        """
        cos, sin = (table[: tokens.shape[1]] for table in tables)
        x = self.embed_tokens(tokens).to(dtype).float()
        found = {}
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, dtype)
            if index in taps:
                found[index] = x.to(dtype)
        return self.norm(x), torch.cat([found[i] for i in taps], -1) if taps else None

    def head(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits in `dtype`."""
        return F.linear(hidden.to(dtype), self.embed_tokens.weight.to(dtype))

    def make_cache(self, batch: int, capacity: int, dtype: torch.dtype) -> list[LayerCache]:
        """Empty caches for `step`, one a layer."""
        shape, device = self.shape, self.embed_tokens.weight.device
        channels = 2 * shape.key_dim + shape.value_dim
        caches: list[LayerCache] = []
        for index in range(shape.num_hidden_layers):
            if shape.is_linear(index):
                dims = (shape.linear_num_value_heads, shape.linear_key_head_dim)
                taps = shape.linear_conv_kernel_dim - 1
                window = torch.zeros(batch, taps, channels, device=device, dtype=dtype)
                state = torch.zeros(batch, *dims, shape.linear_value_head_dim, device=device)
                caches.append((window, state))
            else:
                size = (batch, shape.num_key_value_heads, capacity, shape.head_dim)
                keys, values = (torch.zeros(size, device=device, dtype=dtype) for _ in range(2))
                caches.append((keys, values))
        return caches

    def step(
        self,
        tokens: Tensor,
        position: Tensor,
        tables: tuple[Tensor, Tensor],
        caches: Sequence[LayerCache],
        dtype: torch.dtype,
    ) -> Tensor:
        """Logits `[B, V]` after one more token a row, `tokens [B]` at `position [1]` int64."""
        x = self.embed_tokens(tokens)[:, None].to(dtype).float()
        for layer, cache in zip(self.layers, caches, strict=True):
            assert isinstance(layer, Layer)
            x = layer.step(x, cache, position, *tables, dtype)
        return self.head(self.norm(x)[:, 0], dtype)
