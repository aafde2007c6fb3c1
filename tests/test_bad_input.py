"""What cannot be used is refused in one sentence that names it, and what looks odd works."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors

from dflash_native.drafters import Proposal
from dflash_native.policy import Costs, WidthPolicy
from dflash_native.sampling import Sampler, Sampling
from dflash_native.session import Session
from dflash_native.targets import Target
from scripted import ScriptedDrafter
from test_targets import VOCAB, make_model

NAN, INF = float("nan"), float("inf")
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


# ---- sampling


@pytest.mark.parametrize(
    "options, kind, message",
    [
        ({"temperature": -1}, ValueError, r"temperature of at least 0 but got -1\.$"),
        ({"temperature": NAN}, ValueError, r"temperature to be finite but got nan\.$"),
        ({"temperature": INF}, ValueError, "temperature to be finite but got inf"),
        ({"temperature": 10**400}, ValueError, "temperature to be finite but got inf"),
        ({"temperature": "0.8"}, TypeError, "temperature to be a number but got '0.8'"),
        ({"temperature": None}, TypeError, "temperature to be a number but got None"),
        ({"temperature": True}, TypeError, "temperature to be a number but got True"),
        ({"temperature": np.array([1.0, 2.0])}, TypeError, "temperature to be a number"),
        ({"top_p": 1.5}, ValueError, r"top_p in 0 … 1 but got 1\.5"),
        ({"top_p": NAN}, ValueError, "top_p to be finite but got nan"),
        ({"min_p": -0.1}, ValueError, "min_p in 0 … 1"),
        ({"top_k": -2}, ValueError, "top_k of at least 0 but got -2"),
        ({"top_k": 2.5}, TypeError, r"top_k to be an integer but got 2\.5"),
        ({"top_k": np.float32(2)}, TypeError, "top_k to be an integer"),
        ({"min_tokens_to_keep": 0}, ValueError, "min_tokens_to_keep of at least 1"),
        ({"repetition_penalty": -1.0}, ValueError, "repetition_penalty of at least 0 but got -1"),
        ({"repetition_penalty": 1e38}, ValueError, r"repetition_penalty 0 \(none\) or in 1e-06"),
        ({"repetition_penalty": 1e-38}, ValueError, r"repetition_penalty 0 \(none\) or in 1e-06"),
        ({"repetition_penalty": INF}, ValueError, "repetition_penalty to be finite"),
        ({"presence_penalty": NAN}, ValueError, "presence_penalty to be finite"),
        ({"presence_penalty": -1e38}, ValueError, r"presence_penalty in -1e\+30 … 1e\+30"),
        ({"frequency_penalty": "1"}, TypeError, "frequency_penalty to be a number but got '1'"),
        ({"presence_context_size": 0}, ValueError, "presence_context_size of at least 1"),
        ({"presence_context_size": 2.5}, TypeError, "presence_context_size to be an integer"),
        ({"logit_bias": {3: NAN}}, ValueError, r"logit_bias\[3\], unless it is -inf, to be finite"),
        ({"logit_bias": {3: INF}}, ValueError, r"logit_bias\[3\], unless it is -inf, to be finite"),
        ({"logit_bias": {3: 1e38}}, ValueError, r"logit_bias\[3\], unless it is -inf, in -1e\+30"),
        ({"logit_bias": {3: "1"}}, TypeError, r"logit_bias\[3\], unless it is -inf, to be a"),
        ({"logit_bias": {"3": 1.0}}, TypeError, "logit_bias's token ids to be an integer"),
        ({"logit_bias": [1.0]}, TypeError, "logit_bias to be a mapping but got list"),
        ({"logits_processors": max}, TypeError, "logits_processors to be a list of callables"),
        ({"logits_processors": [None]}, TypeError, "logits_processors to be a list of callables"),
        ({"logits_processors": "max"}, TypeError, "logits_processors to be a list of callables"),
        ({"seed": "abc"}, TypeError, "seed to be an integer but got 'abc'"),
        ({"seed": 1.0}, TypeError, r"seed to be an integer but got 1\.0"),
    ],
)
def test_a_sampling_out_of_range_or_of_another_kind(options, kind, message):
    with refusal(kind, "Sampling", message):
        Sampling(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_k": VOCAB}, f"top_k of at most {VOCAB - 1} in a vocabulary of {VOCAB} tokens"),
        (
            {"min_p": 0.1, "min_tokens_to_keep": VOCAB + 1},
            f"min_tokens_to_keep of at most {VOCAB} in a vocabulary of {VOCAB} tokens but got",
        ),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias for ids in 0 … {VOCAB - 1} but got {VOCAB}"),
        ({"logit_bias": {-1: 1.0}}, f"logit_bias for ids in 0 … {VOCAB - 1} but got -1"),
        ({"logit_bias": dict.fromkeys(range(VOCAB), -INF)}, "logit_bias to leave a token"),
    ],
)
def test_a_sampling_that_does_not_fit_the_vocabulary(hybrid, options, message):
    with refusal(ValueError, "Sampling", message):
        Session(hybrid, sampling=Sampling(temperature=1.0, **options))


def test_a_sampling_at_the_borders_of_the_vocabulary(hybrid):
    bias = dict.fromkeys(range(1, VOCAB), -INF)
    for options in ({"top_k": VOCAB - 1}, {"min_p": 0.9, "min_tokens_to_keep": VOCAB}):
        session = prefilled(hybrid, sampling=Sampling(temperature=1.0, seed=1, **options))
        assert 0 <= session.round().tokens[0] < VOCAB
    only = prefilled(hybrid, sampling=Sampling(temperature=1.0, logit_bias=bias))
    assert only.round().tokens == [0]


def test_numpys_scalars_are_pythons(hybrid):
    options = {"temperature": 0.75, "top_p": 0.5, "min_p": 0.125, "repetition_penalty": 1.5}
    whole = {"top_k": 20, "seed": 7, "repetition_context_size": 5}
    plain = Sampling(**options, **whole, logit_bias={3: 2.0})
    for number, integer in ((np.float32, np.int64), (np.float16, np.uint8), (np.float64, np.int32)):
        found = Sampling(
            **{name: number(value) for name, value in options.items()},
            **{name: integer(value) for name, value in whole.items()},
            logit_bias={integer(3): number(2.0)},
        )
        assert found == plain and type(found.temperature) is float and type(found.seed) is int
        assert repr(found) == repr(plain)
    tokens = [
        prefilled(hybrid, sampling=sampling).round().tokens
        for sampling in (plain, found, Sampling(temperature=0.75, seed=8))
    ]
    assert tokens[0] == tokens[1] != tokens[2]


EXTREMES = [
    {"repetition_penalty": 1e6},
    {"repetition_penalty": 1e-6},
    {"presence_penalty": 1e30, "frequency_penalty": 1e30},
    {"presence_penalty": -1e30, "frequency_penalty": -1e30},
]


@pytest.mark.parametrize("penalties", EXTREMES)
@pytest.mark.parametrize("bias", [1e30, -1e30, -INF])
def test_extreme_penalties_leave_numbers(penalties, bias):
    """A repetition penalty of 1e-38 made infinity of a logit, and then NaN of every score."""
    options = {"temperature": 1e-3, "logit_bias": {0: bias}, **penalties}
    sampler = Sampler(Sampling(seed=1, **options), 8)
    logits = mx.array([[40.0, 40.0, -40.0, 0.0, -0.0, 3.0, 2.0, 1.0]])
    tokens = mx.array([0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 0])
    for before in (tokens, tokens[:3]):
        found = sampler.processed(logits, before)
        assert not mx.any(mx.isnan(found)) and not mx.any(found == mx.inf)
        assert not mx.any(mx.isnan(sampler.scores(found)))
        assert 0 <= sampler.draw(found, 3).item() < 8


def test_a_penalty_beyond_the_range_makes_nan():
    """The control of the test above: mlx-lm's own processor with what is refused here."""
    (penalty,) = make_logits_processors(None, 1e-38)
    found = penalty(mx.array([0]), mx.array([[40.0, 1.0]]))
    assert mx.any(mx.isnan(Sampler(Sampling(temperature=1.0), 2).scores(found)))


def test_a_repetition_penalty_of_zero_is_none():
    """mlx-lm's meaning."""
    assert Sampling(repetition_penalty=0).is_argmax
    assert not Sampling(repetition_penalty=1.1).is_argmax


@pytest.mark.parametrize(
    "answer, given",
    [
        (lambda row: row[0], r"\(101,\)"),
        (lambda row: row[:, :-1], r"\(1, 100\)"),
        (lambda row: mx.concatenate([row, row]), r"\(2, 101\)"),
        (lambda row: None, "NoneType"),
        (lambda row: row.tolist(), "list"),
    ],
)
@pytest.mark.parametrize("speculative", [False, True])
def test_a_processor_of_another_shape_is_refused_by_name(hybrid, answer, given, speculative):
    """A row of one id less was drawn from, and of two rows each stood for another position."""

    def shortening(tokens, logits):
        return answer(logits)

    drafter = ScriptedDrafter([5, 3, 8]) if speculative else None
    session = prefilled(hybrid, drafter, sampling=Sampling(logits_processors=[shortening]))
    message = rf"logits \(1, {VOCAB}\) from the logits processor shortening but got {given}"
    with refusal(ValueError, "Sampling", message):
        session.round()
    session.sampling = None
    assert session.round(limit=1).tokens == prefilled(hybrid).round().tokens


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


def test_a_removed_token_is_never_accepted():
    """A negative probability let a draft pass that top_k had removed: uniform * q < 0."""
    sampler = Sampler(Sampling(temperature=1.0, top_k=1, seed=1), 4)
    logits = mx.array([[2.0, 1.0, 0.0, 0.0]] * 2)
    for chance in (-0.5, 0.0, 0.5):
        proposal = mx.array([[0.5, 0.5, chance, 0.5 - chance]])
        agreed, tokens = sampler.judge(logits, mx.array([2]), proposal, 0)
        assert not agreed.item() and tokens.tolist() == [0, 0]
    agreed, _ = sampler.judge(logits, mx.array([0]), mx.array([[1.0, 0.0, 0.0, 0.0]]), 0)
    assert agreed.item()  # the control
