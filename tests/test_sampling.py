"""Sampling: the target's distribution whatever is drafted, and noise that belongs to a position."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils
from scipy.stats import chisquare

from dflash_native.drafters import Proposal
from dflash_native.sampling import Sampler, Sampling
from dflash_native.session import Session
from dflash_native.targets import Target
from inputs import same
from scripted import ScriptedDrafter
from test_targets import VOCAB, make_model

TRIALS = 200_000
FOUR = [2.0, 1.5, 1.0, 0.5]


@pytest.fixture(scope="module")
def hybrid():
    mx.set_default_device(mx.cpu)
    return Target(make_model("qwen3_5"))


def decoded(target, count, sampling, drafter=None, block_size=None, prompt=(5, 3, 8)):
    session = Session(target, drafter, block_size=block_size, sampling=sampling)
    session.prefill(list(prompt))
    while len(session.tokens) < count:
        session.round(count - len(session.tokens))
    return session.tokens


def chance(counts, probabilities):
    """p of the chi-squared test: below 1e-6 the counts are not of these probabilities."""
    expected = np.asarray(probabilities, np.float64) / np.sum(probabilities) * np.sum(counts)
    return chisquare(counts, expected).pvalue


def softmax(logits):
    p = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return p / p.sum()


def histogram(tokens, size=4):
    return np.bincount(np.asarray(tokens), minlength=size)[:size]


# ---- what is drawn


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_have_the_targets_distribution(temperature):
    sampler = Sampler(Sampling(temperature=temperature, seed=3), 4)
    tokens = sampler.draw(mx.broadcast_to(mx.array(FOUR), (TRIALS, 4)), 100)
    exact = softmax(np.array(FOUR) / temperature)
    assert chance(histogram(tokens), exact) > 1e-3
    assert chance(histogram(tokens), softmax(np.array(FOUR) / temperature * 1.05)) < 1e-6


@pytest.mark.parametrize("temperature", [1e30, 1e46, 1e300])
def test_a_high_temperature_draws_from_what_is_left(temperature):
    """Infinity times 0 was not a number: ids outside the vocabulary were drawn from 1e46 on."""
    rows = mx.random.normal((400, 97), key=mx.random.key(0)) * 5
    sampler = Sampler(Sampling(temperature=temperature, top_k=5, seed=1), 97)
    left = mx.isfinite(sampler.scores(rows))
    drawn = sampler.draw(rows, 0)
    assert (left.sum(axis=1) == 5).all() and drawn.max() < 97
    assert mx.take_along_axis(left, drawn[:, None], axis=1).all()
    assert len({*drawn.tolist()}) > 50


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-308])
def test_a_low_temperature_is_the_argmax(temperature):
    """1 / temperature times a log probability of 0 was not a number."""
    rows = mx.random.normal((50, 97), key=mx.random.key(0)) * 5
    rows[0] = mx.where(mx.arange(97) == 3, 0.0, -mx.inf)
    sampler = Sampler(Sampling(temperature=temperature, seed=1), 97)
    assert mx.array_equal(sampler.draw(rows, 0), mx.argmax(rows, axis=-1))
    hot = Sampler(Sampling(temperature=2.0, seed=1), 97)
    assert not mx.array_equal(hot.draw(rows, 0), mx.argmax(rows, axis=-1))


def test_neighbouring_positions_are_independent():
    sampler = Sampler(Sampling(temperature=1.0, seed=4), 4)
    tokens = np.array(sampler.draw(mx.broadcast_to(mx.array(FOUR), (TRIALS, 4)), 0))
    exact = np.outer(softmax(FOUR), softmax(FOUR)).reshape(-1)
    pairs = histogram(tokens[:-1:2] * 4 + tokens[1::2], 16)
    assert chance(pairs, exact) > 1e-3
    assert chance(histogram(tokens[::2] * 4 + tokens[::2], 16), exact) < 1e-6  # the control


FILTERS = {
    "none": {},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "min_p keeps": {"min_p": 0.9, "min_tokens_to_keep": 3},
    "top_k": {"top_k": 5},
    "all": {"top_p": 0.95, "min_p": 0.02, "top_k": 7},
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters_are_those_of_mlx_lm_in_its_order(name, monkeypatch):
    """mlx-lm's own sampler is asked what it would draw from."""
    seen = []
    monkeypatch.setattr(sample_utils, "categorical_sampling", lambda x, t: seen.append(x * (1 / t)))
    logits = mx.random.normal((6, VOCAB), key=mx.random.key(1)) * 3
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    sample_utils.make_sampler(temp=0.7, **FILTERS[name])(logprobs)
    ours = Sampler(Sampling(temperature=0.7, **FILTERS[name]), VOCAB).scores(logits)
    assert mx.array_equal(mx.isinf(ours), mx.isinf(seen[0]))
    finite = mx.isfinite(ours)
    theirs = seen[0] - seen[0].max(axis=-1, keepdims=True)
    assert mx.all(mx.where(finite, mx.abs(ours - theirs) < 1e-5, True))
    assert finite.sum() == 6 * VOCAB if name == "none" else finite.sum() < 6 * VOCAB


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab", [5, 97, 1000])
def test_rows_have_the_same_bits_at_every_width(name, vocab):
    """Without columns up to a multiple of 64, MLX's loops end in scalar code of other bits."""
    options = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, **FILTERS[name]}
    options["top_k"] = min(options.get("top_k", 0), vocab - 1)
    sampler = Sampler(Sampling(temperature=0.8, seed=1, **options), vocab)
    logits = mx.random.normal((16, vocab), key=mx.random.key(2)) * 4
    tokens = mx.random.randint(0, vocab, (30,), key=mx.random.key(3))
    processed = sampler.processed(logits, tokens)
    scores, drawn = sampler.scores(processed), sampler.draw(processed, 40)
    for row in range(16):
        alone = sampler.processed(logits[row : row + 1], tokens[: 15 + row])
        assert same(alone, processed[row : row + 1])
        assert same(sampler.scores(alone), scores[row : row + 1])
        assert sampler.draw(alone, 40 + row).item() == drawn[row].item()
    wrong = sampler.processed(logits[3:4], tokens[:17])
    assert not same(wrong, processed[3:4])  # the control: one token less before it


# ---- proposals that are drawn

PROPOSALS = {
    "near": [0.5, 0.3, 0.15, 0.05],
    "far": [0.05, 0.05, 0.1, 0.8],
    "equal": softmax(FOUR).tolist(),
    "zeros": [0.0, 0.6, 0.4, 0.0],
    "a point": [0.0, 0.0, 1.0, 0.0],
}


def chain(sampler, proposal, trials, judge=Sampler.judge):
    """Pairs of emitted tokens of `trials` rounds with one draft; the next round draws plainly.

    The target is a Markov chain: after token t its logits are FOUR rolled by t.
    """
    four = mx.array(FOUR)
    rolled = mx.stack([mx.roll(four, t) for t in range(4)])
    q = mx.array(np.log(np.maximum(proposal, 1e-30)), mx.float32)
    noise = sampler.noise(mx.zeros((trials, 4)), 0, "draft")
    drafts = mx.argmax(q + noise, axis=-1).astype(mx.int32)
    logits = mx.broadcast_to(four, (trials + 1, 4))
    proposals = mx.broadcast_to(mx.array(proposal), (trials, 4))
    accepted, choice = judge(sampler, logits, drafts, proposals, 0)
    first = mx.where(accepted, drafts, choice[:-1])
    second = sampler.draw(rolled[first], trials)
    return np.array(first), np.array(second), float(accepted.mean().item())


@pytest.mark.parametrize("name", PROPOSALS)
def test_drawn_proposals_leave_the_targets_distribution(name):
    """Marginals and pairs against exact enumeration, and the share of accepted drafts."""
    proposal = np.array(PROPOSALS[name], np.float64)
    first, second, accepted = chain(Sampler(Sampling(temperature=1.0, seed=8), 4), proposal, TRIALS)
    p = softmax(FOUR)
    pairs = np.concatenate([p[t] * softmax(np.roll(FOUR, t)) for t in range(4)])
    assert chance(histogram(first), p) > 1e-3
    assert chance(histogram(first * 4 + second, 16), pairs) > 1e-3
    assert abs(accepted - np.minimum(p, proposal).sum()) < 0.005


def always(sampler, logits, drafts, probabilities, position):
    judged, choice = Sampler.judge(sampler, logits, drafts, probabilities, position)
    return mx.ones_like(judged), choice


def without_residual(sampler, logits, drafts, probabilities, position):
    judged, _ = Sampler.judge(sampler, logits, drafts, probabilities, position)
    return judged, sampler.draw(logits, position)


@pytest.mark.parametrize("judge", [always, without_residual])
def test_an_acceptance_that_is_biased_is_noticed(judge):
    """The control of the tests above."""
    sampler = Sampler(Sampling(temperature=1.0, seed=8), 4)
    first, _, _ = chain(sampler, PROPOSALS["near"], TRIALS, judge)
    assert chance(histogram(first), softmax(FOUR)) < 1e-6


class DrawnDrafter(ScriptedDrafter):
    """Draws from a fixed distribution that is not the target's."""

    def begin(self, target):
        session = super().begin(target)
        chances = mx.softmax(mx.arange(target.vocab_size) % 4 * 1.0)

        def propose(pending, position, count, sampler=None):
            logs = mx.broadcast_to(mx.log(chances), (count, target.vocab_size))
            noise = sampler.noise(logs, position + 1, "draft")
            tokens = mx.argmax(logs + noise, axis=-1).astype(mx.int32)[None]
            session.finite = mx.array(True)
            return Proposal(tokens, mx.exp(logs))

        session.propose = propose
        return session


def test_a_drawn_proposal_under_penalties_alone_is_a_point(hybrid):
    """At temperature 0 nothing is drawn; judging such drafts divided by zero."""
    sampling = Sampling(repetition_penalty=1.3)
    plain = decoded(hybrid, 40, sampling)

    class Greedy(ScriptedDrafter):
        def begin(self, target):
            session = super().begin(target)
            propose = session.propose
            rows = mx.ones((3, VOCAB)) / VOCAB
            session.propose = lambda *a: Proposal(propose(*a), rows[: a[2]])
            return session

    assert decoded(hybrid, 40, sampling, Greedy(plain, spoil=0.3, max_drafts=3)) == plain


def test_pairs_of_a_session_with_drawn_drafts_have_the_targets_distribution(hybrid):
    """The whole loop on a vocabulary of four, which a bias cuts out of the model's."""
    bias = {t: 0.0 if t < 4 else -1e9 for t in range(VOCAB)}
    seen = Counter()
    for seed in range(1000):
        sampling = Sampling(temperature=1.5, seed=seed, logit_bias=bias)
        tokens = decoded(hybrid, 5, sampling, DrawnDrafter([], max_drafts=3))
        seen[tuple(tokens[3:])] += 1
    exact = []
    for first in range(4):
        session = Session(hybrid)
        session.prefill([5, 3, 8])
        p = softmax(np.array(session.round().logits[0, :4]) / 1.5)[first]
        session = Session(hybrid)
        session.prefill([5, 3, 8, first])
        exact += list(p * softmax(np.array(session.round().logits[0, :4]) / 1.5))
    counts = [seen[a, b] for a in range(4) for b in range(4)]
    assert sum(counts) == 1000
    assert chance(counts, exact) > 1e-3
    assert chance(counts, np.roll(exact, 1)) < 1e-6


# ---- the loop

MANY = {
    "temperature": 0.9,
    "top_p": 0.95,
    "repetition_penalty": 1.3,
    "repetition_context_size": 12,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {3: 2.0, 7: -1.0},
}


@pytest.mark.parametrize("drafts", [2, 8, 48])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_change_no_token(hybrid, drafts, temperature):
    """With penalties, which look back on nothing of a rejected tail, at every draft size."""
    sampling = Sampling(**MANY | {"temperature": temperature}, seed=11)
    plain = decoded(hybrid, 160, sampling)
    drafter = ScriptedDrafter(plain, spoil=0.2, max_drafts=drafts)
    session = Session(hybrid, drafter, sampling=sampling)
    session.prefill(plain[:3])
    while len(session.tokens) < 160:
        session.round(160 - len(session.tokens))
    assert session.tokens == plain
    assert session.stats.rejections > 10 and session.stats.accepted > 10
    other = {"seed": 12} if temperature else {"repetition_penalty": 1.1}
    assert decoded(hybrid, 160, Sampling(**MANY | {"temperature": temperature, **other})) != plain


def test_a_stop_inside_a_block_changes_nothing_later(hybrid):
    sampling = Sampling(temperature=1.0, seed=5)
    plain = decoded(hybrid, 60, sampling)
    session = Session(hybrid, ScriptedDrafter(plain, spoil=0.1), sampling=sampling)
    session.prefill(plain[:3])
    while len(session.tokens) < 50:
        session.rewind((len(session.round().tokens) + 1) // 2)
    assert session.tokens == plain[: len(session.tokens)]


def test_two_sessions_do_not_disturb_each_other(hybrid):
    alone = [decoded(hybrid, 30, Sampling(temperature=1.0, seed=s)) for s in (1, 2)]
    sessions = [Session(hybrid, sampling=Sampling(temperature=1.0, seed=s)) for s in (1, 2)]
    for session in sessions:
        session.prefill([5, 3, 8])
    state = mx.array(mx.random.state[0])
    while len(sessions[0].tokens) < 30:
        for session in sessions:
            session.round()
    assert [session.tokens for session in sessions] == alone and alone[0] != alone[1]
    assert mx.array_equal(mx.random.state[0], state)  # MLX's own generator is not used


def test_seeds(hybrid):
    """Five requests with a seed give one text, five without one five, five at temperature 0 one."""

    def texts(**options):
        return {tuple(decoded(hybrid, 30, Sampling(**options))) for _ in range(5)}

    assert len(texts(temperature=1.0, seed=42)) == 1
    assert len(texts(temperature=1.0)) == 5
    assert len(texts(temperature=0.0)) == 1
    assert texts(temperature=0.0) == {tuple(decoded(hybrid, 30, None))}


def test_another_sampling_between_rounds(hybrid):
    session = Session(hybrid)
    session.prefill([5, 3, 8])
    session.round()
    session.sampling = Sampling(temperature=1.0, seed=7)
    for _ in range(20):
        session.round()
    expected = Session(hybrid, sampling=Sampling(temperature=1.0, seed=7))
    expected.prefill(session.tokens[:4])
    for _ in range(20):
        expected.round()
    assert session.tokens == expected.tokens


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_processors_see_the_committed_tokens_and_the_drafts_before_their_row(hybrid, speculative):
    calls = []

    def watch(tokens, logits):
        calls.append(tuple(tokens.tolist()))
        assert logits.shape == (1, VOCAB) and logits.dtype == mx.float32
        return logits

    sampling = Sampling(temperature=1.0, seed=9, logits_processors=[watch])
    answer = decoded(hybrid, 40, Sampling(temperature=1.0, seed=9))
    drafter = ScriptedDrafter(answer, spoil=0.3, max_drafts=4) if speculative else None
    session = Session(hybrid, drafter, sampling=sampling)
    session.prefill([5, 3, 8])
    while len(session.tokens) < 30:
        before = tuple(session.tokens)
        calls.clear()
        result = session.round()
        drafts = tuple(result.drafts)
        rows = [before + drafts[:i] for i in range(len(drafts) + 1)]
        assert calls[: len(rows)] == rows or not speculative
        assert all(
            call[:3] == (5, 3, 8) and call == tuple(answer[: len(call)]) for call in calls[:1]
        )
    assert session.tokens == answer[: len(session.tokens)]


def test_logits_of_a_round_are_processed_and_not_filtered(hybrid):
    """What mlx-lm's logprobs are made of."""
    bias = {4: 5.0}
    plain, biased = (
        Session(hybrid, sampling=Sampling(temperature=1.0, top_k=2, seed=1, logit_bias=b))
        for b in (None, bias)
    )
    for session in (plain, biased):
        session.prefill([5, 3, 8])
    a, b = plain.round().logits[0], biased.round().logits[0]
    assert mx.all(mx.isfinite(a)) and abs((b - a)[4].item() - 5.0) < 1e-5
    assert mx.array_equal(a[:4], b[:4])
