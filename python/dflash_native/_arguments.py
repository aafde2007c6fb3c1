"""What the operations check before the extension does."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import SupportsFloat, cast

import mlx.core as mx
import numpy as np

Rows = mx.array | Sequence[int]
"""A number for each row of a batch, on the device or on the host."""


def integer(
    operation: str, name: str, value: object, low: float = -math.inf, high: float = math.inf
) -> int:
    """`value` as an int. Raises TypeError, by name, for what is none (a bool is none), and
    ValueError outside `low … high`.
    """
    try:
        found = None if isinstance(value, bool) else operator.index(value)  # type: ignore
    except TypeError:
        found = None
    if found is None:
        raise TypeError(f"[{operation}] expected {name} to be an integer but got {value!r}.")
    if not low <= found <= high:
        raise ValueError(f"[{operation}] expected {name} {_within(low, high)} but got {found}.")
    return found


def number(
    operation: str, name: str, value: object, low: float = -math.inf, high: float = math.inf
) -> float:
    """`value` as a float. Raises TypeError, by name, for what is no number (a bool is none), and
    ValueError for one that is not finite or outside `low … high`.
    """
    found = None
    if isinstance(value, SupportsFloat) and not isinstance(value, bool | np.bool_):
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        except (TypeError, ValueError):
            pass  # an array
    if found is None:
        raise TypeError(f"[{operation}] expected {name} to be a number but got {value!r}.")
    if not math.isfinite(found):
        raise ValueError(f"[{operation}] expected {name} to be finite but got {found}.")
    if not low <= found <= high:
        raise ValueError(f"[{operation}] expected {name} {_within(low, high)} but got {found:g}.")
    return found


def _within(low: float, high: float) -> str:
    least, most = (f"{x:g}" if isinstance(x, float) else str(x) for x in (low, high))
    return f"of at least {least}" if high == math.inf else f"in {least} … {most}"


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
    """A text's token ids on the host. Raises ValueError where there are none or one is outside the
    vocabulary, TypeError for what is no id.
    """
    if isinstance(tokens, mx.array):
        if not mx.issubdtype(tokens.dtype, mx.integer):
            raise ValueError(f"[{operation}] expected token ids but got {tokens.dtype}.")
        if tokens.ndim == 0 or tokens.size != tokens.shape[-1]:
            raise ValueError(
                f"[{operation}] expected the token ids of one text but got shape {tokens.shape}."
            )
        tokens = cast("list[int]", tokens.reshape(-1).tolist())
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        raise TypeError(f"[{operation}] expected token ids but got {tokens!r}.")
    ids = []
    for token in tokens:
        try:
            ids.append(operator.index(token))
        except TypeError:
            raise TypeError(f"[{operation}] expected token ids but got {token!r}.") from None
    if not ids:
        raise ValueError(f"[{operation}] expected at least one token but got an empty prompt.")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(
            f"[{operation}] expected token ids in 0 … {vocab_size - 1} (the target's vocabulary) "
            f"but got {outside[0]}: is the tokenizer the target's?"
        )
    return ids
