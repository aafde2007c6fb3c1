"""The examples of docs/decoding.md, run as they are printed."""

from __future__ import annotations

import mlx.core as mx
import pytest

from dflash_native.drafters import Drafter, DraftSession
from dflash_native.session import Session
from readme import block


@pytest.fixture(scope="module")
def names():
    mx.set_default_device(mx.cpu)
    found: dict = {}
    exec(compile(block("A drafter of your own"), "docs/decoding.md", "exec"), found)
    return found


def test_the_drafter_of_the_readme_runs_and_changes_no_token(names):
    session = names["session"]
    assert isinstance(names["Bigrams"](), Drafter) and isinstance(session._draft, DraftSession)
    stats = session.stats
    assert stats.rounds == 20 and stats.tokens == len(names["tokens"])
    assert stats.accepted > 10 and stats.rejections > 0
    plain = Session(session.target)
    plain.prefill(session.tokens[: -len(names["tokens"])])
    tokens = [token for _ in names["tokens"] for token in plain.round().tokens]
    assert tokens == names["tokens"]
    assert tokens != [*tokens[:-1], tokens[-1] ^ 1]  # the control


def test_it_is_about_thirty_lines():
    lines = [line for line in block("A drafter of your own").splitlines() if line.strip()]
    assert len(lines) <= 34


def test_the_sampling_of_the_readme(capsys):
    mx.set_default_device(mx.cpu)
    exec(block("Sampling"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 50 and all(" -" in line for line in lines)
