"""A fixed sample of the mutants of `python -m tests.metal mutate`, and the tables of survivors."""

from __future__ import annotations

from collections import Counter

from . import mutate
from .equivalents import BEYOND_THE_EMULATOR, EQUIVALENT
from .mutants import every


def test_the_sample_is_noticed() -> None:
    chosen = mutate.sample(quick=True)
    assert len({mutant.kind for mutant in chosen}) >= 6
    judged = [(m, *mutate.classify(m, v)) for m, v in mutate.judge_all(chosen, jobs=2)]
    unknown = [str(m) for m, outcome, why in judged if outcome == "alive" and not why]
    assert not unknown
    counts = Counter(outcome for _, outcome, _ in judged)
    assert counts["killed"] >= 12 and mutate.score(counts) >= mutate.FLOOR, counts


def test_the_whole_run_has_mutants_enough() -> None:
    chosen = mutate.sample()
    assert len(chosen) >= 100 and len({m.kind for m in chosen}) >= 6
    assert {m.file for m in chosen} == {*mutate.files()}
    assert chosen == mutate.sample()


def test_what_does_not_compile_is_invalid() -> None:
    (mutant, *_) = mutate.sample(only=["kv_write.h"])
    assert mutate.judge(mutant._replace(new="nonsense;")).outcome == "invalid"
    assert mutate.judge(mutant._replace(new=mutant.old)).outcome == "survived"


def test_every_explained_survivor_is_a_mutant() -> None:
    of_files = [m for name in mutate.files() for m in every(name)]
    lines = {(m.file, m.new.strip()) for m in of_files}
    assert {*EQUIVALENT} <= lines
    assert {*BEYOND_THE_EMULATOR} <= {(m.file, m.kind, m.old.strip()) for m in of_files}
