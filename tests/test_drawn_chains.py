"""Blocks of several drawn drafts: the joint distribution of what a round emits is the target's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dflash_native import session as session_module
from dflash_native.drafters import Proposal
from dflash_native.sampling import Sampler, Sampling
from dflash_native.session import Session
from dflash_native.targets import Target
from scripted import ScriptedDrafter
from test_sampling import (
    FOUR,
    PROPOSALS,
    TRIALS,
    always,
    chance,
    histogram,
    softmax,
    without_residual,
)
from test_targets import make_model

DRAFTS = 3
CHUNK = 25_000
BY_DRAFT = [PROPOSALS["near"], PROPOSALS["far"], PROPOSALS["zeros"]]
"""What each draft of a block is drawn from, whatever stands before it."""
ROLLED = mx.stack([mx.roll(mx.array(FOUR), token) for token in range(4)])
"""The target is a Markov chain: its logits after each token; the first has those after token 0."""


def rounds(judge, start, trials):
    """The first three tokens `[trials, 3]` that rounds of three drafts emit, and what is accepted.

    A round is of four positions: three drafts and the target's own token. Where fewer than three
    tokens were emitted, plain decoding goes on. Positions follow each other from `start` on.
    """
    sampler = Sampler(Sampling(temperature=1.0, seed=8), 4)
    count = trials * (DRAFTS + 1)
    proposal = mx.concatenate([mx.array(BY_DRAFT), mx.full((1, 4), 0.25)])
    proposals = mx.tile(proposal, (trials, 1))
    noise = sampler.noise(proposals, start, "draft")
    drafts = mx.argmax(mx.log(mx.maximum(proposals, 1e-30)) + noise, axis=-1).astype(mx.int32)
    before = mx.concatenate([mx.zeros((1,), mx.int32), drafts])
    first_of_round = mx.arange(count + 1) % (DRAFTS + 1) == 0
    logits = ROLLED[mx.where(first_of_round, 0, before)]
    agreed, choice = judge(sampler, logits, drafts, proposals, start)
    bonus = sampler.draw(logits[:-1], start)
    agreed, choice, bonus, drafts = (
        np.array(each).reshape(trials, DRAFTS + 1) for each in (agreed, choice[:-1], bonus, drafts)
    )
    accepted = np.cumprod(agreed[:, :DRAFTS], axis=1).sum(axis=1)
    own = np.where(accepted == DRAFTS, bonus[:, DRAFTS], choice[np.arange(trials), accepted])
    tokens = np.zeros((trials, DRAFTS), np.int64)
    for at in range(DRAFTS):
        last = tokens[:, at - 1] if at else np.zeros(trials, np.int64)
        plain = sampler.draw(ROLLED[mx.array(last)], start + at * trials, "plain")
        drafted = np.where(accepted == at, own, np.array(plain))
        tokens[:, at] = np.where(accepted > at, drafts[:, at], drafted)
    return tokens, accepted


def chain(judge):
    found = [rounds(judge, start, CHUNK) for start in range(0, 4 * TRIALS, 4 * CHUNK)]
    return tuple(np.concatenate(each) for each in zip(*found, strict=True))


def enumerated():
    """The probability of each three tokens, and of each count of accepted drafts."""
    p = [softmax(np.roll(FOUR, token)) for token in range(4)]
    joint = np.zeros((4, 4, 4))
    for a in range(4):
        for b in range(4):
            joint[a, b] = p[0][a] * p[a][b] * p[b]
    reached = [1.0]
    mass = np.eye(4)[0]  # of each last token, token 0 before the round
    for q in BY_DRAFT:
        mass = sum(mass[a] * np.minimum(p[a], q) for a in range(4))
        reached.append(mass.sum())
    return joint.reshape(-1), -np.diff([*reached, 0.0])


def test_three_drawn_drafts_leave_the_targets_joint_distribution():
    """200,000 rounds against enumeration: every three tokens, every count of accepted drafts."""
    tokens, accepted = chain(Sampler.judge)
    joint, counts = enumerated()
    assert len(tokens) == TRIALS
    triples = histogram(tokens @ [16, 4, 1], 64)
    assert chance(triples, joint) > 1e-3
    assert chance(histogram(accepted, 4), counts) > 1e-3
    assert chance(np.roll(triples, 1), joint) < 1e-6


@pytest.mark.parametrize("judge", [always, without_residual])
def test_a_biased_acceptance_of_three_drafts_is_noticed(judge):
    """The control, and it needs no more than an eighth of the rounds."""
    tokens, _ = rounds(judge, 0, CHUNK)
    assert chance(histogram(tokens @ [16, 4, 1], 64), enumerated()[0]) < 1e-6


# ---- the whole loop

VOCAB = 6
HOT = 4.0
TOKENS = 20_000


class SevenDrawn(ScriptedDrafter):
    """Seven drafts of a fixed distribution that is not the target's."""

    def __init__(self):
        super().__init__([], max_drafts=7, tap_layers=(), context=0)

    def begin(self, target):
        session = super().begin(target)
        row = mx.softmax(mx.arange(target.vocab_size) % 3 * 0.4)

        def propose(pending, position, count, sampler=None):
            rows = mx.broadcast_to(row, (count, target.vocab_size))
            noise = sampler.noise(rows, position + 1, "draft")
            return Proposal(mx.argmax(mx.log(rows) + noise, axis=-1).astype(mx.int32)[None], rows)

        session.propose = propose
        return session


def emitted(target, count):
    """Tokens of sessions of 250, and the target's probabilities for each, given those before it."""
    tokens, chances, lengths = [], [], []
    for seed in range(count // 250):
        session = Session(target, SevenDrawn(), sampling=Sampling(temperature=HOT, seed=seed))
        session.prefill([1, 2])
        while len(session.tokens) < 252:
            result = session.round(252 - len(session.tokens))
            chances.append(np.array(mx.softmax(result.logits / HOT, axis=-1), np.float64))
            lengths.append(result.accepted)
        tokens += session.tokens[2:]
    return np.array(tokens), np.concatenate(chances), np.array(lengths)


def deviations(tokens, chances):
    """Of the count of each token, and of each pair, from what the target's probabilities say, in
    standard deviations. Given what stands before it a token is a draw, so counts less their
    expectations are a martingale, whatever the context is.
    """
    hot = np.eye(VOCAB)[tokens]
    before = np.concatenate([np.ones((len(tokens), 1)), np.roll(hot, 1, axis=0)], axis=1)
    found = before.T @ (hot - chances)
    return found / np.sqrt(before.T @ (chances * (1 - chances)))


@pytest.fixture(scope="module")
def hybrid():
    mx.set_default_device(mx.cpu)
    return Target(make_model("qwen3_5", vocab_size=VOCAB, num_hidden_layers=2))


def test_sessions_with_seven_drawn_drafts_emit_what_the_target_draws(hybrid):
    """20,000 tokens through prefill, rounds and rollbacks; every count of accepted drafts occurs.

    42 deviations: one beyond 4.5 has a chance of 3e-4.
    """
    tokens, chances, accepted = emitted(hybrid, TOKENS)
    assert len(tokens) == len(chances) == TOKENS
    assert set(accepted.tolist()) == set(range(8))
    assert np.abs(deviations(tokens, chances)).max() < 4.5
    assert np.abs(deviations(np.roll(tokens, 1), chances)).max() > 6  # of another place


@pytest.mark.parametrize("judge", [always, without_residual])
def test_a_biased_acceptance_in_sessions_is_noticed(hybrid, judge, monkeypatch):
    """The control."""
    biased = type("Biased", (Sampler,), {"judge": judge})
    monkeypatch.setattr(session_module, "Sampler", biased)
    tokens, chances, _ = emitted(hybrid, TOKENS // 4)
    assert np.abs(deviations(tokens, chances)).max() > 6
