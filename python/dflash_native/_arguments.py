"""What the operations check before the extension does."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import cast

import mlx.core as mx

Rows = mx.array | Sequence[int]
"""A number for each row of a batch, on the device or on the host."""


def check_arrays(operation: str, **arrays: object) -> None:
    """Raises TypeError, by name, unless each is an mx.array."""
    for name, array in arrays.items():
        if not isinstance(array, mx.array):
            kind = type(array).__name__
            raise TypeError(f"[{operation}] expected {name} to be an mx.array but got {kind}.")


def per_row(operation: str, name: str, rows: Rows, batch: int, limit: int | None) -> mx.array:
    """Host values checked and moved to the device; device values as they are."""
    if isinstance(rows, mx.array):
        return rows
    values = [operator.index(row) for row in rows]
    if len(values) != batch:
        raise ValueError(f"[{operation}] expected {batch} values of {name} but got {len(values)}.")
    for row, value in enumerate(values):
        if limit is not None and not 0 <= value <= limit:
            raise ValueError(
                f"[{operation}] expected {name}[{row}] in 0 .. {limit} but got {value}."
            )
    return mx.array(values, dtype=mx.int32)


def size(array: mx.array, axis: int) -> int | None:
    """Or None where there is no such axis: the operation itself then refuses the shape."""
    return array.shape[axis] if array.ndim > axis else None


def token_ids(operation: str, tokens: Sequence[int] | mx.array, vocab_size: int) -> list[int]:
    """A text's token ids on the host; raises ValueError where there are none or one is outside."""
    if isinstance(tokens, mx.array):
        if not mx.issubdtype(tokens.dtype, mx.integer):
            raise ValueError(f"[{operation}] expected token ids but got {tokens.dtype}.")
        tokens = cast("list[int]", tokens.reshape(-1).tolist())
    ids = [operator.index(token) for token in tokens]
    if not ids:
        raise ValueError(f"[{operation}] expected at least one token but got an empty prompt.")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(
            f"[{operation}] expected token ids in 0 … {vocab_size - 1} (the target's vocabulary) "
            f"but got {outside[0]}: is the tokenizer the target's?"
        )
    return ids
