"""Stop rules and held-back text, without a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_native.stopping import StopRules, TextStream


class Letters:
    """A detokenizer in mlx-lm's shape whose token n is one or more letters."""

    def __init__(self, texts):
        self.texts = texts
        self.last_segment = ""

    def add_token(self, token):
        self.last_segment = self.texts[token]

    def finalize(self):
        self.last_segment = ""


def feed(texts, tokens, stop=(), eos=(), max_tokens=-1):
    """All that is shown, the reason, and how many tokens were taken."""
    rules = StopRules(eos, TextStream(Letters(texts), stop), max_tokens)
    shown = ""
    for token in tokens:
        text, reason = rules.feed(token)
        shown += text
        if reason:
            return shown, reason, rules.count
    return shown, None, rules.count


def test_the_first_stop_position_within_the_budget_wins():
    """Reported elsewhere: [10, 11, STOP, 20, 21, 22] with a budget of 5 ended at 5,
    or by length.
    """
    texts = {10: "a", 11: "b", 99: "", 20: "c", 21: "d", 22: "e"}
    block = [10, 11, 99, 20, 21, 22]
    assert feed(texts, block, eos={99}, max_tokens=5) == ("ab", "stop", 3)
    assert feed(texts, block, eos={99}, max_tokens=3) == ("ab", "stop", 3)
    assert feed(texts, block, eos={99}, max_tokens=2) == ("ab", "length", 2)
    assert feed(texts, block, eos={7}, max_tokens=5) == ("abcd", "length", 5)
    assert feed(texts, block, stop=["c"], eos={99}, max_tokens=5) == ("ab", "stop", 3)
    assert feed(texts, block, stop=["b"], eos={99}, max_tokens=5) == ("a", "stop", 2)


@pytest.mark.parametrize("stop", [["xyz"], ["yz", "q"], ["z!", "nothing", "xyz"], ["xyz!"]])
def test_a_stop_string_across_tokens_is_never_shown(stop):
    texts = {0: "ab", 1: "x", 2: "y", 3: "z!", 4: "more"}
    shown, reason, count = feed(texts, [0, 1, 2, 3, 4], stop=stop)
    expected = "abxyz!"[: min("abxyz!".find(s) for s in stop if s in "abxyz!")]
    assert (shown, reason, count) == (expected, "stop", 4)


def test_held_text_is_shown_when_it_becomes_no_stop_string():
    texts = {0: "<", 1: "en", 2: "d>", 3: "emy"}
    assert feed(texts, [0, 1, 3, 0], stop=["<end>"])[0] == "<enemy"
    assert feed(texts, [0, 1], stop=["<end>"], max_tokens=2) == ("<en", "length", 2)
    assert feed(texts, [0, 1, 2], stop=["<end>"]) == ("", "stop", 3)


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=20),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_shown_text_is_the_text_before_the_first_stop_string(pieces, stop):
    texts = dict(enumerate(pieces)) | {-1: ""}
    shown, reason, count = feed(texts, [*range(len(pieces)), -1], stop=stop, eos={-1})
    whole = ""
    for piece in pieces:  # the token that completes a stop string is the last one taken
        whole += piece
        if any(s in whole for s in stop):
            break
    found = [at for at in (whole.find(s) for s in stop) if at >= 0]
    assert shown == (whole[: min(found)] if found else whole)
    assert reason == "stop"
    assert "".join(pieces[:count]).startswith(shown)


@pytest.mark.parametrize("budget", [0, -2])
def test_a_budget_of_nothing_is_refused(budget):
    with pytest.raises(ValueError, match=f"max_tokens of at least 1 .* but got {budget}"):
        feed({}, [], max_tokens=budget)
