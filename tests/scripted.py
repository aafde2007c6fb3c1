"""A drafter that knows the answer and spoils some of it: it forces acceptance and rejection."""

from __future__ import annotations

import random

import mlx.core as mx

from dflash_native.targets import Target


class ScriptedDrafter:
    """Proposes the plain continuation, each token spoilt with a given probability.

    Its session also checks what a drafter may rely on: the taps of every committed position arrive
    once, in order, and have the target's width; the tokens before each proposal, `pending` last.
    """

    def __init__(
        self, answer, max_drafts=15, spoil=0.3, seed=0, tap_layers=(0, 2), context=None, sound=True
    ):
        self.answer = list(answer)
        """Prompt and plain continuation."""
        self.max_drafts = max_drafts
        self.spoil = spoil
        self.seed = seed
        self.tap_layers = tuple(tap_layers)
        self.context_rows = context
        self.sound = sound
        """What its sessions say of their first logits."""

    def begin(self, target: Target) -> ScriptedSession:
        return ScriptedSession(self, target)


class ScriptedSession:
    def __init__(self, drafter, target):
        self.drafter, self.target = drafter, target
        self.random = random.Random(drafter.seed)
        self.finite = None
        self.next = None
        self.first = None
        self.taps = []
        self.observed = []

    def observe(self, tokens):
        self.observed += tokens

    def extend(self, taps, position):
        assert taps.shape[0] == 1 and taps.shape[1] > 0
        assert taps.shape[2] == self.target.hidden_size * len(self.drafter.tap_layers)
        assert self.next is None or position == self.next
        if self.first is None:
            self.first = position
        self.next = position + taps.shape[1]
        self.taps.append(taps)

    def propose(self, pending, position, count, sampler=None):
        assert pending.shape == (1, 1) and 1 <= count <= self.drafter.max_drafts
        assert self.next is None or self.next == position
        assert len(self.observed) == position + 1
        draft = self.drafter.answer[position + 1 : position + 1 + count]
        draft += [0] * (count - len(draft))
        self.finite = mx.array(self.drafter.sound)
        vocab = self.target.vocab_size
        for i in range(count):
            if self.random.random() < self.drafter.spoil:
                draft[i] = (draft[i] + self.random.randrange(1, vocab)) % vocab
        return mx.array([draft], dtype=mx.int32)

    def arrays(self):
        return [self.taps[-1]] if self.taps else []
