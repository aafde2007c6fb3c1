"""The width of a verify: replays of recorded acceptance, the session's plain steps, the costs."""

from __future__ import annotations

import json
from itertools import pairwise

import mlx.core as mx
import pytest

from bench import policy as recorded
from dflash_native import costs as measured
from dflash_native import policy
from dflash_native.policy import Costs, WidthPolicy, replay
from dflash_native.session import Session
from dflash_native.targets import Target
from scripted import ScriptedDrafter
from test_targets import make_model

TABLES = recorded.COSTS
TRACES = recorded.traces()


def spent(group, row, width=None):
    return sum(replay(trace, Costs({0: row}), 16, width) for trace in TRACES[group])


@pytest.mark.parametrize("group", TRACES)
@pytest.mark.parametrize("table", TABLES)
def test_recorded_texts_cost_hardly_more_than_at_the_best_width(table, group):
    """Within 5 % of the best fixed width, which nobody knows before, and 3 % of plain decoding."""
    row = TABLES[table]
    ours = spent(group, row)
    assert ours <= 1.05 * min(spent(group, row, width) for width in row)
    assert ours <= 1.03 * spent(group, row, 1)


@pytest.mark.parametrize("table", TABLES)
def test_no_fixed_width_does_that(table):
    """The control: each width loses more than 5 % on some set."""
    row = TABLES[table]
    best = {group: min(spent(group, row, width) for width in row) for group in TRACES}
    for width in row:
        assert any(spent(group, row, width) > 1.05 * best[group] for group in TRACES)


@pytest.mark.parametrize("length", [320, 1000, 5000])
@pytest.mark.parametrize("table", TABLES)
def test_where_nothing_is_accepted_little_is_lost(table, length, monkeypatch):
    row = TABLES[table]
    costs = Costs({0: row})
    assert replay([0] * length, costs, 16) <= 1.03 * length
    for name, value in (("EXCESS", 1e9), ("CREDIT", 1e9), ("_RETRY", 1), ("_LONGEST_RETRY", 1)):
        monkeypatch.setattr(policy, name, value)
    assert replay([0] * length, costs, 16) > 1.05 * length  # the control: nothing holds it back


def test_a_recovery_is_noticed():
    """After 300 tokens of nothing everything is accepted: soon the widest block is taken."""
    costs = Costs({0: TABLES["demo pair, CPU"]})
    wide = replay([15] * 600, costs, 16)
    assert replay([0] * 300 + [15] * 600, costs, 16) <= 1.03 * 300 + wide + 120


def test_widths_do_not_oscillate():
    """On steady acceptance the width settles: the last 60 rounds have one, or two."""
    for share in (4, 7, 15):
        choosing, widths = WidthPolicy(Costs({0: TABLES["gentle"]}), 16), []
        for _ in range(100):
            width = choosing.choose(0).width
            widths.append(width)
            choosing.record(0, width - 1, min(share, width - 1))
        assert len({*widths[-60:]}) <= 2, widths


def test_choices_keep_to_the_limit_and_to_what_was_measured():
    choosing = WidthPolicy(Costs({0: {1: 1.0, 4: 1.1, 8: 1.2, 32: 1.3}}), 16)
    for limit in (None, 1, 3, 4, 7, 8, 100):
        width = choosing.choose(0, limit).width
        assert width in (1, 4, 8) and width <= (limit or 16)
    assert choosing.choose(0).width == 8
    assert choosing.choose(0, 1) == policy.Choice(1, "fixed")


def test_costs_of_the_nearest_context():
    rows = {100: {1: 1.0}, 10_000: {1: 2.0}}
    found = [Costs(rows).at(context)[1] for context in (0, 100, 900, 1200, 500_000)]
    assert found == [1.0, 1.0, 1.0, 2.0, 2.0]
    for bad, message in (
        ({}, "at least one context"),
        ({0: {2: 1.0}}, "width 1 among them"),
        ({0: {1: 0.0}}, "positive seconds"),
        ({0: {1: 1.0, 4: float("inf")}}, "finite positive seconds"),
        ({-5: {1: 1.0}}, "for context -5"),
    ):
        with pytest.raises(ValueError, match=message):
            Costs(bad)


# ---- in a session


@pytest.fixture(scope="module")
def target():
    mx.set_default_device(mx.cpu)
    return Target(make_model("qwen3_5"))


@pytest.fixture(scope="module")
def answer(target):
    session = Session(target)
    session.prefill([5, 3, 8])
    while len(session.tokens) < 500:
        session.round()
    return session.tokens


class Phases(ScriptedDrafter):
    """Right in the first 100 tokens, wrong up to 300, right after that."""

    def begin(self, target):
        session = super().begin(target)
        propose = session.propose

        def phased(pending, position, count, sampler=None):
            self.spoil = 1.0 if 100 <= position < 300 else 0.0
            return propose(pending, position, count, sampler)

        session.propose = phased
        return session


def test_a_session_drafts_where_it_pays_and_emits_the_same_tokens(target, answer):
    """Plain steps in between are queued ahead, and the draft gets their taps before it drafts."""
    costs = Costs({0: {1: 1.0, 4: 1.7, 8: 2.0, 16: 2.6}})
    session = Session(target, Phases(answer), block_size="auto", costs=costs)
    session.prefill(answer[:3])
    queued, wide = 0, []
    while len(session.tokens) < 500:
        result = session.round(500 - len(session.tokens))
        queued += len(session._in_flight)
        wide.append((len(session.tokens), len(result.drafts) + 1))
    assert session.tokens == answer
    assert queued > 30
    choices = session.stats.choices
    assert sum(choices.values()) == session.stats.rounds
    assert {"16 rate", "1 budget"} < {*choices}
    assert {width for at, width in wide if at < 100} <= {8, 16}
    assert sum(width == 1 for at, width in wide if 120 < at < 300) > 100
    assert {width for at, width in wide if 320 < at < 490} == {16}


def test_rewinds_and_turns_between_plain_steps(target, answer):
    costs = Costs({0: {1: 1.0, 4: 1.7, 8: 2.0, 16: 2.6}})
    session = Session(target, Phases(answer), block_size="auto", costs=costs)
    session.prefill(answer[:90])
    while len(session.tokens) < 400:
        result = session.round()
        if len(result.tokens) > 1 and len(session.tokens) % 3 == 0:
            session.rewind(len(result.tokens) - 1)
        if len(session.tokens) in (150, 151):
            session.prefill(answer[len(session.tokens) :][:20])
    assert session.tokens == answer[: len(session.tokens)]


class Silent(ScriptedDrafter):
    """Has nothing to propose from token `start` to `stop`, and the answer elsewhere."""

    def __init__(self, answer, start, stop):
        super().__init__(answer, spoil=0.0, tap_layers=(), context=0)
        self.start, self.stop, self.asked = start, stop, []

    def begin(self, target):
        session = super().begin(target)
        propose = session.propose

        def silent(pending, position, count, sampler=None):
            self.asked.append(position)
            drafts = propose(pending, position, count, sampler)
            return drafts[:, :0] if self.start <= position < self.stop else drafts

        session.propose = silent
        return session


def test_a_silent_drafter_is_asked_more_and_more_seldom(target, answer):
    """It was asked before every step, so no step was queued ahead: 5 to 12 % slower than plain
    decoding, and the statistics called it "rate".
    """
    costs = Costs({0: {1: 1.0, 4: 1.7, 8: 2.0, 16: 2.6}})
    drafter = Silent(answer, 0, 10**9)
    session = Session(target, drafter, block_size="auto", costs=costs)
    session.prefill(answer[:3])
    queued = 0
    while len(session.tokens) < 303:
        session.round()
        queued += len(session._in_flight)
    assert session.tokens[:303] == answer[:303]
    assert session.stats.choices == {"1 empty": 300}
    asked = drafter.asked
    gaps = [after - before for before, after in pairwise(asked)]
    assert gaps == sorted(gaps) and gaps[:4] == [1] * 4 and gaps[-1] == 17
    assert len(asked) < 35 and abs(queued + len(asked) - 300) <= 1


def test_after_a_silence_drafts_are_soon_taken_again(target, answer):
    """Within a quarter of the silence; and a drafter that always answers is never "empty"."""
    costs = Costs({0: {1: 1.0, 4: 1.7, 8: 2.0, 16: 2.6}})
    for start, stop in ((100, 140), (100, 220), (0, 0)):
        drafter = Silent(answer, start, stop)
        session = Session(target, drafter, block_size="auto", costs=costs)
        session.prefill(answer[:3])
        while len(session.tokens) < 500:
            session.round(500 - len(session.tokens))
        assert session.tokens == answer
        empty = session.stats.choices.get("1 empty", 0)
        silence = stop - start  # less what a block from before it covers
        assert silence - 15 <= empty <= 1.25 * silence + 1 if silence else empty == 0
        assert session.stats.acceptance == 1.0


def test_a_round_without_an_answer_is_taken_back_with_what_was_queued(target, answer):
    """A stop, a rewind and a prefill after it find the session where the host has read it."""
    costs = Costs({0: {1: 1.0, 4: 1.7, 8: 2.0, 16: 2.6}})
    session = Session(target, Silent(answer, 0, 200), block_size="auto", costs=costs)
    session.prefill(answer[:3])
    while len(session.tokens) < 300:
        emitted = session.round().tokens
        if len(session.tokens) % 7 == 0:
            session.rewind((len(emitted) + 1) // 2)
        if len(session.tokens) % 50 == 0:
            session.prefill(answer[len(session.tokens) :][:3])
        if len(session.tokens) % 11 == 0:
            assert session.cache.lengths == [len(session.tokens) - 1]
    assert session.tokens == answer[: len(session.tokens)]


def test_block_size_is_a_number_or_auto(target, answer):
    with pytest.raises(ValueError, match="block_size \"auto\" or a number but got 'wide'"):
        Session(target, ScriptedDrafter(answer), block_size="wide")
    plain = Session(target, block_size="auto")
    plain.prefill([5, 3, 8])
    assert plain.round().tokens == answer[3:4]


# ---- costs


def test_costs_are_measured_once_and_kept(target, answer, tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_NATIVE_CACHE", str(tmp_path / "new"))
    drafter, calls = ScriptedDrafter(answer, max_drafts=7), []
    measure = measured.measure
    monkeypatch.setattr(measured, "measure", lambda *a: calls.append(a[2]) or measure(*a))
    first = measured.cached_or_measured(target, drafter)
    assert list(first.seconds) == [measured.CONTEXT] == calls
    assert list(first.at(0)) == [1, 2, 3, 4, 6, 8]
    assert measured.cached_or_measured(target, drafter) == first
    assert len(calls) == 1
    more = measured.cached_or_measured(target, drafter, [32])
    assert {*more.seconds} == {32, measured.CONTEXT} and calls[1:] == [32]
    measured.cached_or_measured(target, ScriptedDrafter(answer, max_drafts=5))
    assert len(calls) == 3  # another drafter has costs of its own
    file = measured.cache_file()
    assert len(json.loads(file.read_text())) == 2
    key = measured.fingerprint(target, drafter)
    wrong = [
        {"x": {"1": 1}},
        {"64": {"1": "a"}},
        {"64": {"1": -1}},
        {"64": [1]},
        {"64": {"2": 1}},
        5,
    ]
    for damage in ("{", "[]", "", *(json.dumps({key: entry}) for entry in wrong)):
        file.write_text(damage)
        assert measured.kept().get(key, {}) == {}
        assert measured.cached_or_measured(target, drafter).at(0)[1] > 0
    assert len(calls) == 12
    assert [p.name for p in file.parent.iterdir()] == ["costs.json"]


def test_a_cache_that_cannot_be_written_is_no_error(target, answer, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DFLASH_NATIVE_CACHE", str(tmp_path / "file"))
    drafter = ScriptedDrafter(answer, max_drafts=2)
    assert 1 in measured.cached_or_measured(target, drafter).at(0)


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(target, tmp_path, monkeypatch):
    """The temporary file stayed, one for each request."""
    monkeypatch.setenv("DFLASH_NATIVE_CACHE", str(tmp_path))
    drafter = ScriptedDrafter([])
    (tmp_path / "costs.json").mkdir()  # os.replace refuses a folder
    measured.keep(target, drafter, 64, {1: 1.0})
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]
    (tmp_path / "costs.json").rmdir()
    measured.keep(target, drafter, 64, {1: 1.0})  # the control
    assert measured.cached_or_measured(target, drafter).seconds == {64: {1: 1.0}}
