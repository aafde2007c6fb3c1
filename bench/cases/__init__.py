"""The registry of kernels that are timed: for each operation its inputs, its variants, its oracle.

To add one, write a function that yields a `Case` for a `Point`, decorate it with `@operation`, and
import its module at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

Inputs = tuple[Any, ...]
Results = Sequence[mx.array]

TOLERANCES = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}
"""Of an operation against its reference, by the dtype of a result: |difference| / |expected|."""
BASELINE_TOLERANCE = 0.2
"""Of a baseline, which may round between its operations (MLX's quantised products on a CPU are up
to 0.1 away); more is another calculation."""


class WrongResult(AssertionError):
    """An operation whose results are not those of its reference."""


@dataclass(frozen=True)
class Point:
    """Where an operation is timed."""

    config: SimpleNamespace
    """The model's configuration, by mlx-lm's names."""
    rows: int
    """T, the inputs of a call."""
    batch: int
    context: int
    """Committed keys before the call."""
    dtype: str
    """Of activations, and of weights in 16 bits and more."""
    bits: int
    """Of weights: 16 for `dtype` itself."""

    @property
    def mlx_dtype(self) -> mx.Dtype:
        """`dtype` as MLX has it."""
        return getattr(mx, self.dtype)

    def normal(self, *shape: int) -> mx.array:
        """Random activations."""
        return mx.random.normal(shape).astype(self.mlx_dtype)


@dataclass(frozen=True)
class Variant:
    """One way to calculate a case."""

    name: str
    """"ours", "mlx" (plain operations), "mx.compile", "mx.fast" or "mlx-lm"."""
    function: Callable[..., Results]
    prepare: Callable[[Inputs], Inputs] | None = None
    """Done to each set of inputs before the clock, as packing weights is."""
    skip: str = ""
    """Why it is not timed here."""
    compared: int | None = None
    """How many of its results are the reference's, where not all are."""


@dataclass(frozen=True)
class Case:
    """One operation at one point."""

    operation: str
    shape: str
    """The sizes that matter, to be read."""
    make: Callable[[], Inputs]
    variants: Sequence[Variant]
    """Ours first."""
    reference: Callable[..., Results]
    bytes: int
    """The fewest that a call must move: each input read once, each output written once."""
    flops: int
    """Of additions and multiplications; 0 for an operation that memory alone bounds."""
    select: Callable[[Results], Results] = field(default=lambda results: results)
    """The part of the results that the reference gives, where it gives a part."""
    hands_on: bool = False
    """Whether the first result takes the place of the first input in the next call."""

    def errors(self, variant: Variant, inputs: Inputs) -> list[float]:
        """|difference| / |expected| of each result, infinite where one is not finite."""
        found = self.select(variant.function(*prepared(variant, inputs)))[: variant.compared]
        expected = self.reference(*inputs)[: variant.compared]
        return [_error(a, b) for a, b in zip(found, expected, strict=True)]

    def check(self, inputs: Inputs) -> dict[str, float | str]:
        """The error of each variant, or why it does not run here.

        Raises WrongResult where ours is not the reference's.
        """
        ours, *others = self.variants
        errors = self.errors(ours, inputs)
        limits = [TOLERANCES[each.dtype] for each in self.reference(*inputs)]
        for error, limit in zip(errors, limits, strict=True):
            if not error <= limit:
                raise WrongResult(
                    f"[{self.operation}] {self.shape}: expected results within {limit:.0e} of the "
                    f"reference's but got {error:.1e}."
                )
        found: dict[str, float | str] = {ours.name: max(errors)}
        for each in others:
            try:
                found[each.name] = each.skip or max(self.errors(each, inputs))
            except Exception as refused:  # MLX has no such kernel on this backend, say
                found[each.name] = str(refused).splitlines()[0]
        return found


def prepared(variant: Variant, inputs: Inputs) -> Inputs:
    """The inputs as a variant wants them."""
    return inputs if variant.prepare is None else variant.prepare(inputs)


def _error(found: mx.array, expected: mx.array) -> float:
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    if not mx.isfinite(found).all().item():
        return float("inf")
    size = mx.maximum(mx.linalg.norm(expected), 1e-30)
    return float((mx.linalg.norm(found - expected) / size).item())


@dataclass(frozen=True)
class Operation:
    """An entry of the registry."""

    cases: Callable[[Point], Iterable[Case]]
    """The cases at a point: none where the model has no such operation."""
    varies: frozenset[str]
    """What its time depends on beside rows, batch and dtype: "context", "bits"."""


OPERATIONS: dict[str, Operation] = {}


def operation(
    name: str, *varies: str
) -> Callable[[Callable[[Point], Iterable[Case]]], Callable[[Point], Iterable[Case]]]:
    """Puts a function that yields the cases of a point into the registry."""

    def register(cases: Callable[[Point], Iterable[Case]]) -> Callable[[Point], Iterable[Case]]:
        OPERATIONS[name] = Operation(cases, frozenset(varies))
        return cases

    return register


def compiled(function: Callable[..., Any]) -> Variant:
    """`mx.compile` of plain MLX operations."""
    return Variant("mx.compile", mx.compile(function))


def total(*arrays: mx.array) -> int:
    """Bytes of arrays."""
    return sum(array.nbytes for array in arrays)


from . import attention, products, recurrence, rowwise  # noqa: E402, F401  they fill the registry
