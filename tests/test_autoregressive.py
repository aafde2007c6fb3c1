"""AutoregressiveDrafter: a language model as the draft, whose rejected drafts leave no trace."""

from __future__ import annotations

import importlib
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map_with_path

from decoding import Spoilt, decoded
from dflash_native import load_demo
from dflash_native.cache import RecurrentCache
from dflash_native.drafters import AutoregressiveDrafter, Proposal
from dflash_native.sampling import Sampler, Sampling
from dflash_native.session import Session
from dflash_native.targets import Target
from inputs import same
from recorder import Waits
from test_targets import CONFIGS, VOCAB, make_model, random_tokens

PROMPT = random_tokens(1, 9, seed=4)[0].tolist()
SAMPLED = {"greedy": None, "sampled": Sampling(temperature=0.8, seed=6)}
UNTIED = {"tie_word_embeddings": False}
"""A tied random model repeats the last token, whoever drafts."""
DRAFTS = [*CONFIGS, "qwen2"]
STOCK = ["qwen2"]


@pytest.fixture(scope="module")
def hybrid():
    mx.set_default_device(mx.cpu)
    return Target(make_model("qwen3_5", **UNTIED))


def stock_model(name="qwen2", **changes):
    """A model of a family that only mlx-lm's own forward runs."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = {
        "model_type": name,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config | changes))
    mx.eval(model.parameters())
    return model


def draft_model(name, seed=0):
    return stock_model(name) if name in STOCK else make_model(name, seed=seed, **UNTIED)


def near(model):
    """The model with noise on its weights: a draft that is right now and then."""

    def noisy(path, value):
        scale = 0.02 * mx.std(value)
        return value + scale * mx.random.normal(value.shape, key=mx.random.key(len(path)))

    model.update(tree_map_with_path(noisy, model.parameters()))
    mx.eval(model.parameters())
    return model


# ---- what it proposes


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_are_what_the_model_says_step_by_step(hybrid, name):
    """Against the model's own forward over the whole text, from nothing, for each draft."""
    model = draft_model(name, seed=5)
    session = AutoregressiveDrafter(model, 6).begin(hybrid)
    tokens = list(PROMPT)
    session.observe(tokens)
    for extra in ([7], [1, 2, 3], [50] * 4):
        drafts = session.propose(mx.array([tokens[-1:]]), len(tokens) - 1, 6)
        assert drafts.shape == (1, 6) and drafts.dtype == mx.int32
        said = list(tokens)
        for _ in range(6):
            said.append(mx.argmax(model(mx.array([said]))[0, -1]).item())
        assert drafts.tolist()[0] == said[len(tokens) :]
        again = session.propose(mx.array([tokens[-1:]]), len(tokens) - 1, 2)
        assert again.tolist()[0] == said[len(tokens) :][:2]
        tokens += extra
        session.observe(extra)
    wrong = AutoregressiveDrafter(model, 6).begin(hybrid)  # the control: another last but one
    wrong.observe([*tokens[:-2], tokens[-2] ^ 1, tokens[-1]])
    for each in (session, wrong):
        each.propose(mx.array([tokens[-1:]]), len(tokens) - 1, 6)
    assert mx.abs(session._logits - wrong._logits).max() > 1e-3


def test_a_target_that_drafts_for_itself_is_always_right(hybrid):
    """The same bits in one call or many: no draft is refused, greedy or with the same noise."""
    for sampling in (None, Sampling(temperature=1.0, seed=3)):
        drafter = AutoregressiveDrafter(hybrid, 5)
        session = decoded(hybrid, PROMPT, 120, drafter, sampling=sampling)
        assert session.stats.rejections == 0 and session.stats.rounds == 20
        drafter.proposes = "argmax"
        session = decoded(hybrid, PROMPT, 120, drafter, sampling=sampling)
        assert (session.stats.rejections > 0) == (sampling is not None)  # the control


@pytest.mark.parametrize("proposes", ["argmax", "coupled", "drawn"])
def test_the_ways_of_proposing(hybrid, proposes):
    drafter = AutoregressiveDrafter(make_model("qwen3", seed=2), 3)
    drafter.proposes = proposes
    sampler = Sampler(Sampling(temperature=0.9, top_k=20, seed=1), VOCAB)
    session = drafter.begin(hybrid)
    session.observe(PROMPT)
    answer = session.propose(mx.array([PROMPT[-1:]]), len(PROMPT) - 1, 3, sampler)
    assert isinstance(answer, Proposal) == (proposes == "drawn")
    tokens = answer.tokens if proposes == "drawn" else answer
    text = PROMPT + tokens.tolist()[0]
    logits = drafter.model(mx.array([text]))[0, len(PROMPT) - 1 : -1].astype(mx.float32)
    if proposes == "argmax":
        assert text[len(PROMPT) :] == mx.argmax(logits, axis=-1).tolist()
    else:
        use = "token" if proposes == "coupled" else "draft"
        assert text[len(PROMPT) :] == sampler.draw(logits, len(PROMPT), use).tolist()
    if proposes == "drawn":
        chances = mx.softmax(sampler.scores(logits), axis=-1)
        assert mx.abs(answer.probabilities - chances).max() < 1e-4
    assert session.finite.item()


# ---- what is left of a proposal


@pytest.mark.parametrize(
    ("name", "exact"), [*((name, True) for name in CONFIGS), *((name, False) for name in DRAFTS)]
)
def test_after_every_round_its_caches_are_those_of_a_fresh_prefill(hybrid, name, exact):
    """Bit for bit where the operations are ours. Rounds of many widths, rewinds, a second turn."""
    model = draft_model(name, seed=5)
    given = model if name in STOCK else Target(model, exact=exact)
    drafter = AutoregressiveDrafter(given, 5, prefill_step_size=7)
    session = Session(hybrid, drafter)
    session.prefill(random_tokens(1, 90, seed=2)[0].tolist())
    rejections = 0
    for number, limit in enumerate((None, 3, 1, None, 2, None, 1, 1, None, None)):
        result = session.round(limit)
        rejections += result.accepted < len(result.drafts)
        if number == 3:
            session.rewind(1)
        if number == 6:
            session.prefill([4, 4, 2])
        draft = session._draft
        draft.observe(session.tokens[session._told :])
        session._told = len(session.tokens)
        while draft._reader.length < len(session.tokens):  # read, as the next proposal would
            draft._read(len(session.tokens) - draft._reader.length)
        fresh = drafter.reader()
        logits = fresh.read(mx.array([session.tokens]))
        check_equal(draft, fresh, logits, exact)
        if number == 0:  # the control: another token, far back
            other = drafter.reader()
            logits = other.read(mx.array([[*session.tokens[:2], 99, *session.tokens[3:]]]))
            with pytest.raises(AssertionError):
                check_equal(draft, other, logits, exact)
    assert rejections >= 5


def check_equal(draft, fresh, logits, exact):
    rows = fresh.length
    assert draft._reader.length == rows
    pairs = [(draft._logits, logits)]
    caches = (getattr(reader.cache, "layers", reader.cache) for reader in (draft._reader, fresh))
    for ours, theirs in zip(*caches, strict=True):
        if isinstance(ours, RecurrentCache):
            pairs += [(ours.window, theirs.window), (ours.state, theirs.state)]
        else:
            pairs += [
                (a[:, :, :rows], b[:, :, :rows])
                for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values))
            ]
    for ours, theirs in pairs:
        if exact:
            assert same(ours, theirs)
        else:
            assert mx.abs(ours - theirs).max() <= 1e-4 * mx.abs(theirs).max()


# ---- in a session


@cache
def plain_tokens(target, sampling):
    return decoded(target, PROMPT, 512, sampling=sampling).tokens


@pytest.mark.parametrize("sampling", SAMPLED.values(), ids=SAMPLED)
@pytest.mark.parametrize("block_size", [2, 4, 9])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "llama_sliding", "qwen2"])
def test_512_tokens_with_a_hundred_rejections_equal_plain_decoding(
    hybrid, name, block_size, sampling
):
    plain = plain_tokens(hybrid, sampling)
    if name == "qwen3_5":
        drafter = Spoilt(AutoregressiveDrafter(near(make_model(name, **UNTIED)), 8), 0.35)
    else:
        drafter = AutoregressiveDrafter(draft_model(name, seed=5), 8)
    options = {"block_size": block_size, "sampling": sampling}
    session = decoded(hybrid, PROMPT, 512, drafter, **options)
    assert session.tokens == plain
    assert session.stats.rejections >= 100
    if name == "qwen3_5":
        assert session.stats.accepted >= 100, session.stats
    assert session.tokens != [*plain[:-1], plain[-1] ^ 1]  # the control
    if sampling:
        other = Sampling(temperature=0.8, seed=7)
        assert decoded(hybrid, PROMPT, 64, drafter, sampling=other).tokens != plain[: 9 + 64]


def test_the_demo_target_with_itself_in_four_bits():
    model, tokenizer, _ = load_demo(mx.bfloat16)
    small, _, _ = load_demo(mx.bfloat16)
    nn.quantize(small, group_size=64, bits=4)
    target, prompt = Target(model), tokenizer.encode("def fibonacci(n):\n    ")
    for sampling in SAMPLED.values():
        plain = decoded(target, prompt, 512, sampling=sampling).tokens
        for block_size in (3, 5):
            drafter = Spoilt(AutoregressiveDrafter(small), 0.35)
            options = {"block_size": block_size, "sampling": sampling}
            session = decoded(target, prompt, 512, drafter, **options)
            assert session.tokens == plain
            assert session.stats.rejections >= 100 and session.stats.accepted >= 100


def test_one_synchronisation_a_round(hybrid, monkeypatch):
    """Also where the prompt is read, in chunks: nothing of a draft model waits for the device."""
    session = Session(hybrid, AutoregressiveDrafter(make_model("qwen3_next", seed=5), 4))
    session._draft._drafter.prefill_step_size = 16
    session.prefill(random_tokens(1, 100)[0].tolist())
    waits = Waits(monkeypatch).names
    for _ in range(5):
        session.round()
    assert waits == ["tolist"] * 5
    assert session._draft._reader.length > 100


@pytest.mark.parametrize("name", ["qwen3_next", "qwen2"])
def test_an_interrupted_reading_is_begun_again(hybrid, name, monkeypatch):
    """Ctrl-C in the middle of the model's layers, at the second of several calls."""
    model = draft_model(name, seed=5)
    session = AutoregressiveDrafter(model, 4).begin(hybrid)
    session.observe(PROMPT)
    pending, at = mx.array([PROMPT[-1:]]), len(PROMPT) - 1
    expected = session.propose(pending, at, 4).tolist()
    read, calls = session._reader.read, []

    def interrupted(tokens):
        calls.append(tokens)
        logits = read(tokens)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return logits

    fresh = AutoregressiveDrafter(model, 4).begin(hybrid)
    for attempt in (session, fresh):
        read, calls = attempt._reader.read, []
        monkeypatch.setattr(attempt._reader, "read", interrupted)
        if attempt is fresh:
            attempt.observe(PROMPT)
        with pytest.raises(KeyboardInterrupt):
            attempt.propose(pending, at, 4)
        attempt.observe([])
        assert attempt.propose(pending, at, 4).tolist() == expected


# ---- what is refused


def test_what_cannot_be_taken_back_is_refused_by_name(hybrid):
    refused = {
        "mamba2 state": (
            "mamba",
            {
                "intermediate_size": 128,
                "state_size": 8,
                "conv_kernel": 4,
                "use_bias": False,
                "use_conv_bias": True,
                "time_step_rank": 4,
            },
            "mamba.Model has ArraysCache",
        ),
        "rotating": ("gemma3_text", {"sliding_window": 8}, "gemma3_text.Model has .*Rotating"),
    }
    for name, changes, message in refused.values():
        model = stock_model(name, **changes)
        with pytest.raises(ValueError, match=rf"can be trimmed at any length, but .*{message}"):
            AutoregressiveDrafter(model)
    for model in (nn.Linear(3, 3), "path", None):
        with pytest.raises(ValueError, match="expected a language model that mlx-lm loaded but"):
            AutoregressiveDrafter(model)


def test_bad_arguments_are_refused(hybrid):
    for name in ("qwen3", "qwen2"):
        other = make_model(name, vocab_size=90) if name == "qwen3" else stock_model(vocab_size=90)
        message = f"a target of vocab_size 90, the draft model's, but got {VOCAB}"
        with pytest.raises(ValueError, match=message):
            Session(hybrid, AutoregressiveDrafter(other))
    model = make_model("qwen3")
    with pytest.raises(ValueError, match="max_drafts of at least 1 but got 0"):
        AutoregressiveDrafter(model, 0)
    with pytest.raises(ValueError, match="prefill_step_size of at least 1 but got 0"):
        AutoregressiveDrafter(model, prefill_step_size=0)
    session = AutoregressiveDrafter(model, 3).begin(hybrid)
    session.observe([1, 2])
    with pytest.raises(ValueError, match="a count from 1 to 3 but got 4"):
        session.propose(mx.array([[2]]), 1, 4)
    with pytest.raises(ValueError, match="position 1 but got 2"):
        session.propose(mx.array([[2]]), 2, 3)
