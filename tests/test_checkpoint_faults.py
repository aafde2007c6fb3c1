"""Session.checkpoint and restore: what is refused, and what is interrupted."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from chats import demo_drafters, rounds_of
from dflash_native.drafters import AutoregressiveDrafter
from dflash_native.session import Session
from dflash_native.targets import Target
from test_autoregressive import near, stock_model
from test_session import Interrupt, plain, prompt_of
from test_targets import make_model


@pytest.fixture(scope="module")
def demo():
    return demo_drafters()


def test_what_is_refused_by_name(demo):
    target, drafters, prompt, _ = demo
    session = Session(target, drafters["dflash"])
    with pytest.raises(ValueError, match=r"\[checkpoint\] expected a prefill before it"):
        session.checkpoint()
    session.prefill(prompt[:1])
    with pytest.raises(ValueError, match=r"no token is covered yet"):
        session.checkpoint()
    session.prefill(prompt[1:])
    checkpoint = session.checkpoint()
    with pytest.raises(ValueError, match=r"restore on a fresh session but it has \d+ tokens"):
        session.restore(checkpoint)
    session.close()
    for call in (session.checkpoint, lambda: session.restore(checkpoint)):
        with pytest.raises(ValueError, match="the session is closed"):
            call()
    broken = Session(target)
    broken.prefill(prompt)
    broken._broken = "the device was lost"
    with pytest.raises(ValueError, match="an earlier call failed: the device was lost"):
        broken.checkpoint()
    warm = Session(target, drafters["dflash"])
    warm.restore(checkpoint)
    with pytest.raises(ValueError, match="expected a prefill before the first round"):
        warm.round()
    with pytest.raises(ValueError, match="rewind to keep 1 … 0"):
        warm.rewind(1)


def changed(checkpoint, name, change):
    return replace(checkpoint, arrays={**checkpoint.arrays, name: change(checkpoint.arrays[name])})


def test_arrays_that_do_not_fit_are_refused_and_the_session_stays_fresh(demo):
    target, drafters, prompt, _ = demo
    with Session(target, drafters["dflash"]) as session:
        session.prefill(prompt)
        whole = session.checkpoint()
        expected = rounds_of(session, 3)
    with Session(target) as session:
        session.prefill(prompt)
        bare = session.checkpoint()
    keys = next(name for name in bare.arrays if name.endswith(".keys"))
    state = next(name for name in bare.arrays if name.endswith(".state"))
    small = Session(Target(make_model("qwen3_5")))
    small.prefill(prompt_of(len(prompt)))
    cases = {
        "one token less": (replace(whole, tokens=whole.tokens[:-1]), "[load_cache] expected"),
        "one token more": (replace(whole, tokens=(*whole.tokens, 1)), "[load_cache] expected"),
        "another model": (small.checkpoint(), "[load_cache] expected"),
        "no draft": (bare, "[resume] expected this drafter's context"),
        "bf16": (changed(whole, keys, lambda a: a.astype(mx.bfloat16)), "bfloat16"),
        "bf16 state": (changed(whole, state, lambda a: a.astype(mx.bfloat16)), "bfloat16"),
        "draft in bf16": (
            changed(whole, "draft.0.keys", lambda a: a.astype(mx.bfloat16)),
            "[resume] expected this drafter's context",
        ),
        "draft a row less": (
            changed(whole, "draft.0.keys", lambda a: a[:, :, 1:]),
            "[resume] expected keys and values",
        ),
        "draft of other width": (
            changed(whole, "draft.waiting", lambda a: mx.zeros((1, 3, 5))),
            "[resume] expected",
        ),
        "a stranger": (
            replace(whole, arrays={**whole.arrays, "more": mx.zeros(1)}),
            "'more'",
        ),
        "a layer less": (
            replace(whole, arrays={n: a for n, a in whole.arrays.items() if n != keys}),
            keys.removeprefix("cache."),
        ),
    }
    for case, (checkpoint, words) in cases.items():
        session = Session(target, drafters["dflash"])
        with pytest.raises(ValueError) as error:
            session.restore(checkpoint)
        assert words in str(error.value), case
        assert session.tokens == [] and session.cache.lengths == [0]
        session.prefill(prompt)
        assert rounds_of(session, 3) == expected, case
    plainly = Session(target)  # a drafter's context is more than plain decoding needs
    plainly.restore(whole)
    plainly.prefill(prompt[-1:])
    while len(plainly.tokens) < len(prompt) + 6:
        plainly.round()
    assert plainly.tokens == plain(target, prompt, 6)


def test_contexts_of_other_drafters_are_refused(demo):
    target, drafters, prompt, _ = demo
    checkpoints = {}
    for name in ("dflash", "autoregressive"):
        session = Session(target, drafters[name])
        session.prefill(prompt * 2)
        checkpoints[name] = session.checkpoint()
    for name, other in (("dflash", "autoregressive"), ("autoregressive", "dflash")):
        with pytest.raises(ValueError, match=r"\[resume\] expected"):
            Session(target, drafters[name]).restore(checkpoints[other])
    far = changed(checkpoints["autoregressive"], "draft.length", lambda a: a + 10_000)
    with pytest.raises(ValueError, match=r"\[resume\] expected 1 … \d+ tokens but got 1\d+"):
        Session(target, drafters["autoregressive"]).restore(far)
    stock = Session(target, AutoregressiveDrafter(stock_model(vocab_size=target.vocab_size), 2))
    with pytest.raises(ValueError, match=r"\[resume\] expected"):
        stock.restore(checkpoints["autoregressive"])


# ---- what is interrupted


def test_a_prefill_that_is_cancelled_after_a_restore(demo):
    """C3: the session holds the part that was read, and goes on from there."""
    target, drafters, prompt, new = demo

    def make():
        return Session(target, drafters["dflash"], prefill_step_size=4)

    session = make()
    session.prefill(prompt)
    checkpoint = session.checkpoint()
    tokens = prompt + new
    cold = make()
    cold.prefill(tokens)
    expected = rounds_of(cold, 5)
    for at in range(4):
        warm = make()
        warm.restore(checkpoint)

        def cancel(done, total, at=at):
            if done >= 4 * at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            warm.prefill(tokens[len(warm.tokens) :], cancel)
        assert warm.tokens == tokens[: len(prompt) + 4 * at]
        assert warm.cache.lengths == [len(warm.tokens) - 1]
        warm.prefill(tokens[len(warm.tokens) :])
        assert rounds_of(warm, 5) == expected


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_ctrl_c_at_every_call_of_a_checkpoint_and_a_restore(speculative):
    mx.set_default_device(mx.cpu)
    target = Target(make_model("qwen3_5", tie_word_embeddings=False), prefill="exact")
    model = near(make_model("qwen3_5", tie_word_embeddings=False))
    drafter = AutoregressiveDrafter(model, 3) if speculative else None
    prompt = prompt_of(80)
    answer = plain(target, prompt, 30)
    given = Session(target, drafter)
    given.prefill(prompt)
    checkpoint = given.checkpoint()

    def interrupted(at):
        session, warm = Session(target, drafter), Session(target, drafter)
        session.prefill(prompt)
        session.round()
        with Interrupt(at) as interrupt:
            session.checkpoint()
            warm.restore(checkpoint)
        sound = session._broken is None
        if sound:
            assert session.cache.lengths == [len(session.tokens) - 1]
            session.round()
            assert session.tokens == answer[: len(session.tokens)]
            again = Session(target, drafter)
            again.restore(session.checkpoint())
            again.prefill(session.tokens[-1:])
            again.round()
            assert again.tokens == answer[: len(again.tokens)]
        if not warm.tokens:
            warm.restore(checkpoint)
        warm.prefill(prompt[-1:])
        for _ in range(3):
            warm.round()
        assert warm.tokens == answer[: len(warm.tokens)]
        return interrupt.seen, sound

    total, sound = interrupted(0)
    assert sound and total > 60
    assert sum(interrupted(at)[1] for at in range(1, total + 1)) > 0.9 * total


def test_a_draft_that_had_read_too_much_gives_no_context():
    """A round that failed after its proposal: the draft model had read the pending token. Its
    checkpoint then has the target's arrays alone, and the draft reads the text again.
    """
    mx.set_default_device(mx.cpu)
    target = Target(make_model("qwen3_5", tie_word_embeddings=False), prefill="exact")
    model = near(make_model("qwen3_5", tie_word_embeddings=False))
    drafter, prompt = AutoregressiveDrafter(model, 3), prompt_of(80)
    session = Session(target, drafter)
    session.prefill(prompt)
    logits = target.logits
    target.logits = lambda hidden: 1 / 0
    with pytest.raises(ZeroDivisionError):
        session.round()
    target.logits = logits
    checkpoint = session.checkpoint()
    assert not any(name.startswith("draft.") for name in checkpoint.arrays)
    warm = Session(target, drafter)
    warm.restore(checkpoint)
    warm.prefill(prompt[-1:])
    assert rounds_of(warm, 8) == rounds_of(session, 8)
