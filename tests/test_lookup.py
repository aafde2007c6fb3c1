"""LookupDrafter: what it finds, when it keeps silent, and that it changes no token."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from decoding import Spoilt, decoded
from dflash_native import costs, load_demo
from dflash_native.drafters import LookupDrafter
from dflash_native.drafters import lookup as lookup_module
from dflash_native.drafters.lookup import NgramIndex
from dflash_native.sampling import Sampling
from dflash_native.session import Session
from dflash_native.targets import Target
from test_targets import VOCAB, make_model

PENDING = mx.array([[0]])


def begin(tokens, **options):
    session = LookupDrafter(**options).begin(None)
    session.observe(tokens)
    return session


def proposed(session, count=15):
    return session.propose(PENDING, session.index.size - 1, count).tolist()[0]


def expected_match(text, shortest, longest, candidates):
    """By trying every place: the longest match and its last position, the latest of equals."""
    last, best = len(text) - 1, (0, -1)
    places = [
        end
        for end in range(shortest - 1, last)
        if text[end - shortest + 1 : end + 1] == text[last - shortest + 1 :]
    ]
    for end in places[-candidates:]:
        length = 0
        while length < longest and end >= length and text[end - length] == text[last - length]:
            length += 1
        best = max(best, (length, end))
    return best


@pytest.mark.parametrize("vocab", [2, 5, 200])
@pytest.mark.parametrize(("shortest", "longest"), [(1, 4), (2, 32), (3, 3)])
def test_it_finds_the_longest_and_of_those_the_latest_match(vocab, shortest, longest, monkeypatch):
    """Over texts that grow by one token or many, through several segments of the index."""
    monkeypatch.setattr(lookup_module, "_TAIL", 50)
    source = random.Random(vocab)
    index, text = NgramIndex(shortest, longest), []
    found = 0
    while len(text) < 700:
        new = [source.randrange(vocab) for _ in range(source.choice([1, 1, 1, 2, 60]))]
        if len(text) > 30 and source.random() < 0.3:
            at = source.randrange(len(text) - 20)
            new = text[at : at + 20]
        index.append(new)
        text += new
        length, end = expected_match(text, shortest, longest, 4096)
        tokens, match = index.continuation(6)
        if length < shortest:
            assert (tokens, match) == ([], 0)
            continue
        found += 1
        after = text[end + 1 :]
        if length >= len(after):
            after = (after * 6)[:6]
        assert (tokens, match) == (after[:6], length)
    assert found > 5 and len(index._segments) >= 5


def test_no_segment_is_sorted_again(monkeypatch):
    """A prompt is one, and the output adds one for each 2,048 tokens."""
    session = begin([token % 977 for token in range(50_000)])
    first = session.index._segments[0]
    for token in range(5000):
        session.observe([token % 100])
    assert session.index._segments[0] is first
    assert len(session.index._segments) == 3
    assert sum(len(segment) for segment in session.index._segments) == session.index._sorted - 1


def test_partial_proposals_and_text_that_repeats_itself():
    assert proposed(begin([1, 2, 3])) == []
    assert proposed(begin([7, 8, 1, 2, 3, 9, 7, 8])) == [1, 2, 3, 9, 7, 8]  # the text ends there
    assert proposed(begin([7, 8, 1, 2, 3, 9, 7, 8]), 2) == [1, 2]
    assert proposed(begin([4, 5, 6, 4, 5, 6, 4, 5]), 7) == [6, 4, 5, 6, 4, 5, 6]
    assert proposed(begin([3, 3, 3]), 4) == [3] * 4
    assert proposed(begin([5]), 4) == proposed(begin([5, 5]), 4) == []
    assert proposed(begin([5, 5], shortest=1), 4) == [5] * 4


def test_the_latest_of_equal_matches_wins_and_a_longer_one_beats_it():
    assert proposed(begin([1, 2, 10, 1, 2, 20, 1, 2]), 1) == [20]
    assert proposed(begin([9, 1, 2, 10, 8, 1, 2, 20, 9, 1, 2]), 1) == [10]
    assert proposed(begin([9, 1, 2, 10, 8, 1, 2, 20, 9, 1, 2], longest=2), 1) == [20]


def test_wrong_guesses_halve_the_proposals_and_right_ones_bring_them_back():
    """In silence it goes on to guess, and the text ends the silence."""
    session = begin([1, 2, 3] * 10)
    lengths = []
    for token in [50, 1, 2, 60, 1, 2, 61, 1, 2, 62, 1, 2, 63, 1, 2, 3] + [1, 2, 3] * 4:
        lengths.append(len(proposed(session)))
        session.observe([token])
    assert lengths[0] == 15 and 0 in lengths[4:]
    assert lengths[-1] == 15
    twin = begin([1, 2, 3] * 10)
    assert lengths[0] == len(proposed(twin))
    for _ in range(40):  # wrong for ever: nothing is proposed, and still it guesses
        guess = proposed(twin)
        twin.observe([2 if twin._guess != 2 else 3] if twin._guess else [1])
    assert guess == [] and twin._misses == 4


def test_a_round_that_was_taken_back_asks_again_and_gets_the_same():
    session = begin([1, 2, 3, 1, 2])
    first = proposed(session)
    session.observe([])
    assert proposed(session) == first != [] and session._misses == 0


def test_bad_arguments_are_refused():
    for options, message in (
        ({"max_drafts": 0}, "max_drafts of at least 1 but got 0"),
        ({"shortest": 0}, "1 <= shortest <= longest but got shortest=0 and longest=32"),
        ({"shortest": 9, "longest": 8}, "shortest=9 and longest=8"),
    ):
        with pytest.raises(ValueError, match=rf"^\[LookupDrafter\] expected .*{message}"):
            LookupDrafter(**options)
    with pytest.raises(ValueError, match=r"\[propose\] expected position 2 but got 5"):
        begin([1, 2, 3]).propose(PENDING, 5, 3)


# ---- in a session

PROMPT = [5, 3, 8, 5, 3]
BIAS = {token: -1e9 for token in range(6, VOCAB)}
SAMPLED = {
    "greedy": Sampling(logit_bias=BIAS, repetition_penalty=1.2),
    "sampled": Sampling(logit_bias=BIAS, temperature=0.7, seed=2),
}
"""Over six tokens, so that there is something to look up in what a random model says."""


class Stubborn(LookupDrafter):
    """Does not back off, or a hundred rejections would take thousands of tokens."""

    def begin(self, target):
        session = super().begin(target)
        observe = session.observe

        def forgetting(tokens):
            observe(tokens)
            session._misses = 0

        session.observe = forgetting
        return session


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next", "llama"])
def target(request):
    mx.set_default_device(mx.cpu)
    return Target(make_model(request.param))


@pytest.mark.parametrize("sampling", SAMPLED.values(), ids=SAMPLED)
@pytest.mark.parametrize("block_size", [2, 5, 16])
def test_512_tokens_with_a_hundred_rejections_equal_plain_decoding(target, block_size, sampling):
    plain = decoded(target, PROMPT, 512, sampling=sampling).tokens
    options = {"block_size": block_size, "sampling": sampling}
    session = decoded(target, PROMPT, 512, Spoilt(Stubborn(), 0.5), **options)
    assert session.stats.rejections >= 100 and session.stats.accepted >= 30, session.stats
    assert session.tokens == plain
    careful = decoded(target, PROMPT, 512, LookupDrafter(), **options)
    assert careful.tokens == plain
    assert careful.stats.rejections < session.stats.rejections
    assert session.tokens != [*plain[:-1], plain[-1] ^ 1]  # the control


def test_the_demo_pair_with_rejections():
    model, tokenizer, _ = load_demo(mx.bfloat16)
    target = Target(model)
    prompt = tokenizer.encode("def fibonacci(n):\n    ")
    for sampling in (None, Sampling(temperature=1.0, seed=4)):
        plain = decoded(target, prompt, 512, sampling=sampling)
        for block_size in (4, 16):
            options = {"block_size": block_size, "sampling": sampling}
            session = decoded(target, prompt, 512, Spoilt(Stubborn(), 0.3), **options)
            assert session.tokens == plain.tokens
            assert session.stats.rejections >= 100 and session.stats.accepted > 20


def test_a_round_without_drafts_is_a_plain_step(target):
    """Every width from 1 on occurs, and the host waits once a round all the same."""
    plain = decoded(target, PROMPT, 200).tokens
    session = Session(target, LookupDrafter())
    session.prefill(PROMPT)
    widths = set()
    while len(session.tokens) < 200:
        result = session.round(200 - len(session.tokens))
        widths.add(len(result.drafts))
        assert len(result.tokens) == result.accepted + 1 <= len(result.drafts) + 1
    assert session.tokens == plain[:200]
    assert 0 in widths and max(widths) > 3
    assert session.stats.synchronisations == session.stats.rounds
    assert session.stats.drafted == sum(session.stats.drafted_at)


@pytest.mark.parametrize(
    "answer",
    [mx.zeros((1, 4), mx.int32), mx.zeros((3,), mx.int32), mx.zeros((1, 2), mx.float32)],
    ids=["too many", "flat", "no ids"],
)
def test_a_proposal_that_does_not_fit_is_refused(target, answer):
    drafter = LookupDrafter(3)
    session = Session(target, drafter)
    session.prefill(PROMPT)
    session._draft.propose = lambda *args: answer
    with pytest.raises(ValueError, match=r"expected drafts int32 \(1, n\) with n in 0 … 3 but the"):
        session.round()
    assert session.tokens == PROMPT


def test_the_cost_of_a_width_is_that_of_a_full_block(target, monkeypatch):
    """A random text has nothing to look up: without filling every round would be a plain step."""
    widths = []
    verify = Target.forward

    def watched(self, tokens, cache, **options):
        widths.append(tokens.shape[1])
        return verify(self, tokens, cache, **options)

    monkeypatch.setattr(Target, "forward", watched)
    found = costs.measure(target, LookupDrafter(7, shortest=20), repeats=1)
    assert list(found) == [1, 2, 3, 4, 6, 8]
    assert {*widths} >= {*found}


def test_auto_block_sizes_with_a_drafter_that_is_often_silent(target):
    """Rounds for which it had nothing are plain steps, and the statistics say so."""
    plain = decoded(target, PROMPT, 200, sampling=SAMPLED["sampled"]).tokens
    table = costs.Costs({0: {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.5, 16: 2.0}})
    options = {"block_size": "auto", "costs": table, "sampling": SAMPLED["sampled"]}
    session = decoded(target, PROMPT, 200, LookupDrafter(), **options)
    assert session.tokens == plain
    assert session.stats.rejections > 2 and len(session.stats.choices) > 2
    assert session.stats.choices["1 empty"] > 30 and "1 rate" not in session.stats.choices
    assert sum(session.stats.choices.values()) == session.stats.rounds


def test_a_chats_next_turn_is_searched_too(target):
    session = decoded(target, PROMPT, 20, LookupDrafter())
    session.prefill([9, 8, 7, 6, 9, 8, 7, 6, 9, 8])
    before = list(session.tokens)
    assert session.round().drafts[:4] == [7, 6, 9, 8]
    assert session.tokens[len(before) - 1 :] != before[len(before) - 1 :]
    plain = Session(target)
    plain.prefill(before)
    plain.round()
    assert session.tokens[: len(plain.tokens)] == plain.tokens
    assert VOCAB > max(session.tokens)
