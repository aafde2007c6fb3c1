"""Sampling: values that cannot be used are refused by name; the odd ones that can leave numbers."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors

from dflash_native.sampling import Sampler, Sampling
from dflash_native.session import Session
from dflash_native.targets import Target
from scripted import ScriptedDrafter
from test_bad_input import prefilled, refusal
from test_targets import VOCAB, make_model

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def hybrid():
    mx.set_default_device(mx.cpu)
    return Target(make_model("qwen3_5"))


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
