"""The cases of the bitwise matrix: every pair of values in CI, every combination on request."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

FULL = os.environ.get("DFLASH_FULL_MATRIX") == "1"
"""Whether to run every combination, and long contexts."""

Case = dict[str, Any]


def every(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """The full product."""
    return [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Few cases in which any two factors take any two of their values together, always the same.

    Each case starts from the first pair that is still missing and takes, factor by factor, the
    value that adds most.
    """
    missing = {
        frozenset(pair)
        for a, b in combinations(factors, 2)
        for pair in product(
            ((a, value) for value in factors[a]), ((b, value) for value in factors[b])
        )
    }
    order = sorted(missing, key=lambda pair: sorted(map(repr, pair)))
    cases: list[Case] = []
    for first in order:
        if first not in missing:
            continue
        chosen = dict(first)
        for name, values in factors.items():
            if name not in chosen:
                gains = {value: len(_pairs(chosen | {name: value}) & missing) for value in values}
                chosen[name] = max(values, key=lambda value: gains[value])
        missing -= _pairs(chosen)
        cases.append({name: chosen[name] for name in factors})
    return cases


def grouped(cases: Sequence[Case], names: Sequence[str]) -> list[tuple[Case, list[Case]]]:
    """The cases that agree in the factors of `names`, together: what they agree in, and they."""
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(tuple(case[name] for name in names), []).append(case)
    return [(dict(zip(names, key, strict=True)), held) for key, held in groups.items()]


def _pairs(case: Case) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def title(case: Case) -> str:
    """A test's id."""
    return "-".join(_words(case))


def _words(case: Case) -> Iterator[str]:
    for name, value in case.items():
        text = str(value).rpartition(".")[2]
        yield f"{name}{text}" if text.isdigit() else text
