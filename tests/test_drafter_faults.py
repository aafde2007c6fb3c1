"""Faults that other implementations shipped, each with the control that shows it."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

from dflash_native.drafters import (
    DFlashConfig,
    DFlashDrafter,
    DFlashSession,
    tensor_shapes,
)
from drafter_oracle import (
    BLOCK,
    FULL,
    SLIDES,
    SLIDING,
    VARIANTS,
    WINDOW,
    YARN,
    begin,
    block_of,
    gap,
    one_block,
    random_weights,
    raw_config,
    save,
    taps_of,
    tiny_target,
    tokens,
)

WITH_EVERY_TENSOR = raw_config(**VARIANTS["dflash2"])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def test_a_sliding_layer_is_not_a_full_one_past_its_window(target):
    for prompt, differs in ((WINDOW - BLOCK, False), (WINDOW, True)):
        slides = one_block(raw_config(**SLIDES, is_causal=False), target, prompt=prompt)
        full = one_block(raw_config(is_causal=False), target, prompt=prompt)
        assert (gap(slides, full) > 1e-3) == differs


def test_is_causal_holds_for_every_layer_and_has_two_names(target):
    blocks = {}
    for kind in (FULL, SLIDING):
        for causal in (None, True, False):
            raw = raw_config(layer_types=[kind] * 3, sliding_window=64, is_causal=causal)
            blocks[kind, causal] = one_block(raw, target)
    assert gap(blocks[FULL, None], blocks[FULL, False]) == 0
    assert gap(blocks[SLIDING, None], blocks[SLIDING, True]) == 0
    for kind in (FULL, SLIDING):
        assert gap(blocks[kind, True], blocks[kind, False]) > 1e-2
    raw = raw_config()
    raw["dflash_config"]["causal"] = True
    assert gap(one_block(raw, target), blocks[FULL, True]) == 0


def test_rope_is_the_drafts_own(target):
    plain = one_block(raw_config(), target)
    leaked = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    leaked |= {"mrope_section": [3, 3, 2]}
    ignored = raw_config(rope_theta=None, rope_parameters=leaked, partial_rotary_factor=0.25)
    assert gap(one_block(ignored, target), plain) == 0
    assert gap(one_block(raw_config(rope_theta=1e6), target), plain) > 1e-3
    wins = raw_config(rope_theta=1e6, rope_parameters=leaked)
    assert DFlashConfig.from_dict(wins).rope_theta == 1e6


def test_yarn_is_read_from_either_place(target):
    places = [
        raw_config(rope_scaling={"rope_type": "yarn", **YARN}),
        raw_config(rope_parameters={"rope_type": "yarn", "partial_rotary_factor": 0.25, **YARN}),
        raw_config(rope_parameters={"rope_type": "default"}, rope_scaling={"type": "yarn", **YARN}),
    ]
    first, *others = (one_block(raw, target) for raw in places)
    assert all(gap(first, other) == 0 for other in others)
    assert gap(first, one_block(raw_config(), target)) > 1e-2
    hotter = raw_config(rope_scaling={"type": "yarn", **YARN, "attention_factor": 1.5})
    assert gap(first, one_block(hotter, target)) > 1e-3
    short = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    given_above = raw_config(rope_scaling={"type": "yarn", **short}, max_position_embeddings=4096)
    assert gap(first, one_block(given_above, target)) == 0


def test_mask_rows_leave_no_trace_in_the_context(target):
    taps = taps_of(target, tokens(30))
    for variant in ("mixed", "dflash2"):
        raw = raw_config(**VARIANTS[variant])
        used, fresh, polluted = (begin(raw, target) for _ in range(3))
        used.extend(taps[:, :20], 0)
        for session in (used, used, polluted):
            if session is polluted:
                session.extend(taps[:, :20], 0)
            session.propose(tokens(1, 4), 20, 2)
        for cache in polluted._caches:
            cache.rows += 2
        used.extend(taps[:, 20:23], 20)
        polluted.extend(taps[:, 20:23], 20)
        fresh.extend(taps[:, :23], 0)
        expected = block_of(fresh, tokens(1), 23)
        assert gap(block_of(used, tokens(1), 23), expected) < 2e-5
        assert gap(block_of(polluted, tokens(1), 23), expected) > 1e-3


@pytest.mark.parametrize("name", tensor_shapes(DFlashConfig.from_dict(WITH_EVERY_TENSOR)))
def test_every_tensor_is_applied(name, target):
    raw = WITH_EVERY_TENSOR
    weights = random_weights(DFlashConfig.from_dict(raw))
    noise = mx.random.normal(weights[name].shape, key=mx.random.key(77))
    changed = {**weights, name: weights[name] + noise}
    if not name.startswith("candidate_selector"):
        assert gap(one_block(raw, target), one_block(raw, target, changed)) > 1e-4
        return
    changed = {**weights, name: 10 * noise}
    before, after = (begin(raw, target, w) for w in (weights, changed))
    for session in (before, after):
        session.extend(taps_of(target, tokens(20)), 0)
    drafts = [[s.propose(tokens(1, i), 20, 5).tolist() for i in range(4)] for s in (before, after)]
    assert drafts[0] != drafts[1]


def test_fp16_is_refused_because_its_residuals_overflow(target, tmp_path):
    raw = raw_config()
    config = DFlashConfig.from_dict(raw)
    weights = random_weights(config)
    for name in weights:
        if name.endswith("down_proj.weight"):
            weights[name] = weights[name] * 1e5
    finite = {}
    for dtype in (mx.bfloat16, mx.float16):
        session = begin(raw, target, {k: v.astype(mx.bfloat16) for k, v in weights.items()})
        session.model.set_dtype(dtype)
        unchecked = SimpleNamespace(config=config, model=session.model, max_drafts=BLOCK - 1)
        session = DFlashSession(unchecked, target)
        session.extend(taps_of(target, tokens(20)), 0)
        if dtype == mx.bfloat16:
            assert 65504 < mx.abs(session.hidden(tokens(1), 20)).max().item() < 1e7
        session.propose(tokens(1), 20, 3)
        finite[dtype] = session.finite.item()
    assert finite == {mx.bfloat16: True, mx.float16: False}
    save(tmp_path, raw, {k: v.astype(mx.float16) for k, v in random_weights(config).items()})
    for dtype in (None, mx.float32):
        with pytest.raises(ValueError, match=r"expected BF16 or F32 .* got F16 .*65504"):
            DFlashDrafter.load(tmp_path, dtype)
    save(tmp_path, raw)
    with pytest.raises(ValueError, match=r"expected bfloat16 or float32 .*float16 .*65504"):
        DFlashDrafter.load(tmp_path, mx.float16)


@pytest.mark.parametrize("variant", ["full", "dflash2"])
def test_a_shorter_request_runs_the_trained_block_and_cuts_it(variant, target):
    session = begin(raw_config(**VARIANTS[variant]), target)
    short = begin({**raw_config(**VARIANTS[variant], block_size=3)}, target)
    differs = False
    for prompt in (7, 12, 15):
        for s in (session, short):
            s.extend(taps_of(target, tokens(15))[:, s.position : prompt], s.position)
        whole = session.propose(tokens(1), prompt, BLOCK - 1).tolist()[0]
        for count in range(1, BLOCK):
            assert session.propose(tokens(1), prompt, count).tolist()[0] == whole[:count]
        differs |= short.propose(tokens(1), prompt, 2).tolist()[0] != whole[:2]
    assert differs, "a block shorter than the trained one proposes something else"
