"""DFlash and DFlash2 drafts against the authors' MLX model and an oracle without a cache."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from dflash_native.drafters import (
    DFlashConfig,
    DFlashDrafter,
    Drafter,
    DraftSession,
    Proposal,
)
from dflash_native.drafters.context import ContextCache
from dflash_native.drafters.dflash2 import CandidateSelector, top_candidates
from dflash_native.modules import Products, norm
from dflash_native.sampling import Sampler, Sampling
from dflash_native.targets import Target
from drafter_oracle import (
    BLOCK,
    HIDDEN,
    LAYERS,
    MIXED,
    SLIDES,
    SLIDING,
    TAPS,
    VARIANTS,
    VOCAB,
    WINDOW,
    begin,
    block_of,
    drafter_of,
    gap,
    oracle_hidden,
    random_weights,
    raw_config,
    save,
    taps_of,
    tiny_target,
    tokens,
)

EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def authors():
    try:
        module = importlib.import_module("dflash.model_mlx")
    except ImportError as error:
        pytest.fail(f"the authors' model is missing: pip install --no-deps dflash==0.1.0 ({error})")
    with pytest.MonkeyPatch.context() as patch:  # its loader asks the hub also for a local folder
        patch.setattr(module, "snapshot_download", lambda path, **_: path)
        yield module


# Agreement


@EVERY_VARIANT
def test_agrees_with_the_authors_over_cached_rounds(variant, target, authors, tmp_path):
    folder = save(tmp_path, raw_config(**VARIANTS[variant]))
    theirs = authors.load_draft(str(folder)).bind(target.model)
    assert theirs.config.target_layer_ids == TAPS
    session, twin = (DFlashDrafter.load(folder).begin(target) for _ in range(2))
    cache, start, seen = theirs.make_cache(), 0, set()
    # Never one row: the authors' ring then loses the order of positions that their mask assumes.
    rounds = (17, 3, 2, BLOCK, BLOCK, 4, 2, 5)
    taps = taps_of(target, tokens(sum(rounds)))
    for index, new in enumerate(rounds):
        rows, anchor = taps[:, start : start + new], tokens(1, 50 + index)
        session.extend(rows[:, :1], start)
        session.extend(rows[:, 1:], start + 1)
        twin.extend(rows, start)
        start += new
        block = mx.concatenate([anchor, mx.full((1, BLOCK - 1), VOCAB - 1)], axis=1)
        hidden = theirs.hidden_states(block, rows, cache, logits_start=1)
        logits = theirs.compute_logits(hidden)
        if "architectures" in VARIANTS[variant]:
            proposals = theirs.candidate_selector.select(hidden, logits, block[:, 0], 0.0)[0]
        else:
            proposals = mx.argmax(logits, axis=-1)
        assert gap(block_of(session, anchor, start), hidden) < 1e-4
        assert gap(session.logits(hidden), logits) < 1e-5
        assert twin.propose(anchor, start, BLOCK - 1).tolist() == proposals.tolist()
        seen.update(proposals[0].tolist())
    assert len(seen) > 8
    other = block_of(session, (anchor + 1) % VOCAB, start)
    assert gap(other, hidden) > 1e-2


def test_taps_are_the_authors_and_one_layer_early_differs(target, authors):
    hooked = SimpleNamespace(layers=list(target.model.model.layers))
    authors._patch_model(hooked, TAPS)
    x = target.embed(tokens(20))
    for layer in hooked.layers:
        x = layer(x, "causal", None)
    taps = taps_of(target, tokens(20))
    assert gap(taps, mx.concatenate(hooked._hidden_states, axis=-1)) < 1e-5
    early = taps_of(target, tokens(20), (1, 0, 2))
    blocks = []
    for columns in (taps, early):
        session = begin(raw_config(), target)
        session.extend(columns, 0)
        blocks.append(block_of(session, tokens(1), 20))
    assert gap(*blocks) > 1e-2


@EVERY_VARIANT
def test_agrees_with_the_oracle_in_rounds_of_any_size(variant, target):
    raw = raw_config(**VARIANTS[variant])
    weights = random_weights(DFlashConfig.from_dict(raw))
    taps, session, start = taps_of(target, tokens(60)), begin(raw, target), 0
    for new in (0, 1, 1, 4, 1, 11, 1, 1, 1, BLOCK, 20, 1):
        session.extend(taps[:, start : start + new], start)
        start += new
        expected = oracle_hidden(raw, weights, target, taps[:, :start], tokens(1))
        assert gap(block_of(session, tokens(1), start), expected) < 1e-4
    assert gap(block_of(session, tokens(1, 1), start), expected) > 1e-2


@pytest.mark.parametrize("window", [BLOCK, BLOCK + 1, 30])
@pytest.mark.parametrize("causal", [None, False])
def test_windows_as_large_as_the_block_and_larger(window, causal, target):
    raw = raw_config(layer_types=[SLIDING] * LAYERS, sliding_window=window, is_causal=causal)
    weights = random_weights(DFlashConfig.from_dict(raw))
    taps, session, start = taps_of(target, tokens(40)), begin(raw, target), 0
    for new in (3, 1, 14, 2, 1, 15):
        session.extend(taps[:, start : start + new], start)
        start += new
        expected = oracle_hidden(raw, weights, target, taps[:, :start], tokens(1))
        assert gap(block_of(session, tokens(1), start), expected) < 1e-4


def test_context_may_start_late_and_jump_where_every_layer_slides(target):
    taps, reach = taps_of(target, tokens(60)), WINDOW - 1
    whole, session, short, late = (begin(raw_config(**SLIDES), target) for _ in range(4))
    whole.extend(taps[:, :50], 0)
    for s, rows in ((session, reach), (short, reach - 1)):
        s.extend(taps[:, 5:20], 5)
        s.extend(taps[:, 50 - rows : 50], 50 - rows)
    late.extend(taps[:, 51 - reach : 50], 51 - reach)
    expected, *blocks = (block_of(s, tokens(1), 50) for s in (whole, session, short, late))
    assert gap(blocks[0], expected) < 1e-5
    assert gap(blocks[1], expected) > 1e-3
    assert gap(blocks[1], blocks[2]) < 1e-5, "rows from before a gap are out of place"
    full = begin(raw_config(**MIXED), target)
    with pytest.raises(ValueError, match="expected position 50 but got 49"):
        session.extend(taps[:, :1], 49)
    with pytest.raises(ValueError, match="expected position 0 but got 5"):
        full.extend(taps[:, 5:20], 5)


def test_proposals_are_lazy_and_fit_the_protocols(target):
    drafter = drafter_of(raw_config())
    session = drafter.begin(target)
    assert isinstance(drafter, Drafter) and isinstance(session, DraftSession)
    taps = taps_of(target, tokens(40))
    mx.eval(taps, tokens(1), session.arrays())
    before = mx.get_active_memory()
    session.extend(taps, 0)
    drafts = session.propose(tokens(1), 40, 3)
    assert mx.get_active_memory() - before < 2048, "something was evaluated"
    mx.eval(drafts, session.arrays())
    assert mx.get_active_memory() - before > 50_000
    assert (drafts.shape, drafts.dtype) == ((1, 3), mx.int32)


def test_a_draft_in_bf16_or_cast_to_fp32(target, tmp_path):
    raw = raw_config(**VARIANTS["dflash2"])
    weights = random_weights(DFlashConfig.from_dict(raw))
    save(tmp_path, raw, {k: v.astype(mx.bfloat16) for k, v in weights.items()})
    stored, cast = DFlashDrafter.load(tmp_path), DFlashDrafter.load(tmp_path, dtype=mx.float32)
    assert (stored.model.dtype, cast.model.dtype) == (mx.bfloat16, mx.float32)
    blocks = []
    for drafter in (stored, cast):
        session = drafter.begin(target)
        session.extend(taps_of(target, tokens(20)), 0)
        blocks.append(block_of(session, tokens(1), 20))
        session.propose(tokens(1), 20, 3)
        assert session.finite.item()
        assert {a.dtype for a in session.arrays()} == {drafter.model.dtype}
    assert blocks[0].dtype == mx.bfloat16
    # How far bf16 lies from fp32 with these random weights: 0.1004 on an H200.
    assert 1e-4 < mx.abs(blocks[0] - blocks[1]).mean().item() < 0.2


# The context cache


@settings(max_examples=12, deadline=None)
@given(
    window=st.one_of(st.none(), st.integers(2, 400)),
    block=st.integers(1, 16),
    steps=st.lists(st.integers(0, 16), min_size=60, max_size=90),
    prompt=st.integers(0, 700),
)
@example(window=201, block=16, steps=[16] * 80, prompt=300)
def test_context_cache_holds_the_newest_positions_in_order(window, block, steps, prompt):
    cache, end, moves = ContextCache(1, 1, mx.float32, window), 0, 0
    for step in (prompt, *steps):
        new = step - cache.skip(step)
        before = cache.rows, cache.capacity
        rows = mx.arange(end + step - new, end + step + block, dtype=mx.float32)
        cache.write(rows[None, None, :, None], -rows[None, None, :, None], new)
        end += step
        rows = slice(cache.rows - cache.visible(), cache.rows + block)
        keys, values = cache.keys[:, :, rows], cache.values[:, :, rows]
        first = 0 if window is None else max(0, end - window + 1)
        assert keys.reshape(-1).tolist() == list(range(first, end + block))
        assert mx.array_equal(keys, -values)
        moves += (cache.rows - new, cache.capacity) != before
    assert moves <= 5 + end // 100
    if window is not None:
        assert cache.capacity <= max(2 * window, prompt) + 2 * max(steps) + block + 256


# Ties and misfits


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.5]), min_size=7, max_size=40), st.data())
def test_candidates_go_by_value_then_by_lowest_id(values, data):
    count = data.draw(st.integers(1, len(values)))
    expected = sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:count])
    assert top_candidates(mx.array([values]), count).tolist() == [expected]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), slots=st.integers(1, 5))
def test_selector_walks_greedily_and_takes_the_lowest_of_equals(seed, slots):
    """Small integers make every score exact and ties common."""
    config = DFlashConfig.from_dict(raw_config(**VARIANTS["dflash2"]))
    selector, keys = CandidateSelector(config, Products()), mx.random.split(mx.random.key(seed), 5)
    rank = config.selector_rank
    selector.predecessor_codebook = mx.random.randint(-1, 2, (VOCAB, rank), key=keys[0])
    selector.successor_codebook = mx.random.randint(-1, 2, (VOCAB, rank), key=keys[1])
    projection = mx.random.randint(-1, 2, (rank, HIDDEN), key=keys[2]).astype(mx.float32)
    selector.hidden_projection.weight = projection
    hidden = mx.random.randint(-1, 2, (1, slots, HIDDEN), key=keys[3]).astype(mx.float32)
    logits = mx.random.randint(0, 60, (1, slots, VOCAB), key=keys[4]).astype(mx.float32)
    steps = (hidden @ projection.T)[0].tolist()
    a, b = selector.predecessor_codebook.tolist(), selector.successor_codebook.tolist()
    pred, path = 5, []
    for slot in range(slots):
        row = logits[0, slot].tolist()
        best = sorted(range(VOCAB), key=lambda i: (-row[i], i))[: config.selector_top_k]
        scores = {
            c: row[c] + sum(x * h * y for x, h, y in zip(a[pred], steps[slot], b[c], strict=True))
            for c in best
        }
        pred = min(scores, key=lambda c: (-scores[c], c))
        path.append(pred)
    assert selector.propose(hidden, logits, mx.array([[5]])).tolist() == [path]


def test_equal_logits_give_the_lowest_id(target):
    session = begin(raw_config(), target)
    session.target = SimpleNamespace(
        embed=target.embed, dtype=target.dtype, logits=lambda h: mx.ones((1, h.shape[1], VOCAB))
    )
    assert session.propose(tokens(1), 0, 3).tolist() == [[0, 0, 0]]


def test_a_misfit_is_refused_with_both_numbers(target):
    assert drafter_of(raw_config()).begin(target)
    for name, value, message in (
        ("hidden_size", 64, "hidden_size 32 but got 64"),
        ("vocab_size", 98, "vocab_size 97 but got 98"),
        ("num_layers", 3, "layer 3 (target_layer_ids [2, 0, 3]) but got 3 layers"),
    ):
        other = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_layers": 4, name: value}
        with pytest.raises(ValueError, match=re.escape(message)):
            drafter_of(raw_config()).begin(SimpleNamespace(**other))
    with pytest.raises(TypeError, match="got a DFlash draft"):
        drafter_of(raw_config()).begin(drafter_of(raw_config()))
    with pytest.raises(ValueError, match="DFlash draft"):
        Target(drafter_of(raw_config()).model)
    session = begin(raw_config(), target)
    for call, message in (
        (lambda: session.propose(tokens(1), 0, BLOCK), "count from 1 to 5 but got 6"),
        (lambda: session.propose(tokens(1), 1, 1), "expected position 0 but got 1"),
        (lambda: session.propose(tokens(2), 0, 1), "pending (1, 1) but got (1, 2)"),
        (lambda: session.extend(mx.zeros((1, 2, 64)), 0), "taps (1, n, 96) but got (1, 2, 64)"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


# Draws


@pytest.mark.parametrize("variant", ["full", "dflash2"])
def test_drawn_proposals_come_from_their_probabilities(target, variant):
    """First slot and pairs of the first two, from 2,000 blocks with noise of other seeds."""
    session = begin(raw_config(**VARIANTS[variant]), target)
    session._drafter.proposes = "drawn"
    setting = Sampling(temperature=1.3, top_k=5, seed=0)
    first, pairs, rows = Counter(), Counter(), {}
    for seed in range(2000):
        sampler = Sampler(replace(setting, seed=seed), VOCAB)
        found = session.propose(tokens(1), 0, 2, sampler)
        a, b = found.tokens[0].tolist()
        first[a] += 1
        pairs[a, b] += 1
        rows[a] = np.array(found.probabilities)
    assert len(rows) == 5 and all(abs(r.sum(axis=1) - 1).max() < 1e-5 for r in rows.values())
    chances = {a: row[0, a] for a, row in rows.items()}
    likely = [a for a in rows if chances[a] > 0.01]
    assert chisquare_of(first, {a: chances[a] for a in likely}, 2000) > 1e-3
    joint = {
        (a, b): chances[a] * rows[a][1, b]
        for a in likely
        for b in range(VOCAB)
        if chances[a] * rows[a][1, b] > 0.005
    }
    assert chisquare_of(pairs, joint, 2000) > 1e-3
    turned = dict(zip(joint, [*list(joint.values())[1:], next(iter(joint.values()))], strict=True))
    assert chisquare_of(pairs, turned, 2000) < 1e-6  # the control


def chisquare_of(counts, chances, total):
    """p of the counts against these probabilities, all else in one class."""
    expected = [total * float(p) for p in chances.values()]
    observed = [counts[key] for key in chances]
    rest, left = total - sum(expected), total - sum(observed)
    if rest > 5:
        expected, observed = [*expected, rest], [*observed, left]
    scale = sum(observed) / sum(expected)
    return chisquare(observed, [e * scale for e in expected]).pvalue


@pytest.mark.parametrize("variant", ["full", "dflash2"])
def test_coupled_draws_take_the_targets_noise(target, variant):
    """The same weights on both sides would agree; noise of another position does not."""
    found = {}
    for proposes in ("argmax", "coupled", "drawn"):
        session = begin(raw_config(**VARIANTS[variant]), target)
        session._drafter.proposes = proposes
        sampler = Sampler(Sampling(temperature=3.0, seed=1), VOCAB)
        answer = session.propose(tokens(1), 0, BLOCK - 1, sampler)
        found[proposes] = answer.tokens if isinstance(answer, Proposal) else answer
    greedy = begin(raw_config(**VARIANTS[variant]), target).propose(tokens(1), 0, BLOCK - 1)
    assert mx.array_equal(found["argmax"], greedy)
    assert not mx.array_equal(found["coupled"], greedy)
    assert not mx.array_equal(found["coupled"], found["drawn"])
    if variant == "full":
        session = begin(raw_config(), target)
        hidden = norm(session.model.norm, session.hidden(tokens(1), 0)[:, 1:])
        logits = session.logits(hidden)[0].astype(mx.float32)
        assert mx.array_equal(sampler.draw(logits, 1), found["coupled"][0])
        assert not mx.array_equal(sampler.draw(logits, 2), found["coupled"][0])
