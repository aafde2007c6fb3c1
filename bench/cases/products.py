"""Products of a block's rows with the weights of a model, its experts included."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx

from dflash_native import ops, reference

from ..timing import on_cpu
from . import Case, Inputs, Point, Results, Variant, operation, total

CHECKED = 64
"""Outputs that the reference gives: the first ones."""
GROUP = 64


def projections(config: Any) -> dict[str, tuple[int, int]]:
    """The large weights of a layer and the head: K and N, each size once."""
    hidden, dim = config.hidden_size, config.head_dim
    found: dict[str, tuple[int, int]] = {}
    if hasattr(config, "linear_num_value_heads"):
        values = config.linear_num_value_heads * config.linear_value_head_dim
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        found["in_proj_qkv"] = hidden, 2 * keys + values
        found["out_proj"] = values, hidden
    else:
        found["q_proj"] = hidden, config.num_attention_heads * dim
    if hasattr(config, "intermediate_size"):
        found["up_proj"] = hidden, config.intermediate_size
        found["down_proj"] = config.intermediate_size, hidden
    found["lm_head"] = hidden, config.vocab_size
    return {name: size for name, size in found.items() if name != "out_proj" or size[0] != hidden}


def _weight(at: Point, *shape: int) -> list[mx.array]:
    dense = (mx.random.normal(shape) * shape[-1] ** -0.5).astype(at.mlx_dtype)
    return [dense] if at.bits == 16 else list(mx.quantize(dense, GROUP, at.bits))


def _bytes_of_weight(at: Point, outputs: int, inputs: int) -> int:
    if at.bits == 16:
        return outputs * inputs * at.mlx_dtype.size
    return outputs * inputs * at.bits // 8 + 2 * outputs * (inputs // GROUP) * at.mlx_dtype.size


def _pack(inputs: Inputs, at: Point, first: int) -> Inputs:
    weight = ops.pack_matmul(*inputs[first:], group_size=GROUP, bits=at.bits)
    return (*inputs[:first], weight)


@operation("verify_matmul", "bits")
def matmul(at: Point) -> Iterator[Case]:
    """Each projection: `B * T` rows of activations."""
    rows = at.batch * at.rows
    form = {} if at.bits == 16 else {"group_size": GROUP, "bits": at.bits}

    def ours(x: mx.array, *weight: Any) -> Results:
        return [ops.verify_matmul(x, *weight, **form)]

    def stock(x: mx.array, *weight: mx.array) -> Results:
        return [x @ weight[0].T if at.bits == 16 else mx.quantized_matmul(x, *weight, **form)]

    def expected(x: mx.array, *weight: mx.array) -> Results:
        return [reference.verify_matmul(x, *(part[:CHECKED] for part in weight), **form)]

    for name, (inputs, outputs) in projections(at.config).items():
        size = _bytes_of_weight(at, outputs, inputs)
        # On a CPU MLX is fast in fp32 alone.
        most = 1e8 if at.bits != 16 else 5e8 if at.dtype != "float32" else float("inf")
        slow = on_cpu and rows * size > most
        yield Case(
            "verify_matmul",
            f"{name} {inputs}x{outputs}",
            lambda k=inputs, n=outputs: (at.normal(rows, k), *_weight(at, n, k)),
            [
                Variant("ours", ours, partial(_pack, at=at, first=1) if on_cpu else None),
                Variant("mlx", stock, skip="minutes of it on a CPU" if slow else ""),
            ],
            expected,
            bytes=size + rows * (inputs + outputs) * at.mlx_dtype.size,
            flops=2 * rows * inputs * outputs,
            select=lambda results: [results[0][:, :CHECKED]],
        )


@operation("verify_gather_matmul", "bits")
def gather_matmul(at: Point) -> Iterator[Case]:
    """The up projection of the experts that a random router picks for each row."""
    config, rows = at.config, at.batch * at.rows
    if not hasattr(config, "num_experts"):
        return
    experts, each = config.num_experts, config.num_experts_per_tok
    inputs, outputs = config.hidden_size, config.moe_intermediate_size
    form = {} if at.bits == 16 else {"group_size": GROUP, "bits": at.bits}
    picked = mx.argsort(mx.random.normal((rows, experts)), axis=-1)[:, :each]
    mx.eval(picked)

    def ours(x: mx.array, *weight: Any) -> Results:
        return [ops.verify_gather_matmul(x, weight[0], picked, *weight[1:], **form)]

    def lm(x: mx.array, *weight: mx.array) -> Results:
        x = x[:, None]
        if at.bits == 16:
            y = mx.gather_mm(x, weight[0].swapaxes(-1, -2), rhs_indices=picked)
        else:
            y = mx.gather_qmm(x, *weight, rhs_indices=picked, transpose=True, **form)
        return [y.squeeze(-2)]

    def expected(x: mx.array, *weight: mx.array) -> Results:
        some = [part[:, :CHECKED] for part in weight]
        return [reference.verify_gather_matmul(x, some[0], picked, *some[1:], **form)]

    touched = len({index for row in picked.tolist() for index in row})
    size = touched * _bytes_of_weight(at, outputs, inputs)
    slow = on_cpu and rows * each * outputs * inputs > 2e8
    yield Case(
        "verify_gather_matmul",
        f"{each} of {experts} experts {inputs}x{outputs}",
        lambda: (at.normal(rows, 1, inputs), *_weight(at, experts, outputs, inputs)),
        [
            Variant("ours", ours, partial(_pack, at=at, first=1) if on_cpu else None),
            Variant("mlx-lm", lm, skip="minutes of it on a CPU" if slow else ""),
        ],
        expected,
        bytes=size + total(picked) + rows * (inputs + each * outputs) * at.mlx_dtype.size,
        flops=2 * rows * each * inputs * outputs,
        select=lambda results: [results[0][..., :CHECKED]],
    )
