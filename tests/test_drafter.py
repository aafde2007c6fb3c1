"""DFlash and DFlash2 drafts against the authors' MLX model and against an oracle without a cache."""

from __future__ import annotations

import importlib
import json
import re
from types import SimpleNamespace

import mlx.core as mx
import pytest
from dflash_native.drafters import (
    DFlashConfig,
    DFlashDrafter,
    Drafter,
    DraftSession,
    is_draft,
    parameter_count,
    tensor_shapes,
)
from dflash_native.drafters.context import ContextCache
from dflash_native.drafters.dflash2 import CandidateSelector, top_candidates
from dflash_native.targets import Target
from drafter_oracle import (
    BLOCK,
    DFLASH2,
    FULL,
    HIDDEN,
    LAYERS,
    MIXED,
    SLIDES,
    SLIDING,
    VARIANTS,
    VOCAB,
    WINDOW,
    YARN,
    drafter_of,
    oracle_hidden,
    random_weights,
    raw_config,
    save,
    tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import qwen3

TAPS = (2, 0, 3)
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture(scope="module")
def target() -> Target:
    mx.random.seed(3)
    args = qwen3.ModelArgs(
        "qwen3", HIDDEN, 4, 48, 4, 1e-6, VOCAB, 2, 64, 1e4, 16, tie_word_embeddings=True
    )
    return Target(qwen3.Model(args))


@pytest.fixture(scope="module")
def authors():
    try:
        return importlib.import_module("dflash.model_mlx")
    except ImportError as error:
        pytest.fail(f"the authors' model is missing: pip install --no-deps dflash==0.1.0 ({error})")


def taps_of(target, ids, layers=TAPS):
    return target.forward(ids, target.make_cache(), commit=True, tap_layers=layers)[1]


def begin(raw, target, weights=None):
    return drafter_of(raw, weights).begin(target)


def block_of(session, anchor, start):
    """Normed hidden rows 1 … B-1."""
    return session.model.norm(session.hidden(anchor, start)[:, 1:])


def one_block(raw, target, weights=None, prompt=20):
    """The first block after a prompt that is longer than the window."""
    session = begin(raw, target, weights)
    session.extend(taps_of(target, tokens(prompt)), 0)
    return block_of(session, tokens(1, 9), prompt)


def gap(a, b):
    return mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item()


# Agreement


@EVERY_VARIANT
def test_agrees_with_the_authors_over_cached_rounds(variant, target, authors, tmp_path, monkeypatch):
    folder = save(tmp_path, raw_config(**VARIANTS[variant]))
    monkeypatch.setattr(authors, "snapshot_download", lambda path, **_: path)
    theirs = authors.load_draft(str(folder)).bind(target.model)
    assert theirs.config.target_layer_ids == TAPS
    session, twin = (DFlashDrafter.load(folder).begin(target) for _ in range(2))
    cache, start, seen = theirs.make_cache(), 0, set()
    # Never one row: the authors' sliding cache then leaves the order that its mask assumes.
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
        assert twin.propose(anchor, start, BLOCK - 1).tolist() == proposals.tolist()
        seen.update(proposals[0].tolist())
    assert len(seen) > 8
    other = block_of(session, (anchor + 1) % VOCAB, start)
    assert gap(other, hidden) > 1e-2


@EVERY_VARIANT
def test_agrees_with_the_oracle_in_rounds_of_any_size(variant, target):
    raw = raw_config(**VARIANTS[variant])
    drafter = drafter_of(raw)
    session, start = drafter.begin(target), 0
    taps = taps_of(target, tokens(60))
    for new in (0, 1, 1, 4, 1, 11, 1, 1, 1, BLOCK, 20, 1):
        session.extend(taps[:, start : start + new], start)
        start += new
        expected = oracle_hidden(raw, random_weights(drafter.config), target, taps[:, :start], tokens(1))
        assert gap(block_of(session, tokens(1), start), expected) < 1e-4


@pytest.mark.parametrize("window", [2, 4, BLOCK, BLOCK + 1, 30])
@pytest.mark.parametrize("causal", [None, False])
def test_windows_smaller_and_larger_than_the_block(window, causal, target):
    raw = raw_config(layer_types=[SLIDING] * LAYERS, sliding_window=window, is_causal=causal)
    weights = random_weights(DFlashConfig.from_dict(raw))
    taps, session, start = taps_of(target, tokens(40)), begin(raw, target), 0
    for new in (3, 1, 14, 2, 1, 15):
        session.extend(taps[:, start : start + new], start)
        start += new
        expected = oracle_hidden(raw, weights, target, taps[:, :start], tokens(1))
        assert gap(block_of(session, tokens(1), start), expected) < 1e-4


def test_context_may_start_late_and_jump_where_every_layer_slides(target):
    taps = taps_of(target, tokens(60))
    session, whole = (begin(raw_config(**SLIDES), target) for _ in range(2))
    late, full = begin(raw_config(**SLIDES), target), begin(raw_config(**MIXED), target)
    reach = WINDOW - 1
    session.extend(taps[:, 5:20], 5)
    session.extend(taps[:, 50 - reach : 50], 50 - reach)
    whole.extend(taps[:, :50], 0)
    late.extend(taps[:, 51 - reach : 50], 51 - reach)
    blocks = [block_of(s, tokens(1), 50) for s in (session, whole, late)]
    assert gap(blocks[0], blocks[1]) < 1e-5
    assert gap(blocks[2], blocks[1]) > 1e-3
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
        assert session.finite(tokens(1), 20).item()
        assert {a.dtype for a in session.arrays()} == {drafter.model.dtype}
    assert blocks[0].dtype == mx.bfloat16
    assert 1e-4 < gap(*blocks) < 0.2


# The context cache


@settings(max_examples=12, deadline=None)
@given(
    window=st.one_of(st.none(), st.integers(2, 400)),
    block=st.integers(1, 16),
    steps=st.lists(st.integers(0, 16), min_size=60, max_size=90),
    prompt=st.integers(0, 700),
)
def test_context_cache_holds_the_newest_positions_in_order(window, block, steps, prompt):
    cache, end, moves, capacities = ContextCache(1, 1, mx.float32, window), 0, 0, []
    for step in (prompt, *steps):
        new = step - cache.skip(step)
        rows = mx.arange(end + step - new, end + step + block, dtype=mx.float32)
        cache.write(rows[None, None, :, None], -rows[None, None, :, None], new)
        end += step
        keys, values = cache.read(block)
        first = 0 if window is None else max(0, end - window + 1)
        assert keys.reshape(-1).tolist() == list(range(first, end + block))
        assert mx.array_equal(keys, -values)
        moves += bool(capacities) and cache.capacity != capacities[-1]
        capacities.append(cache.capacity)
    assert moves <= 4
    if window is not None:
        assert cache.capacity <= max(2 * window, prompt) + 2 * max(steps) + block + 256


# What others got wrong


def test_taps_are_the_residuals_after_their_layers(target, authors):
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


def test_a_sliding_layer_is_not_a_full_one_past_its_window(target):
    for prompt, differs in ((WINDOW - BLOCK, False), (WINDOW, True)):
        slides = one_block(raw_config(**SLIDES, is_causal=False), target, prompt=prompt)
        full = one_block(raw_config(is_causal=False), target, prompt=prompt)
        assert (gap(slides, full) > 1e-3) == differs


def test_is_causal_holds_for_every_layer_and_has_two_names(target):
    blocks = {
        (kind, causal): one_block(raw_config(layer_types=[kind] * 3, sliding_window=64, **extra), target)
        for kind in (FULL, SLIDING)
        for causal, extra in ((None, {}), (True, {"is_causal": True}), (False, {"is_causal": False}))
    }
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
    hotter = one_block(raw_config(rope_scaling={"type": "yarn", **YARN, "attention_factor": 1.5}), target)
    assert gap(first, hotter) > 1e-3
    short = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    given_above = raw_config(
        rope_scaling={"type": "yarn", **short}, max_position_embeddings=4096
    )
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
        assert gap(block_of(used, tokens(1), 23), expected) < 1e-5
        assert gap(block_of(polluted, tokens(1), 23), expected) > 1e-3


@pytest.mark.parametrize("name", tensor_shapes(DFlashConfig.from_dict(raw_config(**VARIANTS["dflash2"]))))
def test_every_tensor_is_applied(name, target):
    raw = raw_config(**VARIANTS["dflash2"])
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
            weights[name] = weights[name] * 1e6
    finite = {}
    for dtype in (mx.bfloat16, mx.float16):
        session = begin(raw, target, {k: v.astype(mx.bfloat16) for k, v in weights.items()})
        session.model.set_dtype(dtype)
        session = type(session)(SimpleNamespace(config=config, model=session.model, max_drafts=5), target)
        session.extend(taps_of(target, tokens(20)), 0)
        assert mx.abs(session.hidden(tokens(1), 20)).max().item() > 65504
        finite[dtype] = session.finite(tokens(1), 20).item()
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
    for prompt in range(7, 15):
        for s in (session, short):
            s.extend(taps_of(target, tokens(15))[:, s.position : prompt], s.position)
        whole = session.propose(tokens(1), prompt, BLOCK - 1).tolist()[0]
        for count in range(1, BLOCK):
            assert session.propose(tokens(1), prompt, count).tolist()[0] == whole[:count]
        differs |= short.propose(tokens(1), prompt, 2).tolist()[0] != whole[:2]
    assert differs, "a block shorter than the trained one proposes something else"


# Ties


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
    selector, keys = CandidateSelector(config), mx.random.split(mx.random.key(seed), 5)
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
    assert selector.greedy(hidden, logits, mx.array([[5]])).tolist() == [path]


def test_equal_logits_give_the_lowest_id(target):
    session = begin(raw_config(), target)
    session.target = SimpleNamespace(
        embed=target.embed, dtype=target.dtype, logits=lambda h: mx.ones((1, h.shape[1], VOCAB))
    )
    assert session.propose(tokens(1), 0, 3).tolist() == [[0, 0, 0]]


# Files, configurations, misfits


def card(layers, hidden, heads, inner, vocab, taps, **over):
    raw = {**raw_config(**over), "hidden_size": hidden, "num_hidden_layers": layers}
    raw |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 128}
    raw |= {"intermediate_size": inner, "vocab_size": vocab, "num_target_layers": 64}
    raw["dflash_config"]["target_layer_ids"] = taps
    return raw


CARDS = {
    "Qwen3-8B-DFlash-b16": (
        card(5, 4096, (32, 8), 12288, 151936, [2, 10, 18, 26, 34], block_size=16, older=True,
             mask_token_id=151669),
        (58, None, 16, None),
    ),
    "Qwen3.6-27B-DFlash": (
        card(5, 5120, (32, 8), 17408, 248320, [1, 16, 31, 46, 61], block_size=16, older=True,
             mask_token_id=248070, layer_types=[SLIDING] * 4 + [FULL], sliding_window=2048),
        (58, None, 16, None),
    ),
    "Qwen3.6-35B-A3B-DFlash": (
        card(6, 2048, (32, 8), 6144, 248320, [1, 6, 11, 16, 22, 27, 32, 37], block_size=16,
             mask_token_id=248077, layer_types=[SLIDING] * 5 + [FULL], sliding_window=4096),
        (69, None, 16, None),
    ),
    "Qwen3.8-27B-DFlash2": (
        card(5, 5120, (32, 8), 17408, 248320, [5, 19, 33, 47, 61], **{
            **DFLASH2, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256,
            "selector_top_k": 16}, block_size=8, mask_token_id=248070, is_causal=False,
            layer_types=[SLIDING] * 5, sliding_window=2048, rope_theta=1e7),
        (81, 1_924_404_480, 8, 2047),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CARDS)
def test_published_cards_have_their_published_sizes(name):
    raw, (tensors, parameters, block, reach) = CARDS[name]
    before = mx.get_active_memory()
    config = DFlashConfig.from_dict(raw)
    assert len(tensor_shapes(config)) == tensors
    assert (config.block_size, config.context_rows) == (block, reach)
    assert is_draft(raw) and not is_draft({"architectures": ["Qwen3ForCausalLM"]})
    if parameters is not None:
        assert parameter_count(config) == parameters
        assert 2 * parameter_count(config) == 3_848_808_960
    assert mx.get_active_memory() == before


def test_shards_load_like_one_file(target, tmp_path):
    raw = raw_config()
    weights = random_weights(DFlashConfig.from_dict(raw))
    one, two = save(tmp_path / "one", raw, weights), save(tmp_path / "two", raw, weights)
    (two / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in shards.items():
        mx.save_safetensors(str(two / file), {n: weights[n] for n in part})
    loaded = [DFlashDrafter.load(f).model.parameters() for f in (one, two)]
    assert str(loaded[0]) == str(loaded[1])
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (two / "model.safetensors.index.json").write_text(json.dumps(index))
    DFlashDrafter.load(two)
    (two / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors"):
        DFlashDrafter.load(two)


def break_nothing(folder):
    pass


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def pointer(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def rename(folder):
    weights = mx.load(str(folder / "model.safetensors"))
    weights["surplus.weight"] = weights.pop("norm.weight")
    weights["fc.weight"] = weights["fc.weight"][:, :-1]
    save(folder, raw_config(), weights)


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        (truncate, ValueError, r"model\.safetensors is truncated: expected \d+ bytes but got \d+"),
        (pointer, ValueError, r"model\.safetensors \(43 bytes\) is truncated or no safetensors file"),
        (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, r"/model\.safetensors"),
        (lambda f: (f / "config.json").unlink(), FileNotFoundError, r"/config\.json"),
        (lambda f: (f / "config.json").write_text("{"), ValueError, r"config\.json is not valid"),
        (
            rename,
            ValueError,
            r"expected the 36 tensors .* got 36: fc.weight has shape \(32, 95\) and not "
            r"\(32, 96\); norm.weight is missing; surplus.weight is unexpected$",
        ),
    ],
)
def test_a_broken_folder_is_named(harm, error, message, tmp_path):
    DFlashDrafter.load(save(tmp_path, raw_config()))
    harm(tmp_path)
    with pytest.raises(error, match=message):
        DFlashDrafter.load(tmp_path)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "DFlash2DraftModel but got ['Qwen3ForCausalLM']"),
        ({"rope_theta": None}, "rope_theta at the top or inside rope_parameters but got None"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "linear, llama3, yarn but got"),
        ({"rope_scaling": {"rope_type": "yarn"} | YARN | {"truncate": False}}, "truncate true"),
        ({"layer_types": [SLIDING] * 3}, "sliding_window to be an integer of at least 2 but got None"),
        ({"layer_types": [FULL]}, "layer_types to have 3 entries but got 1"),
        ({"layer_types": [FULL, FULL, "linear_attention"]}, "but got 'linear_attention'"),
        ({"target_layer_ids": [1, 4]}, "target_layer_ids from 0 to 3 but got 4"),
        ({"mask_token_id": VOCAB}, f"row of the {VOCAB} embeddings but got {VOCAB}"),
        ({"hidden_size": None}, "hidden_size to be an integer of at least 1 but got None"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads but got '4 and 3'"),
        ({"attention_bias": True}, "attention_bias to be False but got True"),
        ({"is_causal": "no"}, "is_causal to be true, false or absent but got 'no'"),
        (DFLASH2 | {"conv_group_size": 5}, "conv_group_size to divide hidden_size 32 but got 5"),
        (DFLASH2 | {"selector_top_k": None}, "selector_top_k to be an integer"),
    ],
)
def test_a_configuration_that_cannot_run_is_refused(over, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DFlashConfig.from_dict(raw_config(**over))


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
