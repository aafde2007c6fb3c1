"""C1 and C4 for the whole model: a block has the bits of single steps, drafts change no token."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from importlib.resources import files

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map_with_path

import matrix
from dflash_native import load_demo
from dflash_native.cache import AttentionCache
from dflash_native.drafters import DFlashConfig, tensor_shapes
from dflash_native.session import Session
from dflash_native.targets import Target
from drafter_oracle import drafter_of
from inputs import same
from scripted import ScriptedDrafter
from test_targets import CONFIGS, VOCAB, make_model, random_tokens

FACTORS = {
    "family": list(CONFIGS),
    "dtype": [mx.float32, mx.bfloat16, mx.float16],
    "weights": ["dense", "8bit", "4bit"],
    "context": [1, 255, 256, 257],
    "rows": [1, 3],
    "block": [2, 4, 8, 16, 32],
    "drafts": ["right", "wrong", "random"],
}
CASES = matrix.pairwise(FACTORS)
if matrix.FULL:
    CASES = matrix.every(FACTORS) + matrix.pairwise(FACTORS | {"context": [1024, 8192]})
SETTINGS = matrix.grouped(CASES, ("family", "dtype", "weights", "context", "rows"))
"""Each with its blocks and drafts: plain decoding runs once for all of them."""
ROUNDS = {"right": 2, "wrong": 3, "random": 4}


def model_of(family: str, dtype: mx.Dtype, weights: str) -> nn.Module:
    model = make_model(family)

    def cast(path: str, value: mx.array) -> mx.array:
        return value if path.endswith("A_log") else value.astype(dtype)

    model.update(tree_map_with_path(cast, model.parameters()))
    if weights != "dense":
        nn.quantize(model, 32, int(weights[0]))
    mx.eval(model.parameters())
    return model


def target_of(family: str, dtype: mx.Dtype, weights: str) -> Target:
    return Target(model_of(family, dtype, weights))


def prefilled(target: Target, context: int, rows: int) -> tuple[object, mx.array]:
    """A cache whose longest row holds `context` inputs and the others fewer; the pending tokens."""
    cache, tokens = target.make_cache(rows), random_tokens(rows, context + 1, seed=context)
    last = min(context, 8)
    for start in range(0, context - last, 2048):
        end = min(start + 2048, context - last)
        target.forward(tokens[:, start:end], cache, commit=True)
        cache.eval()
    target.forward(tokens[:, context - last : context], cache, commit=False)
    cache.commit([last, last // 3, last // 2][:rows])
    cache.flush()
    cache.eval()
    return cache, mx.take_along_axis(tokens, mx.array(cache.lengths)[:, None], axis=1)


def clone(cache):
    """The same arrays in another cache; neither is then written in place."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin


def decode_plainly(target, cache, pending, count):
    """Greedy tokens `[B, count + 1]`, the pending ones first, and the logits `[B, count, V]`."""
    tokens, logits = [pending], []
    for _ in range(count):
        hidden, _ = target.forward(tokens[-1], cache, commit=False)
        logits.append(target.logits(hidden))
        cache.commit([1] * pending.shape[0])
        tokens.append(mx.argmax(logits[-1], axis=-1))
        mx.eval(tokens[-1], logits[-1], cache.arrays())
    return mx.concatenate(tokens, axis=1), mx.concatenate(logits, axis=1)


def drafts_of(kind, answer, source):
    """Drafts for one row: what follows, or what does not."""
    share = {"right": 0.0, "wrong": 1.0, "random": 0.3}[kind]
    return [
        (token + source.randrange(1, VOCAB)) % VOCAB if source.random() < share else token
        for token in answer
    ]


def first_difference(target, cache, tokens, logits, block, kind):
    """Block verifies of drafts after `tokens [B, N]`: (row, input) whose bits differ, or None."""
    source, answer = random.Random(1), tokens.tolist()
    at = [0] * len(answer)
    for _ in range(ROUNDS[kind]):
        drafts = [
            drafts_of(kind, row[start + 1 : start + block], source)
            for row, start in zip(answer, at, strict=True)
        ]
        inputs = [[row[start], *each] for row, start, each in zip(answer, at, drafts, strict=True)]
        hidden, _ = target.forward(mx.array(inputs), cache, commit=False)
        found = target.logits(hidden)
        assert mx.all(mx.isfinite(found))
        keep = []
        for row, (start, given) in enumerate(zip(at, inputs, strict=True)):
            expected = answer[row][start : start + block]
            agreed = next((i for i in range(block) if given[i] != expected[i]), block)
            keep.append(agreed)
            for i in range(agreed):
                if not same(found[row, i], logits[row, start + i]):
                    return row, start + i
        cache.commit(keep)
        at = [start + kept for start, kept in zip(at, keep, strict=True)]
    return None


def steps_of(case):
    return case["block"] * (ROUNDS[case["drafts"]] if case["drafts"] != "wrong" else 1) + 4


def settings():
    """The parameters of the matrix; on request, those that share kernels go to one process."""
    for setting, cases in SETTINGS:
        group = f"{setting['dtype']}-{setting['weights']}-{setting['rows']}"
        yield pytest.param(
            setting, cases, id=matrix.title(setting), marks=pytest.mark.xdist_group(group)
        )


@pytest.mark.parametrize(("setting", "cases"), [*settings()])
def test_a_block_has_the_bits_of_single_steps(setting, cases):
    target = target_of(setting["family"], setting["dtype"], setting["weights"])
    cache, pending = prefilled(target, setting["context"], setting["rows"])
    steps = max(steps_of(case) for case in cases)
    tokens, logits = decode_plainly(target, clone(cache), pending, steps)
    assert logits.dtype == setting["dtype"]
    for case in cases:
        block, drafts = case["block"], case["drafts"]
        found = first_difference(target, clone(cache), tokens, logits, block, drafts)
        assert found is None, (block, drafts)


def test_the_cover_holds_every_pair():
    cover = matrix.pairwise(FACTORS)
    assert len(cover) < 60
    for a in FACTORS:
        for b in FACTORS:
            if a != b:
                met = {(case[a], case[b]) for case in cover}
                assert met == {(x, y) for x in FACTORS[a] for y in FACTORS[b]}


@pytest.mark.parametrize("weights", ["dense", "4bit"])
def test_one_flipped_bit_of_a_weight_is_seen(weights):
    """The control of the matrix: what it compares hangs on every bit."""
    target = target_of("qwen3_5", mx.float32, weights)
    cache, pending = prefilled(target, 20, 1)
    tokens, logits = decode_plainly(target, clone(cache), pending, 20)
    layer = target.model.layers[3].mlp.down_proj
    part = "weight" if weights == "dense" else "scales"
    bits = layer[part].view(mx.uint32)
    bits[5, 1] = bits[5, 1] ^ (1 << 16)
    layer[part] = bits.view(mx.float32)
    assert first_difference(target, cache, tokens, logits, 8, "right") is not None


@pytest.mark.skipif(mx.default_device() == mx.cpu, reason="a BLAS may treat each row alike")
def test_the_products_of_mlx_depend_on_the_width():
    """What exact=False leaves to MLX has other bits in a block, or there was nothing to do."""
    model = make_model("qwen3", hidden_size=512, intermediate_size=1024)
    model.set_dtype(mx.bfloat16)
    found = {}
    for exact in (True, False):
        target = Target(model, exact=exact)
        cache, pending = prefilled(target, 64, 1)
        tokens, logits = decode_plainly(target, clone(cache), pending, 36)
        found[exact] = first_difference(target, cache, tokens, logits, 16, "right")
    assert found[True] is None and found[False] is not None


def rebuilt(target, tokens, step):
    """A session that has read `tokens` anew."""
    session = Session(target, prefill_step_size=step)
    session.prefill(tokens)
    session.flush()
    return session


@pytest.mark.parametrize("name", CONFIGS)
def test_a_rebuilt_prefix_equals_the_sessions_caches_bit_for_bit(name):
    """With prefill="exact": whatever rounds and chunks fed a prefix, its caches are the same."""
    target = Target(make_model(name), prefill="exact")
    answer = rebuilt(target, random_tokens(1, 21)[0].tolist(), 2048)
    for _ in range(60):
        answer.round()
    session = Session(target, ScriptedDrafter(answer.tokens, spoil=0.2), prefill_step_size=6)
    session.prefill(answer.tokens[:21])
    for limit in (None, 5, None, 1, None):
        session.rewind(max(1, len(session.round(limit).tokens) - 1))
        session.flush()
        for step in (2048, 7, 1):
            assert same_caches(session, rebuilt(target, session.tokens, step))
    session.prefill(random_tokens(1, 9, seed=5)[0].tolist())
    session.flush()
    assert same_caches(session, rebuilt(target, session.tokens, 2048))
    other = [*session.tokens[:3], (session.tokens[3] + 1) % VOCAB, *session.tokens[4:]]
    assert not same_caches(session, rebuilt(target, other, 2048))  # the control


def same_caches(one, other):
    """Every array of two sessions of one length, but for rows that are dead."""
    rows = one.cache.lengths[0]
    pairs = []
    for a, b in zip(one.cache.layers, other.cache.layers, strict=True):
        if isinstance(a, AttentionCache):
            pairs += [
                (x[:, :, :rows], y[:, :, :rows])
                for x, y in ((a.keys, b.keys), (a.values, b.values))
            ]
        else:
            pairs += [(a.window, b.window), (a.state, b.state)]
    return other.cache.lengths == [rows] and all(same(x, y) for x, y in pairs)


@pytest.fixture(scope="module")
def demo_pair():
    model, tokenizer, drafter = load_demo(mx.bfloat16)
    prompt = tokenizer.encode("def fibonacci(n):\n    ")
    session = Session(Target(model))
    session.prefill(prompt)
    while len(session.tokens) < len(prompt) + LONG:
        session.round()
    return session.target, drafter, prompt, session.tokens


LONG = 1024


def dflash2_of(drafter):
    """The demo's draft as a DFlash2: convolutions and a selector that do nearly nothing."""
    raw = json.loads((files("dflash_native") / "demo/draft/config.json").read_text())
    raw["architectures"] = ["DFlash2DraftModel"]
    raw["dflash_config"] |= {
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 32,
        "selector_top_k": 16,
    }
    config = DFlashConfig.from_dict(raw)
    trained, weights = dict(tree_flatten(drafter.model.parameters())), {}
    for key, (name, shape) in zip(
        mx.random.split(mx.random.key(0), 99), tensor_shapes(config).items(), strict=False
    ):
        weights[name] = trained.get(name, mx.random.normal(shape, key=key) * 0.01)
        if name.endswith("base_kernel"):
            weights[name] = mx.broadcast_to(mx.array([1.0, 0.0])[None, :, None], shape)
    return drafter_of(raw, {name: w.astype(mx.bfloat16) for name, w in weights.items()})


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "scripted"])
def test_a_thousand_tokens_with_a_hundred_rejections_equal_plain_decoding(demo_pair, kind):
    """In bf16, where MLX's own products flip tokens of this pair within 128."""
    target, drafter, prompt, answer = demo_pair
    if kind == "dflash2":
        drafter = dflash2_of(drafter)
    elif kind == "scripted":
        drafter = ScriptedDrafter(answer, spoil=0.2)
    session = Session(target, drafter)
    session.prefill(prompt)
    rejections = 0
    while len(session.tokens) < len(answer):
        result = session.round(len(answer) - len(session.tokens))
        rejections += result.accepted < len(result.drafts)
    digest = hashlib.sha256(str(session.tokens[len(prompt) :]).encode()).hexdigest()
    print(f"{kind}: {session.stats.rounds} rounds, {rejections} rejections, sha256 {digest}")
    assert rejections >= 100
    assert session.tokens == answer
    assert session.stats.accepted > 0
    assert session.tokens != [*answer[:-1], answer[-1] + 1]  # the control
