"""The loop: what it emits, and that every cache belongs to one position
after whatever happens (C3).
"""

from __future__ import annotations

import random
import signal
import sys
from itertools import pairwise

import mlx.core as mx
import pytest

from dflash_native import ops
from dflash_native.policy import Costs
from dflash_native.session import Session
from dflash_native.targets import Target, common
from drafter_oracle import drafter_of, raw_config
from recorder import Recorder, Waits, compare_model
from scripted import ScriptedDrafter
from test_targets import VOCAB, make_model

DFLASH2 = raw_config(
    architectures=["DFlash2DraftModel"],
    conv_kernel_size=2,
    conv_group_size=8,
    selector_rank=8,
    selector_top_k=6,
)


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next", "qwen3"])
def target(request):
    mx.set_default_device(mx.cpu)
    return Target(make_model(request.param))


@pytest.fixture(scope="module")
def hybrid():
    mx.set_default_device(mx.cpu)
    return Target(make_model("qwen3_5"))


COSTS = Costs({0: {1: 1.0, 2: 1.6, 4: 1.8, 8: 2.2, 16: 3.0}})


def prompt_of(length, seed=3):
    source = random.Random(seed)
    return [source.randrange(VOCAB) for _ in range(length)]


def plain(target, prompt, count):
    """Tokens of plain decoding."""
    session = Session(target)
    session.prefill(prompt)
    while len(session.tokens) < len(prompt) + count:
        session.round()
    return session.tokens[: len(prompt) + count]


@pytest.mark.parametrize("spoil", [0.0, 0.25, 1.0], ids=["right", "mixed", "wrong"])
@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_speculation_emits_the_tokens_of_plain_decoding(target, block_size, spoil):
    prompt = prompt_of(9)
    answer = plain(target, prompt, 90)
    drafter = ScriptedDrafter(answer, spoil=spoil)
    session = Session(target, drafter, block_size=block_size)
    session.prefill(prompt)
    while len(session.tokens) < len(answer) - 16:
        round_ = session.round()
        assert 1 <= len(round_.tokens) == round_.accepted + 1 <= block_size
        assert len(round_.drafts) == block_size - 1
        assert round_.tokens[:-1] == round_.drafts[: round_.accepted]
    assert session.tokens == answer[: len(session.tokens)]
    stats = session.stats
    emitted = len(session.tokens) - len(prompt)
    assert stats.tokens == emitted and stats.synchronisations == stats.rounds
    if spoil == 0.0:
        assert stats.tokens_per_round == block_size
    if spoil == 1.0:
        assert stats.accepted == 0 and stats.rounds == emitted
    spoilt = [*answer[:20], (answer[20] + 1) % VOCAB, *answer[21:]]
    assert session.tokens != spoilt[: len(session.tokens)]  # the control


def test_a_long_run_with_hundreds_of_rejections(hybrid):
    """512 tokens and more than 100 rejected rounds, counted, against plain decoding."""
    prompt = prompt_of(5)
    answer = plain(hybrid, prompt, 530)
    session = Session(hybrid, ScriptedDrafter(answer, spoil=0.3, seed=1))
    session.prefill(prompt)
    rejected = 0
    while len(session.tokens) < 5 + 512:
        round_ = session.round()
        rejected += round_.accepted < len(round_.drafts)
    assert rejected >= 100, rejected
    assert session.tokens == answer[: len(session.tokens)]
    assert sum(session.stats.accepted_at) == session.stats.accepted
    assert session.stats.drafted_at[0] == session.stats.rounds


def test_after_every_round_each_cache_is_that_of_the_committed_prefix(target, monkeypatch):
    """C3. Rounds of random widths, some without drafts, some rewound, a chat's next turn between.

    Recurrence, tape and conv bit for bit from captured layer inputs; the model within rounding.
    """
    prompt = prompt_of(12)
    answer = plain(target, prompt, 200)
    for drafter, size in ((0.2, None), (0.2, "auto"), (0.8, "auto"), (None, None)):
        if drafter is not None:
            drafter = ScriptedDrafter(answer, spoil=drafter, seed=5)
        session = Session(target, drafter, block_size=size, costs=COSTS, prefill_step_size=5)
        recorder = Recorder(monkeypatch, session)
        session.prefill(prompt)
        recorder.compare(session)
        source = random.Random(0)
        for number in range(18):
            round_ = session.round(limit=source.choice([1, 1, 2, 5, 16]))
            if source.random() < 0.4:
                session.rewind(source.randint(1, len(round_.tokens)))
            recorder.compare(session)
            with monkeypatch.context() as patch:
                patch.setattr(common, "ops", ops)
                compare_model(session)
            if number == 9:
                session.prefill(prompt_of(7, seed=8))
        assert session.tokens[:12] == prompt
        if recorder.layers:
            with pytest.raises(AssertionError):
                recorder.compare(session, less=1)  # the control: one input less
        monkeypatch.setattr(common, "ops", ops)


def test_rounds_that_nobody_looks_at_in_between(target, monkeypatch):
    """As above, but compared at the end alone, so that every replay is folded into a verify."""
    prompt = prompt_of(12)
    answer = plain(target, prompt, 200)
    for drafter, size in ((0.2, None), (0.2, "auto"), (0.8, "auto"), (None, None)):
        if drafter is not None:
            drafter = ScriptedDrafter(answer, spoil=drafter, seed=6)
        session = Session(target, drafter, block_size=size, costs=COSTS)
        recorder = Recorder(monkeypatch, session)
        session.prefill(prompt)
        source = random.Random(1)
        for _ in range(25):
            round_ = session.round(limit=source.choice([1, 3, 16]))
            if source.random() < 0.4:
                session.rewind(source.randint(1, len(round_.tokens)))
        recorder.compare(session)
        session.close()
        recorder.compare(session)
        monkeypatch.setattr(common, "ops", ops)
        compare_model(session)


@pytest.mark.parametrize("length", [*range(1, 41)])
def test_every_prompt_length_around_the_block(hybrid, length):
    """A prompt of K + 1 tokens must not be taken for a verify; a prompt of one has no prefill."""
    prompt = prompt_of(length, seed=length)
    answer = plain(hybrid, prompt, 26)
    with Session(hybrid, ScriptedDrafter(answer, spoil=0.2, seed=length)) as session:
        session.prefill(prompt)
        while len(session.tokens) < length + 10:
            session.round()
        assert session.tokens == answer[: len(session.tokens)]
        assert session.cache.lengths == [len(session.tokens) - 1]


@pytest.mark.parametrize("step", [1, 3, 16, 2048])
def test_prefill_in_chunks_of_any_size(hybrid, step):
    prompt = prompt_of(33)
    answer = plain(hybrid, prompt, 30)
    calls = []
    session = Session(hybrid, ScriptedDrafter(answer, spoil=0.2), prefill_step_size=step)
    session.prefill(prompt, progress=lambda *done: calls.append(done))
    assert calls[0] == (0, 32) and calls[-1] == (32, 32)
    assert [b[0] - a[0] for a, b in pairwise(calls)][:-1] == [step] * (len(calls) - 2)
    assert session.tokens == prompt and session.pending == prompt[-1]
    session.round()
    assert session.tokens == answer[: len(session.tokens)]


def test_the_draft_gets_the_taps_of_committed_positions_only(hybrid):
    """In order, each once, equal to those of a forward over the committed prefix."""
    prompt = prompt_of(11)
    answer = plain(hybrid, prompt, 60)
    session = Session(hybrid, ScriptedDrafter(answer, spoil=0.3, seed=2), prefill_step_size=4)
    session.prefill(prompt)
    for _ in range(8):
        session.round()
    session.flush()  # feeds the last round's taps
    taps = mx.concatenate(session._draft.taps, axis=1)
    assert session._draft.next == len(session.tokens) - 1 == taps.shape[1]
    _, expected = hybrid.forward(
        mx.array([session.tokens[:-1]]), hybrid.make_cache(), commit=True, tap_layers=(0, 2)
    )
    assert mx.abs(taps - expected).max() < 1e-3 * mx.abs(expected).max()
    shifted = mx.abs(taps[:, 1:] - expected[:, :-1]).max()
    assert shifted > 0.1 * mx.abs(expected).max()  # the control


@pytest.mark.parametrize("window", [1, 6, 100])
def test_only_the_rows_of_the_drafts_window_are_kept_of_a_prompt(hybrid, window):
    prompt = prompt_of(30)
    drafter = ScriptedDrafter(plain(hybrid, prompt, 20), context=window)
    session = Session(hybrid, drafter, prefill_step_size=8)
    session.prefill(prompt)
    assert sum(t.shape[1] for t in session._draft.taps) == min(window, 29)
    assert session._draft.next == 29
    assert len(session.round().tokens) >= 1


@pytest.mark.parametrize(
    "raw",
    [
        raw_config(),
        DFLASH2,
        raw_config(
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            sliding_window=9,
        ),
    ],
    ids=["dflash", "dflash2", "sliding"],
)
def test_a_real_drafter_of_either_kind_does_not_change_the_tokens(raw):
    mx.set_default_device(mx.cpu)
    target = Target(
        make_model("qwen3_5", hidden_size=raw["hidden_size"], vocab_size=raw["vocab_size"])
    )
    drafter = drafter_of(raw)
    prompt = [token % raw["vocab_size"] for token in prompt_of(40)]
    answer = plain(target, prompt, 60)
    session = Session(target, drafter)
    session.prefill(prompt)
    while len(session.tokens) < 80:
        session.round()
    assert session.tokens == answer[: len(session.tokens)]
    assert session.stats.drafted > 0
    session.flush()  # the draft's context is that of a fresh one over the same prefix
    position = len(session.tokens) - 1
    _, taps = target.forward(
        mx.array([session.tokens[:-1]]),
        target.make_cache(),
        commit=True,
        tap_layers=drafter.tap_layers,
    )
    fresh = drafter.begin(target)
    fresh.extend(taps, 0)
    pending = mx.array([session.tokens[-1:]])
    found, expected = (d.hidden(pending, position) for d in (session._draft, fresh))
    assert mx.abs(found - expected).max() < 1e-3 * mx.abs(expected).max()
    other = drafter.begin(target)
    other.extend(taps[:, ::-1], 0)
    assert mx.abs(other.hidden(pending, position) - expected).max() > 1e-2  # the control


def test_equal_logits_give_the_lowest_id(hybrid, monkeypatch):
    """Draft, verify and plain decoding agree on ties (two exactly equal top logits do occur)."""
    tied = mx.zeros((VOCAB,))
    tied[mx.array([41, 17, 90])] = 5.0
    monkeypatch.setattr(
        Target, "logits", lambda self, hidden: mx.broadcast_to(tied, (*hidden.shape[:2], VOCAB))
    )
    assert plain(hybrid, [1, 2], 3)[2:] == [17, 17, 17]
    session = Session(hybrid, ScriptedDrafter([1, 2] + [17] * 40, spoil=0.0))
    session.prefill([1, 2])
    assert session.round().tokens == [17] * 16
    session = Session(hybrid, ScriptedDrafter([1, 2] + [41] * 40, spoil=0.0))
    session.prefill([1, 2])
    assert session.round().tokens == [17]


@pytest.mark.parametrize("kind", ["plain", "scripted", "dflash", "dflash2"])
def test_one_synchronisation_a_round(kind, monkeypatch):
    """Everything by which Python can wait for the device is counted: one `tolist` a round."""
    raw = DFLASH2 if kind == "dflash2" else raw_config()
    sizes = {"hidden_size": raw["hidden_size"], "vocab_size": raw["vocab_size"]}
    target = Target(make_model("qwen3_5", **sizes))
    prompt = [token % raw["vocab_size"] for token in prompt_of(6)]
    drafter = {
        "plain": lambda: None,
        "scripted": lambda: ScriptedDrafter(plain(target, prompt, 60), spoil=0.2),
    }.get(kind, lambda: drafter_of(raw))()
    session = Session(target, drafter)
    session.prefill(prompt)
    session.round()
    waits = Waits(monkeypatch).names
    for _ in range(5):
        session.round()
    assert waits == ["tolist"] * 5
    session.flush()
    assert waits[5:] == ["eval"]  # the control: a flush does wait


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("fault", ["logits", "forward", "read", "second forward"])
def test_an_error_in_a_round_takes_the_round_back(hybrid, monkeypatch, fault, speculative):
    """Ctrl-C while waiting, and errors while a verify is built: no token appears or is lost."""
    prompt = prompt_of(8)
    answer = plain(hybrid, prompt, 80)
    drafter = ScriptedDrafter(answer, spoil=0.2) if speculative else None
    for go_on in (True, False):
        session = Session(hybrid, drafter)
        recorder = Recorder(monkeypatch, session)
        session.prefill(prompt)
        session.round()
        before = list(session.tokens)
        with monkeypatch.context() as patch:
            if fault == "read":
                patch.setattr(Session, "_read", raising(KeyboardInterrupt))
            elif fault == "second forward":
                forward, calls = Target.forward, []

                def failing(self, *a, forward=forward, calls=calls, **k):
                    calls.append(1)
                    return raising(OSError)() if len(calls) > 1 else forward(self, *a, **k)

                patch.setattr(Target, "forward", failing)
            else:
                patch.setattr(Target, fault, raising(OSError))
            with pytest.raises((KeyboardInterrupt, OSError)):
                session.round()
                before = list(session.tokens)
                session.round()  # the first of the two may have been queued, or need one forward
        assert session.tokens == before
        if not go_on:
            session.close()
        recorder.compare(session)
        monkeypatch.setattr(common, "ops", ops)
        compare_model(session)
        if go_on:
            for _ in range(3):
                session.round()
            assert session.tokens == answer[: len(session.tokens)]


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_ctrl_c_at_random_moments_of_a_round(hybrid, speculative):
    """Real signals. Before, 2 of 1,500 fell between a commit and its tokens and parted the two."""
    prompt = prompt_of(9)
    answer = plain(hybrid, prompt, 300)
    drafter = ScriptedDrafter(answer, spoil=0.2, max_drafts=3) if speculative else None
    source, hits = random.Random(1), 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(60):
            session = Session(hybrid, drafter)
            session.prefill(prompt)
            try:
                signal.setitimer(signal.ITIMER_REAL, source.uniform(0.002, 0.03))
                for _ in range(60):
                    session.round()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hits += 1
            if session._broken is None:
                assert session.cache.lengths == [len(session.tokens) - 1]
                session.round()
                assert session.tokens == answer[: len(session.tokens)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert hits > 20


class Interrupt:
    """Raises KeyboardInterrupt at the n-th call or return in the session's own code."""

    files = ("native/session.py", "native/cache.py", "native/rounds.py", "native/block.py")

    def __init__(self, at):
        self.at, self.seen = at, 0

    def __call__(self, frame, event, arg):
        if frame.f_code.co_filename.endswith(self.files):
            self.seen += 1
            if self.seen == self.at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, kind, error, trace):
        sys.setprofile(None)
        return kind is KeyboardInterrupt


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_ctrl_c_at_every_call_of_a_round_and_of_a_rewind(hybrid, speculative):
    """Cache, tokens and statistics stay together wherever it falls.

    Before, it could fall into the middle of counting (one round in 600,000 under load: the next
    round then raised IndexError), and between a rewind's cache and its tokens.
    """
    prompt = prompt_of(9)
    answer = plain(hybrid, prompt, 40)
    drafter = ScriptedDrafter(answer, spoil=0.2, max_drafts=3) if speculative else None
    size = "auto" if speculative else None

    def interrupted(at):
        session = Session(hybrid, drafter, block_size=size, costs=COSTS, prefill_step_size=3)
        session.prefill(prompt)
        session.round()
        with Interrupt(at) as interrupt:
            session.rewind(len(session.round().tokens))
            emitted = len(session.round().tokens)
            session.rewind((emitted + 1) // 2)
            session.prefill(answer[len(session.tokens) :][:7])
        if session._broken is None:
            stats = session.stats
            assert session.cache.lengths == [len(session.tokens) - 1]
            assert stats.tokens >= len(session.tokens) - len(prompt) - 7
            assert sum(stats.accepted_at) == stats.accepted
            assert sum(stats.drafted_at) == stats.drafted
            session.round()
            assert session.tokens == answer[: len(session.tokens)]
        return interrupt.seen, session._broken is None

    total, sound = interrupted(0)
    assert sound and total > 100
    assert sum(interrupted(at)[1] for at in range(1, total + 1)) > 0.8 * total


def test_after_a_failed_evaluation_the_session_refuses_to_go_on(hybrid, monkeypatch):
    """Elsewhere one failed kernel gave garbage tokens in the rounds after it, without a word."""
    bad = mx.array([99])
    for drafter in (None, ScriptedDrafter(plain(hybrid, [1, 2], 60), spoil=0.2)):
        session = Session(hybrid, drafter)
        session.prefill([1, 2])
        session.round()
        with monkeypatch.context() as patch:
            patch.setattr(common.ops, "conv_window", lambda w, x, keep: ops_window(w, x, bad))
            with pytest.raises(RuntimeError, match="expected keep"):
                for _ in range(3):
                    session.round()
        with pytest.raises(ValueError, match=r"an earlier call failed: \[conv_window\]"):
            session.round()
        with pytest.raises(ValueError, match=r"an earlier call failed: \[conv_window\]"):
            session.prefill([3])
        session.close()


ops_window = ops.conv_window


def raising(kind):
    def fault(*args, **kwargs):
        raise kind("planted")

    return fault


def test_an_error_in_prefill_keeps_the_part_that_was_done(hybrid, monkeypatch):
    prompt = prompt_of(20)
    answer = plain(hybrid, prompt, 20)

    def interrupt(done, total):
        if done >= 8:
            raise KeyboardInterrupt

    evaluate, calls = mx.eval, []

    def interrupted(*arrays):
        evaluate(*arrays)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    for place in ("progress", "evaluation"):
        session = Session(hybrid, ScriptedDrafter(answer, spoil=0.2), prefill_step_size=4)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            if place == "evaluation":
                patch.setattr(mx, "eval", interrupted)
            session.prefill(prompt, progress=interrupt if place == "progress" else None)
        assert session.tokens == prompt[:9]
        compare_model(session)
        session.prefill(prompt[9:])
    session.round()
    assert session.tokens == answer[: len(session.tokens)]


def test_a_second_turn_continues_from_the_pending_token(target):
    first, second = prompt_of(10), prompt_of(6, seed=9)
    session = Session(target)
    session.prefill(first)
    for _ in range(5):
        session.round()
    spoken = list(session.tokens)
    session.prefill(second)
    assert session.tokens == spoken + second
    compare_model(session)
    continued = [session.round().tokens[0] for _ in range(8)]
    assert continued == plain(target, spoken + second, 8)[-8:]


def test_a_draft_whose_logits_are_not_finite_is_refused(hybrid):
    """A draft cast to fp16 proposed noise, elsewhere, and low acceptance was all that showed it."""
    session = Session(hybrid, ScriptedDrafter(prompt_of(40), sound=False))
    session.prefill(prompt_of(5))
    with pytest.raises(ValueError, match="expected finite draft logits"):
        session.round()
    assert session.round(limit=1).drafts == []  # plain rounds go on
    compare_model(session)


def test_rewind_is_for_the_last_round_only(hybrid):
    prompt = prompt_of(6)
    answer = plain(hybrid, prompt, 60)
    session = Session(hybrid, ScriptedDrafter(answer, spoil=0.0))
    with pytest.raises(ValueError, match="rewind to keep 1 … 0 tokens"):
        session.rewind(1)
    session.prefill(prompt)
    session.round()
    for wrong in (0, 17, -1):
        with pytest.raises(ValueError, match=f"1 … 16 tokens of the last round but got {wrong}"):
            session.rewind(wrong)
    session.rewind(9)
    session.rewind(4)
    assert session.tokens == answer[:10] and session.stats.tokens == 4
    session.round(limit=1)
    assert session.tokens == answer[:11]


def test_bad_arguments_are_refused(hybrid):
    with pytest.raises(ValueError, match=r"block_size in 1 … 1 \(no drafter\) but got 4"):
        Session(hybrid, block_size=4)
    with pytest.raises(ValueError, match=r"block_size in 1 … 16 \(the block of the drafter\)"):
        Session(hybrid, ScriptedDrafter([]), block_size=17)
    with pytest.raises(ValueError, match="prefill_step_size of at least 1 but got 0"):
        Session(hybrid, prefill_step_size=0)
    session = Session(hybrid)
    with pytest.raises(ValueError, match="prefill before the first round"):
        session.round()
    with pytest.raises(ValueError, match="at least one token but got an empty prompt"):
        session.prefill([])
    with pytest.raises(ValueError, match=f"0 … {VOCAB - 1} .the target's vocabulary. but got 500"):
        session.prefill([1, 500])
    with pytest.raises(ValueError, match=r"expected token ids but got mlx\.core\.float32"):
        session.prefill(mx.array([1.0]))
    session.prefill(mx.array([1, 2]))
    with pytest.raises(ValueError, match="limit of at least 1 but got 0"):
        session.round(limit=0)
    session.close()
    session.close()
    with pytest.raises(ValueError, match="the session is closed"):
        session.round()
    with pytest.raises(ValueError, match="the session is closed"):
        session.prefill([1])
