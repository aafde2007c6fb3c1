"""Sessions from a prompt to a number of tokens, and drafts that are forced to be wrong."""

from __future__ import annotations

import random

import mlx.core as mx

from dflash_native.drafters import Proposal
from dflash_native.session import Session


def decoded(target, prompt, count, drafter=None, **options):
    """A session that holds the prompt and `count` tokens after it."""
    session = Session(target, drafter, **options)
    session.prefill(prompt)
    while (left := len(prompt) + count - len(session.tokens)) > 0:
        session.round(left)
    return session


class Spoilt:
    """Another drafter, a share of whose points is changed on their way to the target."""

    def __init__(self, drafter, share=0.2, seed=0):
        self.drafter, self.share, self.seed = drafter, share, seed
        self.tap_layers, self.context_rows = drafter.tap_layers, drafter.context_rows
        self.max_drafts = drafter.max_drafts

    def begin(self, target):
        session, source = self.drafter.begin(target), random.Random(self.seed)
        propose = session.propose

        def spoilt(pending, position, count, sampler=None):
            answer = propose(pending, position, count, sampler)
            assert not isinstance(answer, Proposal)
            change = [
                source.randrange(1, target.vocab_size) * (source.random() < self.share)
                for _ in range(answer.shape[1])
            ]
            return (answer + mx.array([change], dtype=mx.int32)) % target.vocab_size

        session.propose = spoilt
        return session
