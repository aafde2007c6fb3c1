"""CombinedDrafter: the lookup after long matches, another drafter elsewhere."""

from __future__ import annotations

import mlx.core as mx
import pytest

from decoding import Spoilt, decoded
from dflash_native import load_demo
from dflash_native.drafters import (
    AutoregressiveDrafter,
    CombinedDrafter,
    DFlashDrafter,
    LookupDrafter,
)
from dflash_native.sampling import Sampling
from dflash_native.session import Session
from dflash_native.targets import Target
from scripted import ScriptedDrafter
from test_lookup import BIAS, Stubborn
from test_targets import make_model

REPETITIVE = '''def get_name(self):
    """Return the name of the item."""
    return self._name


def get_price(self):
    """Return the price of the item."""
    return self._price


def get_size(self):
    """Return the size of the item."""
    return self._size


def get_weight(self):
'''
PROMPT = [5, 3, 8, 5, 3, 8, 5]
SAMPLED = {
    "greedy": Sampling(logit_bias=BIAS, repetition_penalty=1.2),
    "sampled": Sampling(logit_bias=BIAS, temperature=0.7, seed=2),
}


@pytest.fixture(scope="module")
def demo():
    mx.set_default_device(mx.cpu)
    model, tokenizer, drafter = load_demo(mx.bfloat16)
    return Target(model), tokenizer, drafter


@pytest.fixture(scope="module")
def hybrid():
    mx.set_default_device(mx.cpu)
    return Target(make_model("qwen3_5"))


def test_on_repetitive_text_it_gives_more_tokens_a_round_than_either(demo):
    target, tokenizer, dflash = demo
    prompt = tokenizer.encode(REPETITIVE)
    plain = decoded(target, prompt, 160).tokens
    found = {}
    for name, drafter in (
        ("lookup", LookupDrafter()),
        ("dflash", dflash),
        ("combined", CombinedDrafter(LookupDrafter(), dflash)),
    ):
        session = decoded(target, prompt, 160, drafter)
        assert session.tokens == plain
        found[name] = session.stats.tokens_per_round
    print(found)
    assert found["combined"] > max(found["lookup"], found["dflash"])
    assert 0 < session._draft.lookup_rounds < session.stats.rounds  # both had a part
    never = CombinedDrafter(LookupDrafter(longest=1000), dflash, match=1000)
    session = decoded(target, prompt, 60, never)
    assert session._draft.lookup_rounds == 0  # the control: no match is that long
    assert session.stats.rounds == decoded(target, prompt, 60, dflash).stats.rounds


def test_the_other_ones_context_is_fed_in_every_kind_of_round(demo):
    """After rounds of either, and plain ones, its next block is that of a fresh session's."""
    target, tokenizer, dflash = demo
    session = Session(target, CombinedDrafter(LookupDrafter(), dflash))
    session.prefill(tokenizer.encode(REPETITIVE))
    kinds = []
    for number in range(14):
        before = session._draft.lookup_rounds
        session.round(1 if number % 4 == 3 else None)
        kinds.append(session._draft.lookup_rounds - before)
    assert {0, 1} == set(kinds)
    session.flush()
    position, pending = len(session.tokens) - 1, mx.array([session.tokens[-1:]])
    assert session._draft._other.position == position
    found = session._draft._other.hidden(pending, position)
    fresh = Session(target, dflash)
    fresh.prefill(session.tokens)
    expected = fresh._draft.hidden(pending, position)
    size = mx.abs(expected).max()
    assert mx.abs(found - expected).max() < 0.03 * size  # bf16, in chunks of other lengths
    other = Session(target, dflash)
    other.prefill(session.tokens[:-6])
    starved = other._draft.hidden(pending, len(session.tokens) - 7)
    assert mx.abs(starved - expected).max() > 0.1 * size  # the control: six positions less


@pytest.mark.parametrize("sampling", SAMPLED.values(), ids=SAMPLED)
@pytest.mark.parametrize("block_size", [2, 5, 16])
@pytest.mark.parametrize("other", ["scripted", "autoregressive"])
def test_512_tokens_with_a_hundred_rejections_equal_plain_decoding(
    hybrid, other, block_size, sampling
):
    plain = decoded(hybrid, PROMPT, 512, sampling=sampling).tokens
    drafters = {
        "scripted": lambda: ScriptedDrafter(plain, spoil=0.3, max_drafts=7),
        "autoregressive": lambda: AutoregressiveDrafter(make_model("qwen3_next", seed=5), 4),
    }
    drafter = Spoilt(CombinedDrafter(Stubborn(), drafters[other](), match=3), 0.4)
    options = {"block_size": block_size, "sampling": sampling}
    session = decoded(hybrid, PROMPT, 512, drafter, **options)
    assert session.tokens == plain
    assert session.stats.rejections >= 100
    assert 10 < session._draft.lookup_rounds < session.stats.rounds  # both had a part
    if sampling.temperature > 0:
        assert session._draft.lookup_rounds < session.stats.rounds - 10
    assert session.tokens != [*plain[:-1], plain[-1] ^ 1]  # the control


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_demo_pair_with_rejections(demo, temperature):
    target, tokenizer, dflash = demo
    prompt = tokenizer.encode(REPETITIVE)
    sampling = Sampling(temperature=temperature, seed=1)
    plain = decoded(target, prompt, 512, sampling=sampling).tokens
    for block_size in (4, 16):
        drafter = Spoilt(CombinedDrafter(LookupDrafter(), dflash), 0.3)
        session = decoded(target, prompt, 512, drafter, block_size=block_size, sampling=sampling)
        assert session.tokens == plain
        assert session.stats.rejections >= 100
        assert session._draft.lookup_rounds > 0


def test_each_gets_no_more_than_it_can_give(hybrid):
    scripted = ScriptedDrafter([], max_drafts=3)
    drafter = CombinedDrafter(LookupDrafter(9), scripted, match=2)
    assert drafter.max_drafts == 9
    assert (drafter.tap_layers, drafter.context_rows) == (scripted.tap_layers, None)
    assert CombinedDrafter(LookupDrafter(2), scripted).max_drafts == 3
    session = drafter.begin(hybrid)
    session.observe([1, 2, 3, 4])
    assert session.finite is None
    assert session.propose(mx.array([[4]]), 3, 9).shape == (1, 3)  # the other one's block
    assert session.finite is not None
    session.observe([1, 2, 3, 4])
    assert session.propose(mx.array([[4]]), 7, 9).tolist() == [[1, 2, 3, 4] * 2 + [1]]
    assert session.lookup_rounds == 1
    silent = CombinedDrafter(LookupDrafter(9), scripted, match=32).begin(hybrid)
    silent.observe([1, 2, 3, 4] * 2)
    assert silent.propose(mx.array([[4]]), 7, 9).shape == (1, 3)
    assert silent.lookup_rounds == 0


def test_bad_arguments_are_refused(demo, hybrid):
    lookup, dflash = LookupDrafter(longest=8), demo[2]
    with pytest.raises(TypeError, match="a LookupDrafter first but got DFlashDrafter"):
        CombinedDrafter(dflash, lookup)
    with pytest.raises(TypeError, match="a drafter second but got str"):
        CombinedDrafter(lookup, "dflash")
    for match in (0, 9):
        with pytest.raises(ValueError, match=rf"match in 1 … 8 .* but got {match}"):
            CombinedDrafter(lookup, dflash, match=match)
    with pytest.raises(ValueError, match=r"\[DFlashDrafter.begin\] expected a target of"):
        Session(hybrid, CombinedDrafter(lookup, dflash))
    assert isinstance(dflash, DFlashDrafter)
