"""Rebuilds a session's recurrent layers from their captured inputs, to compare them bit for bit."""

from __future__ import annotations

import mlx.core as mx

from dflash_native import ops
from dflash_native.cache import RecurrentCache
from dflash_native.targets import common
from inputs import same


class Recorder:
    """Stands before `ops` in the targets and notes every GatedDeltaNet layer's inputs.

    Of a verify, those that the session's cache was told to keep, whatever it was told last.
    """

    def __init__(self, monkeypatch, session):
        self.calls = []  # of one forward, in the order of the layers
        self.trial = []  # the last verify's
        self.committed = []  # one list of layers for each forward, cut to the kept inputs
        cache = session._cache
        self.layers = [c for c in cache.layers if isinstance(c, RecurrentCache)]
        commit, amend, snapshot = cache.commit, cache.amend, cache.snapshot

        def note_commit(keep):
            commit(keep)
            self.committed.append(self._cut(keep[0]))

        def note_amend(keep):
            amend(keep)
            self.committed[-1] = self._cut(keep[0])

        def note_snapshot():
            restore, committed, trial = snapshot(), list(self.committed), self.trial

            def note_restore():
                restore()
                self.committed, self.trial = committed, trial

            return note_restore

        cache.commit, cache.amend, cache.snapshot = note_commit, note_amend, note_snapshot
        monkeypatch.setattr(common, "ops", self)

    def __getattr__(self, name):
        return getattr(ops, name)

    def causal_conv1d_verify(self, x, weight, window):
        self.calls.append([x])
        return ops.causal_conv1d_verify(x, weight, window)

    def gated_delta_step(self, *args):
        if self._note(args):
            self.committed.append(self.calls)
            self.calls = []
        return ops.gated_delta_step(*args)

    def gated_delta_verify(self, *args):
        if self._note(args):
            self.trial, self.calls = self.calls, []
        return ops.gated_delta_verify(*args)

    def _note(self, args):
        self.calls[-1].extend(args[:5])
        return len(self.calls) == len(self.layers)

    def _cut(self, count):
        return [[x[:, :count] for x in layer] for layer in self.trial]

    def compare(self, session, less=0):
        """Every layer against single steps over its captured inputs, without the last `less`."""
        cache = session.cache
        assert cache.lengths == [len(session.tokens) - 1]
        for index, layer in enumerate(self.layers):
            parts = zip(*(call[index] for call in self.committed), strict=True)
            x, *inputs = [mx.concatenate(part, axis=1) for part in parts]
            assert x.shape[1] == len(session.tokens) - 1
            state, window = mx.zeros_like(layer.state), mx.zeros_like(layer.window)
            for t in range(x.shape[1] - less):
                _, state = ops.gated_delta_step(*[i[:, t : t + 1] for i in inputs], state)
                window = ops.conv_window(window, x[:, t : t + 1], [1])
            logical = layer.state
            if layer.tape is not None:
                logical = ops.gated_delta_replay(layer.state, layer.tape, layer.keep)
            assert same(logical, state)
            assert same(layer.logical_window(), window)


def compare_model(session):
    """The whole model over the committed prefix from nothing, and the draft's context.

    Logits after the pending token and KV rows within rounding; taps fed up to the same position.
    """
    target, cache = session.target, session.cache
    committed = session.tokens[:-1]
    assert cache.lengths == [len(committed)]
    fresh = target.make_cache()
    if committed:
        target.forward(mx.array([committed]), fresh, commit=True)
    pending = mx.array([[session.tokens[-1]]])
    hidden, _ = target.forward(pending, fresh, commit=False)
    expected = target.logits(hidden)
    restore = cache.snapshot()
    hidden, _ = target.forward(pending, cache, commit=False)
    found = target.logits(hidden)
    mx.eval(found)
    restore()
    assert mx.abs(found - expected).max() < 2e-4 * mx.abs(expected).max()
    n = len(committed)
    for ours, theirs in zip(cache.layers, fresh.layers, strict=True):
        if not isinstance(ours, RecurrentCache) and n:
            for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                assert mx.abs(a[:, :, :n] - b[:, :, :n]).max() < 2e-4 * mx.abs(b).max()
    if session._draft is not None:
        fed = getattr(session._draft, "next", None)
        waiting = cache.lengths[0] - session._unfed[0][1] if session._unfed else 0
        assert fed is None or fed + waiting == n


class Waits:
    """Counts, by name, everything by which Python can wait for the device."""

    def __init__(self, monkeypatch):
        self.names = []
        for name in ("eval", "synchronize"):
            self._count(monkeypatch, mx, name)
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__array__"):
            if hasattr(mx.array, name):
                self._count(monkeypatch, mx.array, name)

    def _count(self, monkeypatch, owner, name):
        wait = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a: (self.names.append(name), wait(*a))[1])
