"""Sessions, generation and drafters: what cannot be used is refused in one sentence by name."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import load

from dflash_native import demo
from dflash_native.drafters import Proposal
from dflash_native.generation import stream_generate
from dflash_native.policy import Costs, WidthPolicy
from dflash_native.sampling import Sampling
from dflash_native.session import Session
from dflash_native.targets import Target
from scripted import ScriptedDrafter
from test_targets import VOCAB, make_model

COSTS = Costs({0: {1: 1.0, 2: 1.1, 4: 1.2}})


@pytest.fixture(scope="module")
def hybrid():
    mx.set_default_device(mx.cpu)
    return Target(make_model("qwen3_5"))


def prefilled(target, drafter=None, **options):
    session = Session(target, drafter, **options)
    session.prefill([5, 3, 8])
    return session


def refusal(kind, start, message):
    return pytest.raises(kind, match=rf"^\[{start}\] expected {message}")


# ---- sessions


@pytest.mark.parametrize(
    "options, kind, message",
    [
        ({"block_size": 2.5}, TypeError, r"block_size to be an integer but got 2\.5"),
        ({"block_size": True}, TypeError, "block_size to be an integer but got True"),
        ({"block_size": "4"}, ValueError, "block_size \"auto\" or a number but got '4'"),
        ({"block_size": 17}, ValueError, "block_size in 1 … 16"),
        ({"block_size": -1}, ValueError, "block_size in 1 … 16"),
        ({"prefill_step_size": 1.5}, TypeError, "prefill_step_size to be an integer but got 1.5"),
        ({"prefill_step_size": 0}, ValueError, "prefill_step_size of at least 1 but got 0"),
        ({"prefill_step_size": None}, TypeError, "prefill_step_size to be an integer"),
        ({"costs": {0: {1: 1.0}}, "block_size": "auto"}, TypeError, "costs of type Costs but got"),
    ],
)
def test_a_sessions_options(hybrid, options, kind, message):
    with refusal(kind, "Session", message):
        Session(hybrid, ScriptedDrafter([]), **options)


@pytest.mark.parametrize("most, kind", [(0, ValueError), (2.5, TypeError), ("4", TypeError)])
def test_a_drafter_of_no_drafts(hybrid, most, kind):
    with refusal(kind, "Session", "the drafter's max_drafts"):
        Session(hybrid, ScriptedDrafter([], max_drafts=most))


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda s: s.round(limit=1.5), TypeError, r"limit to be an integer but got 1\.5"),
        (lambda s: s.round(limit=True), TypeError, "limit to be an integer but got True"),
        (lambda s: s.round(limit=-3), ValueError, "limit of at least 1 but got -3"),
        (lambda s: s.rewind(1.0), TypeError, r"rewind's count to be an integer but got 1\.0"),
        (lambda s: s.rewind(None), TypeError, "rewind's count to be an integer but got None"),
        (lambda s: s.rewind(2), ValueError, "rewind to keep 1 … 1 tokens of the last round"),
    ],
)
def test_a_sessions_calls(hybrid, call, kind, message):
    session = prefilled(hybrid)
    session.round()
    before = list(session.tokens)
    with refusal(kind, "Session", message):
        call(session)
    assert session.tokens == before
    session.rewind(np.int64(1))
    assert session.round(limit=np.int32(1)).tokens


@pytest.mark.parametrize(
    "tokens, kind, message",
    [
        ([1.0, 2.0], TypeError, r"token ids but got 1\.0"),
        (np.array([1.5]), TypeError, "token ids but got"),
        ("abc", TypeError, "token ids but got 'abc'"),
        (5, TypeError, "token ids but got 5"),
        (mx.array([1.0]), ValueError, "token ids but got mlx.core.float32"),
        (mx.array([[1, 2], [3, 4]]), ValueError, r"the token ids of one text but got shape \(2, 2"),
        (mx.array(3), ValueError, r"the token ids of one text but got shape \(\)"),
        ([-1], ValueError, f"token ids in 0 … {VOCAB - 1}"),
    ],
)
def test_prompts_that_are_no_token_ids(hybrid, tokens, kind, message):
    session = Session(hybrid)
    with refusal(kind, "prefill", message):
        session.prefill(tokens)
    session.prefill(mx.array([[1, 2]]))
    session.prefill(np.array([3]))
    assert session.tokens == [1, 2, 3]


@pytest.mark.parametrize("limit, kind", [(0, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_the_limit_of_a_choice(limit, kind):
    with refusal(kind, "choose", "limit"):
        WidthPolicy(COSTS, 4).choose(0, limit)


# ---- generation


PROMPT = [5, 1200, 77, 3010, 42]


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3_5", vocab_size=8192)


@pytest.fixture(scope="module")
def tokenizer():
    return load(demo.TARGET)


def test_bad_arguments_are_refused_at_the_call(model, tokenizer):
    drafter, session = ScriptedDrafter(PROMPT), Session(Target(model))
    for arguments, message in [
        (dict(prompt=""), "at least one token but got an empty prompt"),
        (dict(prompt=[]), "at least one token but got an empty prompt"),
        (dict(max_tokens=0), "max_tokens of at least 1"),
        (dict(drafter=drafter, draft_model=drafter), "drafter or draft_model but got both"),
        (dict(draft_model="small"), "a model or a dflash_native drafter but got str"),
        (dict(drafter=drafter, block_size=3, num_draft_tokens=2), "but got both"),
        (dict(drafter=drafter, block_size=17), r"block_size in 1 … 16"),
        (dict(stop=["a", ""]), "stop texts but got an empty one"),
        (dict(session=session, drafter=drafter), "bring its own drafter"),
        (dict(session=session, num_draft_tokens=2), "bring its own drafter"),
        (dict(session=session, prefill_step_size=9), "bring its own drafter"),
        (dict(session=session, model=make_model("qwen3")), "the model of the session"),
        (dict(num_draft_tokens=2), "a drafter with num_draft_tokens but got none"),
        *(
            (dict(drafter=drafter, num_draft_tokens=odd), message)
            for odd, message in (
                (0, "num_draft_tokens of at least 1 but got 0"),
                (-1, "num_draft_tokens of at least 1 but got -1"),
                (2.5, r"num_draft_tokens to be an integer but got 2\.5"),
                (True, "num_draft_tokens to be an integer but got True"),
                ("4", "num_draft_tokens to be an integer but got '4'"),
            )
        ),
        (dict(draft_model=model, num_draft_tokens=0), "num_draft_tokens of at least 1 but got 0"),
        (dict(max_tokens=2.5), r"max_tokens to be an integer but got 2\.5"),
        (dict(max_tokens=None), "max_tokens to be an integer but got None"),
        (dict(max_tokens=-2), r"max_tokens of at least 1 \(-1: no limit\) but got -2"),
        (dict(prompt=[1.0, 2.0]), r"token ids but got 1\.0"),
        (dict(prompt=mx.array([1.0])), "token ids but got mlx.core.float32"),
        (dict(prompt=None), "token ids but got None"),
        (dict(prompt=[8192]), "token ids in 0 … 8191"),
        (dict(stop=[3]), "stop texts but got 3"),
        (dict(stop=3), "stop texts but got 3"),
        (dict(stop=None), "stop texts but got None"),
        (
            dict(logits_processors=max),
            "logits_processors to be a list of callables but got builtin",
        ),
        (dict(logits_processors=[3]), "logits_processors to be a list of callables but got int"),
        (dict(sampling={"seed": 1}), "a Sampling but got dict"),
        (dict(drafter=drafter, block_size=2.5), r"block_size to be an integer but got 2\.5"),
    ]:
        match = rf"^\[(generate|Session)\] expected .*{message}"
        with pytest.raises((ValueError, TypeError), match=match):
            stream_generate(
                **{"model": model, "tokenizer": tokenizer, "prompt": PROMPT, **arguments}
            )
    with pytest.raises(ValueError, match="is the tokenizer the target's"):
        list(stream_generate(make_model("qwen3_5"), tokenizer, PROMPT, 3))


# ---- what a drafter answers


class Answering(ScriptedDrafter):
    """Gives whatever `answer(count, vocab_size)` makes."""

    def __init__(self, answer, finite=None):
        super().__init__([], max_drafts=3)
        self.answer, self.finite = answer, finite

    def begin(self, target):
        session = super().begin(target)
        session.finite = self.finite
        session.propose = lambda pending, position, count, sampler=None: self.answer(
            count, target.vocab_size
        )
        return session


def tokens_of(*ids, dtype=mx.int32):
    return mx.array([list(ids)], dtype=dtype)


def uniform(count, vocab_size):
    return mx.full((count, vocab_size), 1 / vocab_size)


def proposing(change):
    """Two drafts with probabilities that `change` has spoilt."""
    return lambda count, v: Proposal(tokens_of(1, 2), change(uniform(2, v)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "answer, message",
    [
        (lambda c, v: tokens_of(1, v, 2), f"drafts in 0 … {VOCAB - 1} .*gave {VOCAB}"),
        (lambda c, v: tokens_of(-1), r"drafts in 0 … .*gave -1"),
        (lambda c, v: tokens_of(2**31 - 1), "drafts in 0 … .*gave 2147483647"),
        (lambda c, v: Proposal(tokens_of(v), uniform(1, v)), f"drafts in 0 … .*gave {VOCAB}"),
        (lambda c, v: tokens_of(1, dtype=mx.uint32), "drafts int32 .*gave mlx.core.uint32"),
        (lambda c, v: mx.array([1, 2], dtype=mx.int32), r"drafts int32 \(1, n\) .*\(2,\)"),
        (lambda c, v: tokens_of(*range(c + 1)), r"drafts int32 \(1, n\) with n in 0 … 3 but"),
        (lambda c, v: [[1, 2]], r"drafts int32 \(1, n\) .*gave list"),
        (lambda c, v: None, r"drafts int32 \(1, n\) .*gave NoneType"),
        (lambda c, v: Proposal([[1]], uniform(1, v)), r"drafts int32 \(1, n\) .*gave list"),
        (proposing(lambda p: p[:1]), rf"probabilities float32 \(2, {VOCAB}\) .*\(1, {VOCAB}\)"),
        (proposing(lambda p: p[:, 1:]), rf"probabilities float32 \(2, {VOCAB}\) .*\(2, 100\)"),
        (proposing(lambda p: p[None]), r"probabilities float32 .*gave mlx.core.float32 \(1, 2"),
        (proposing(lambda p: p.astype(mx.bfloat16)), "probabilities float32 .*bfloat16"),
        (proposing(lambda p: p.tolist()), "probabilities float32 .*gave list"),
        (proposing(lambda p: None), "probabilities float32 .*gave NoneType"),
    ],
)
def test_an_answer_of_another_kind_is_refused(hybrid, answer, message, temperature):
    """Ids outside the vocabulary were looked up in the embedding as they were."""
    sampling = Sampling(temperature=temperature, seed=3) if temperature else None
    session = prefilled(hybrid, Answering(answer), sampling=sampling)
    with refusal(ValueError, "Session", message):
        session.round()
    assert session.tokens == [5, 3, 8] and session.stats.rounds == 0
    plain = prefilled(hybrid, sampling=sampling)
    for _ in range(3):  # plain rounds go on as if nothing had been
        assert session.round(limit=1).tokens == plain.round().tokens


@pytest.mark.parametrize(
    "change",
    [
        lambda p: 2 * p,
        lambda p: p * 0,
        lambda p: p * mx.nan,
        lambda p: mx.where(mx.arange(VOCAB) == 4, p - 1, mx.where(mx.arange(VOCAB) == 5, p + 1, p)),
        lambda p: mx.concatenate([p[:1], p[1:] * 1.01]),
    ],
    ids=["doubled", "zero", "nan", "negative", "one row"],
)
def test_probabilities_that_are_none_are_refused_after_the_round_was_read(hybrid, change):
    """No wait of its own: it is one more number of what the host reads anyhow."""
    sampling = Sampling(temperature=1.0, seed=3)
    session = prefilled(hybrid, Answering(proposing(change)), sampling=sampling)
    with refusal(ValueError, "Session", "probabilities of at least 0 whose rows sum to 1"):
        session.round()
    assert session.stats.synchronisations == 1 and session.tokens == [5, 3, 8]
    plain = prefilled(hybrid, sampling=sampling)
    assert session.round(limit=1).tokens == plain.round().tokens
    session.sampling = None  # where nothing is drawn they are not used
    assert session.round().tokens


def test_a_sound_proposal_is_taken(hybrid):
    """The control of the tests above: rows as a softmax over a large vocabulary rounds them."""
    for answer in (proposing(lambda p: p * (1 + 1e-4)), lambda c, v: tokens_of(0, VOCAB - 1)):
        session = prefilled(hybrid, Answering(answer), sampling=Sampling(temperature=1.0, seed=3))
        assert session.round().tokens and len(session.round().drafts) == 2
        assert session.stats.synchronisations == 2


@pytest.mark.parametrize("finite", [True, 1.0, mx.array(1)])
def test_finite_is_a_bool_on_the_device(hybrid, finite):
    session = prefilled(hybrid, Answering(lambda c, v: tokens_of(1), finite))
    with refusal(ValueError, "Session", r"finite bool \(\) but the drafter gave"):
        session.round()
