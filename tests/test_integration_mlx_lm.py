"""mlx-lm's own speculative decoding on hybrid models, which it refuses without the facade."""

from __future__ import annotations

import copy
from itertools import islice

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import (
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from dflash_native import demo, load_demo
from dflash_native.integrations.mlx_lm import TrimmableCache, TrimmableModel
from dflash_native.session import Session
from dflash_native.targets import Target
from test_targets import CONFIGS, make_model, random_tokens

COUNT = 260
"""Tokens of a run."""


@pytest.fixture(scope="module")
def pair():
    """The demo target, and itself with noise in its weights, which agrees with it sometimes."""
    target, tokenizer, _ = load_demo()
    draft, _, _ = load_demo()
    mx.random.seed(3)

    def noisy(value):
        return value + 0.4 * mx.std(value) * mx.random.normal(value.shape)

    draft.update(tree_map(lambda v: noisy(v) if v.ndim == 2 else v, draft.parameters()))
    mx.eval(draft.parameters())
    return target, draft, tokenizer


@pytest.fixture(scope="module")
def prompt(pair):
    return pair[2].encode(demo.prompts()[15].text)


@pytest.fixture(scope="module")
def model(pair):
    return TrimmableModel(pair[0])


@pytest.fixture(scope="module")
def plain(model, prompt):
    """The plain continuation, by the same object."""
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=COUNT)]


def speculate(model, draft, prompt, drafts, count=COUNT, cache=None, step=512):
    """Tokens by mlx-lm's loop, and the rounds in which it refused a draft."""
    steps = speculative_generate_step(
        mx.array(prompt),
        model,
        draft,
        stream=mx.default_stream(mx.default_device()),
        num_draft_tokens=drafts,
        max_tokens=count,
        prompt_cache=cache,
        prefill_step_size=step,
    )
    tokens, rejections, accepted = [], 0, 0
    for token, _, from_draft in steps:
        tokens.append(token)
        if not from_draft:  # the target's own token ends a round
            rejections += accepted < drafts
        accepted = accepted + 1 if from_draft else 0
    return tokens, rejections


def logits_of(model, tokens):
    """Of the last of `tokens`, through a fresh cache."""
    return model(mx.array([tokens]))[:, -1]


def same(a, b):
    return a.shape == b.shape and bool(mx.array_equal(a, b))


def test_stock_mlx_lm_refuses_a_hybrid(pair, prompt):
    target, draft, _ = pair
    with pytest.raises(ValueError, match=r"requires a trimmable prompt cache .*ArraysCache"):
        speculate(target, draft, prompt, 3)


def test_plain_decoding_is_that_of_a_session(pair, prompt, plain):
    session = Session(Target(pair[0], prefill="exact"))
    session.prefill(prompt)
    while len(session.tokens) < len(prompt) + COUNT:
        session.round()
    assert session.tokens[len(prompt) :] == plain


@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_speculation_with_a_hybrid_draft_equals_plain_decoding(pair, model, prompt, plain, drafts):
    """The draft rewinds over calls of one token each, the target within its last call."""
    draft = TrimmableModel(pair[1])
    cache = make_prompt_cache(model) + make_prompt_cache(draft)
    tokens, rejections = speculate(model, draft, prompt, drafts, cache=cache)
    assert tokens == plain
    assert 50 <= rejections <= 200
    seen = prompt + tokens
    for facade, held in zip((model, draft), cache, strict=True):
        assert len(seen) - held.offset in (1, 2)
        rest = mx.array([seen[held.offset :]])
        assert same(facade(rest, cache=[held])[:, -1], logits_of(facade, seen))


def test_a_trim_that_is_off_by_one_gives_other_tokens(pair, prompt, plain, monkeypatch):
    """What the comparisons above would see."""
    right = TrimmableCache.trim
    monkeypatch.setattr(TrimmableCache, "trim", lambda self, n: right(self, max(n - 1, 0)))
    tokens, _ = speculate(TrimmableModel(pair[0]), TrimmableModel(pair[1]), prompt, 3)
    assert tokens != plain


def test_a_draft_that_is_not_rewound_is_accepted_less(pair, model, prompt, plain):
    """mlx-lm lets a hybrid draft of its own go on with the drafts that were refused."""
    rewound, rejections = speculate(model, TrimmableModel(pair[1]), prompt, 3, count=80)
    stale, more = speculate(model, pair[1], prompt, 3, count=80)
    assert rewound == stale == plain[:80] and more > rejections


@pytest.mark.parametrize("step", [5, 40])
def test_the_chunks_of_a_prompt_change_nothing(pair, model, prompt, plain, step):
    """Of 5 inputs, on trial like a block, and of 40, final at once."""
    tokens, _ = speculate(model, TrimmableModel(pair[1]), prompt, 3, count=40, step=step)
    assert tokens == plain[:40]


def test_an_ordinary_draft(model, prompt, plain):
    draft = make_model("qwen3", vocab_size=model.target.vocab_size)
    tokens, rejections = speculate(model, draft, prompt, 3, count=64)
    assert tokens == plain[:64] and rejections >= 60


@pytest.mark.parametrize("dtype", [None, mx.bfloat16])
def test_in_8_bits_and_in_bf16(pair, prompt, dtype):
    target, _, _ = load_demo(dtype)
    model = TrimmableModel(target)
    expected = [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=100)]
    tokens, rejections = speculate(model, TrimmableModel(pair[1]), prompt, 4, count=100)
    assert tokens == expected and rejections > 25


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_and_trims_give_the_bits_of_single_calls(name):
    """Every family; trims within a call and over several, up to all that is trimmable."""
    model = TrimmableModel(make_model(name), max_trim=6)
    tokens = random_tokens(1, 40)
    steps = model.make_cache()
    single = [model(tokens[:, i : i + 1], cache=steps) for i in range(40)]
    cache = model.make_cache()
    at = 0
    for width, trim in [(9, 0), (4, 2), (1, 0), (1, 0), (1, 3), (5, 5), (1, 0), (2, 0), (3, 6)] * 2:
        found = model(tokens[:, at : at + width], cache=cache)
        assert same(found, mx.concatenate(single[at : at + width], axis=1))
        at += width
        if trim:
            assert cache[0].trim(trim) == trim
            at -= trim
        assert cache[0].offset == cache[0].size() == at
    wrong = model(tokens[:, at + 1 : at + 2], cache=cache)
    assert not same(wrong, single[at])


def test_one_cache_each_and_at_most_max_trim_sets_of_states(model):
    cache = model.make_cache()
    assert len(cache) == len(model.layers) == 1 and can_trim_prompt_cache(cache)
    assert cache[0].empty() and cache[0].trimmable == 0
    for _ in range(20):
        model(mx.array([[5]]), cache=cache)
    assert not cache[0].empty() and cache[0].trimmable == 8 and len(cache[0]._earlier) == 7
    trim_prompt_cache(cache, 0)
    model(mx.array([[5]]), cache=cache)
    assert cache[0].trimmable == 1
    assert cache[0].nbytes == sum(array.nbytes for array in cache[0].state)


def test_a_copy_is_independent(model, prompt):
    cache = model.make_cache()
    model(mx.array([prompt]), cache=cache)
    model(mx.array([[7, 8, 9]]), cache=cache)
    copied = copy.deepcopy(cache)
    assert trim_prompt_cache(copied, 2) == 2
    found = model(mx.array([[10]]), cache=copied)[:, -1]
    assert same(found, logits_of(model, [*prompt, 7, 10]))
    found = model(mx.array([[10]]), cache=cache)[:, -1]
    assert same(found, logits_of(model, [*prompt, 7, 8, 9, 10]))


def test_a_state_that_is_kept_stays_as_it_is(model, prompt):
    """Bug: the rows after a trim were written into the arrays that `state` had given, evaluated as
    they were. Proof: in a llama of 4 layers all 8 arrays. mlx-lm's own caches leave them alone.
    """
    (cache,) = model.make_cache()
    model(mx.array([[*prompt[:8]]]), cache=[cache])
    kept = cache.state
    mx.eval(kept)
    expected = [np.array(array) for array in kept]
    cache.trim(4)
    mx.eval(model(mx.array([[7, 8]]), cache=[cache]))
    assert all(map(np.array_equal, map(np.array, kept), expected))
    written = [np.array(array) for array in cache.state]
    assert not all(map(np.array_equal, written, expected))


@pytest.mark.parametrize("delivered", [1, 2, 3, 9, 10])
def test_a_reader_that_leaves_finds_the_caches_at_what_it_got(pair, model, prompt, delivered):
    draft = TrimmableModel(pair[1])
    cache = make_prompt_cache(model) + make_prompt_cache(draft)
    steps = speculative_generate_step(
        mx.array(prompt), model, draft, num_draft_tokens=8, prompt_cache=cache
    )
    seen = prompt + [token for token, _, _ in islice(steps, delivered)]
    steps.close()
    assert len(seen) - cache[0].offset in (0, 1)
    kept = seen[: cache[0].offset]
    assert same(model(mx.array([[11]]), cache=cache[:1])[:, -1], logits_of(model, [*kept, 11]))


def test_stream_generate_of_mlx_lm_with_a_draft_model(pair, model, prompt, plain):
    _, noisy, tokenizer = pair
    texts, tokens = [], []
    for draft in (None, TrimmableModel(noisy)):
        found = list(
            mlx_lm.stream_generate(
                model, tokenizer, prompt, 60, draft_model=draft, num_draft_tokens=4
            )
        )
        tokens.append([response.token for response in found])
        texts.append("".join(response.text for response in found))
        assert found[-1].finish_reason == "length"
    assert any(response.from_draft for response in found)
    assert tokens[0] == tokens[1] == plain[:60] and texts[0] == texts[1]
    assert mlx_lm.generate(model, tokenizer, prompt, max_tokens=60) == texts[0]


def test_after_an_error_the_cache_is_as_it_was(model, prompt):
    cache = model.make_cache()
    model(mx.array([prompt]), cache=cache)
    model(mx.array([[7, 8, 9]]), cache=cache)
    trim_prompt_cache(cache, 1)
    with pytest.raises(ValueError, match=r"\[forward\] expected integer tokens"):
        model(mx.array([[1.0]]), cache=cache)
    with pytest.raises(ValueError, match=r"\[trim\] expected 0 … 2 inputs.* but got 3"):
        trim_prompt_cache(cache, 3)
    with pytest.raises(ValueError, match=r"\[trim\] expected 0 … 2 inputs.* but got -1"):
        trim_prompt_cache(cache, -1)
    assert trim_prompt_cache(cache, 1) == 1
    found = model(mx.array([[10]]), cache=cache)[:, -1]
    assert same(found, logits_of(model, [*prompt, 7, 10]))


def test_what_cannot_be_done_is_refused_by_name(pair, model, prompt, tmp_path):
    target, draft, tokenizer = pair
    with pytest.raises(ValueError, match=r"max_trim of at least 0 but got -1"):
        TrimmableModel(target, max_trim=-1)
    with pytest.raises(ValueError, match=r"\[trim\] expected 0 … 0 .* max_trim of the most drafts"):
        speculate(TrimmableModel(target, max_trim=3), draft, prompt, 8)
    with pytest.raises(ValueError, match=r"expected no kv_bits"):
        list(
            mlx_lm.stream_generate(
                model, tokenizer, prompt, kv_bits=4, quantized_kv_start=0, max_tokens=4
            )
        )
    with pytest.raises(ValueError, match=r"does not support input embeddings"):
        list(generate_step(mx.array(prompt), model, input_embeddings=mx.zeros((1, 8))))
    with pytest.raises(
        ValueError, match=r"expected inputs \[1, T\], one request, but got \(2, 3\)"
    ):
        model(mx.zeros((2, 3), mx.int32))
    with pytest.raises(TypeError, match=r"the one cache of make_cache but got \[ArraysCache, "):
        model(mx.array([prompt]), cache=make_prompt_cache(target))
    with pytest.raises(ValueError, match=r"expected a model_type among"):
        TrimmableModel(mlx_lm.models.cache)
    cache = model.make_cache()
    model(mx.array([prompt]), cache=cache)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    with pytest.raises(KeyError, match="TrimmableCache"):
        load_prompt_cache(str(tmp_path / "cache.safetensors"))


def test_the_model_is_left_as_it_was(pair, model, prompt):
    target = pair[0]
    before = {name: id(module) for name, module in target.named_modules()}, type(target).__call__
    speculate(model, TrimmableModel(pair[1]), prompt, 3, count=12)
    after = {name: id(module) for name, module in target.named_modules()}, type(target).__call__
    assert before == after
