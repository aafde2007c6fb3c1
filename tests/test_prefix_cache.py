"""PrefixCache: the longest prefix wins, memory stays within its budget, and no token changes."""

from __future__ import annotations

import random
from dataclasses import FrozenInstanceError

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chats import rounds_of
from dflash_native import load_demo
from dflash_native.drafters import CombinedDrafter, LookupDrafter
from dflash_native.server.checkpoint_files import prefix_keys
from dflash_native.server.prefix_cache import PrefixCache, fingerprint
from dflash_native.session import Session
from dflash_native.targets import Target
from drafter_oracle import drafter_of, random_weights, raw_config
from readme import block
from scripted import ScriptedDrafter
from test_session import plain, prompt_of
from test_targets import VOCAB, make_model

ROOMY = 1 << 30


@pytest.fixture(scope="module")
def target():
    mx.set_default_device(mx.cpu)
    return Target(make_model("qwen3_5"), prefill="exact")


def reader(target):
    """Adds checkpoints of texts, by plain sessions, and tells how much of one was known."""

    def read(cache, tokens, drafter=None):
        session = Session(target, drafter)
        known = cache.restore(session, tokens)
        done = known
        for stop in cache.stops(known, len(tokens)):
            session.prefill(tokens[done : stop + 1])
            done = stop + 1
            cache.add(session)
        assert session.tokens == list(tokens)
        return known, session

    return read


@pytest.fixture(scope="module")
def read(target):
    return reader(target)


def test_the_longest_known_prefix_is_taken_and_never_the_last_token(target, read):
    cache, text = PrefixCache("f", ROOMY), prompt_of(40)
    for length, known in ((10, 0), (30, 9), (20, 9), (10, 9), (30, 29), (40, 29), (31, 29)):
        assert read(cache, text[:length])[0] == known, length
    assert read(cache, [*text[:15], (text[15] + 1) % VOCAB, *text[16:]])[0] == 9
    assert read(cache, [(text[0] + 1) % VOCAB, *text[1:]])[0] == 0
    stats = cache.stats
    assert (stats.hits, stats.misses) == (7, 2)
    assert stats.reused_tokens == 9 + 9 + 9 + 29 + 29 + 29 + 9
    with pytest.raises(FrozenInstanceError):
        stats.hits = 3


def test_one_token_is_never_known_and_an_uncovered_session_adds_nothing(target, read):
    cache = PrefixCache("f", ROOMY)
    for _ in range(2):
        known, session = read(cache, [5])
        assert known == 0 and cache.stats.entries == 0
    cache.add(Session(target))
    assert cache.stats.entries == 0
    session.prefill([6])
    cache.add(session)
    assert cache.stats.entries == 1


@given(
    covered=st.integers(0, 300),
    more=st.integers(1, 300),
    stride=st.integers(1, 90),
    boundaries=st.lists(st.integers(-5, 700), max_size=12),
)
def test_stops_are_ascending_and_leave_no_long_gap(covered, more, stride, boundaries):
    length = covered + more
    stops = PrefixCache("f", 0, stride).stops(covered, length, boundaries)
    assert stops == sorted(set(stops)) and stops[-1] == length - 1
    wanted = {b for b in boundaries if covered < b < length - 1}
    wanted |= {s for s in range(0, length - 1, stride) if s > covered}
    assert set(stops) <= wanted | {length - 1}
    for stop in wanted:
        assert any(stop <= other <= stop + stride // 8 for other in stops)
    ends = [boundary for boundary in boundaries if covered < boundary < length]
    assert not ends or max(ends) in stops


def test_stops_as_they_stand_in_the_docstring():
    stops = PrefixCache("f", 0, 1000).stops
    assert stops(0, 2600) == [1000, 2000, 2599]
    assert stops(1500, 2600) == [2000, 2599]
    assert stops(2000, 2600) == [2599] and stops(2599, 2600) == [2599] and stops(0, 1) == [0]
    assert stops(0, 2600, [500, 900, 2590]) == [500, 1000, 2000, 2590, 2599]
    assert stops(0, 2600, [500, 550, 600, 2500]) == [600, 1000, 2000, 2500, 2599]
    with pytest.raises(ValueError, match=r"covered in 0 … 2599 but got 2600 of 2600"):
        stops(2600, 2600)


def test_the_least_recently_used_go_first(target, read):
    texts = [prompt_of(20, seed=seed) for seed in range(4)]
    size = read(measuring := PrefixCache("f", ROOMY), texts[0]) and measuring.stats.nbytes
    cache = PrefixCache("f", 3 * size)
    for text in texts[:3]:
        read(cache, text)
    assert cache.stats.entries == 3 and cache.stats.nbytes == 3 * size
    assert read(cache, texts[0])[0] == 19  # used again, and added again: it is the newest now
    read(cache, texts[3])
    assert cache.stats.evictions == 1 and cache.stats.entries == 3
    found = [cache.restore(Session(target), text) for text in texts]
    assert found == [19, 0, 19, 19]


def test_what_is_larger_than_the_budget_is_not_kept(target, read):
    small = PrefixCache("f", ROOMY)
    read(small, prompt_of(5))
    cache = PrefixCache("f", small.stats.nbytes)
    read(cache, prompt_of(5))
    read(cache, prompt_of(90, seed=8))
    assert cache.stats.entries == 1 and cache.stats.evictions == 1
    assert cache.restore(Session(target), prompt_of(5)) == 4
    assert PrefixCache("f", 0).stats.nbytes == 0


def test_a_checkpoint_that_is_there_is_not_taken_again(target, read, monkeypatch):
    cache = PrefixCache("f", ROOMY)
    _, session = read(cache, prompt_of(30))
    taken = []
    take = Session.checkpoint
    monkeypatch.setattr(Session, "checkpoint", lambda self: taken.append(self) or take(self))
    for _ in range(3):
        cache.add(session)
    assert not taken and cache.stats.entries == 1
    session.prefill([1])
    cache.add(session)
    assert taken == [session] and cache.stats.entries == 2  # the control


def test_memory_is_flat_over_200_adds(target):
    """Bytes that MLX holds, with a budget of about twelve checkpoints of growing length."""
    mx.clear_cache()
    session = Session(target)
    session.prefill(prompt_of(16))
    session.cache.reserve(2048)
    mx.eval(session.cache.arrays())
    budget = 4 << 20
    cache, held, base = PrefixCache("f", budget), [], mx.get_active_memory()
    for step in range(200):
        session.prefill([step % VOCAB, 7])
        cache.add(session)
        held.append(mx.get_active_memory() - base)
        assert cache.stats.nbytes <= budget
    stats = cache.stats
    assert stats.entries + stats.evictions == 200 and stats.entries >= 4
    spare = 16384 * 20 * stats.entries  # as in the tests of checkpoints
    assert max(held) < budget + spare, max(held)
    assert max(held[100:]) < 1.1 * max(held[:100])
    assert held[0] < 0.2 * max(held)  # the control: it does grow until the budget is reached


@pytest.mark.parametrize("kind", ["plain", "scripted", "lookup"])
def test_every_answer_is_that_of_a_cold_session(target, read, kind):
    """Many prompts over a tree of prefixes, in a budget that keeps a part of them."""
    source = random.Random(3)
    roots = [prompt_of(source.randint(5, 60), seed=seed) for seed in range(5)]
    cache, known = PrefixCache("f", 600_000, stride=16), 0
    for _ in range(40):
        tokens = source.choice(roots)[: source.randint(1, 60)]
        if source.random() < 0.7:
            tokens = tokens + prompt_of(source.randint(1, 20), seed=source.randrange(6))
        drafter = None
        if kind == "scripted":
            drafter = ScriptedDrafter(plain(target, tokens, 20), spoil=0.3, max_drafts=3)
        elif kind == "lookup":
            drafter = LookupDrafter()
        found, warm = read(cache, tokens, drafter)
        known += found
        cold = Session(target, drafter)
        cold.prefill(tokens)
        assert rounds_of(warm, 4) == rounds_of(cold, 4)
        cache.add(warm)
        roots[source.randrange(5)] = list(warm.tokens)
    stats = cache.stats
    assert stats.reused_tokens == known > 300 and stats.hits > 10
    assert stats.misses > 0 and stats.evictions > 10


def test_a_used_or_closed_session_is_refused(target, read):
    cache = PrefixCache("f", ROOMY)
    _, session = read(cache, prompt_of(9))
    with pytest.raises(ValueError, match="restore on a fresh session but it has 9 tokens"):
        cache.restore(session, prompt_of(9))
    session.prefill([1])
    session.close()
    with pytest.raises(ValueError, match="the session is closed"):
        cache.add(session)
    closed = Session(target)
    closed.close()
    with pytest.raises(ValueError, match="the session is closed"):
        cache.restore(closed, prompt_of(9))
    assert cache.stats.hits == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget_bytes": -1}, "budget_bytes of at least 0 but got -1"),
        ({"stride": 0}, "stride of at least 1 but got 0"),
        ({"disk_budget_bytes": -1}, "disk_budget_bytes of at least 0 but got -1"),
        ({"disk_budget_bytes": 5}, "a directory beside disk_budget_bytes"),
    ],
)
def test_numbers_that_do_not_fit(options, words):
    with pytest.raises(ValueError, match=words):
        PrefixCache("f", **{"budget_bytes": 0, **options})


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.sets(st.integers(0, 60)))
def test_keys_are_of_prefixes(tokens, lengths):
    found = prefix_keys(tokens, lengths)
    assert [length for length, _ in found] == sorted(n for n in lengths if n <= len(tokens))
    for length, key in found:
        assert prefix_keys(tokens[:length], [length]) == [(length, key)]
        if length:
            other = [*tokens[: length - 1], tokens[length - 1] ^ 1]
            assert prefix_keys(other, [length]) != [(length, key)]


# ---- fingerprints


def test_a_fingerprint_is_of_weights_and_settings_and_not_of_names():
    mx.set_default_device(mx.cpu)
    pair = {"hidden_size": 32, "vocab_size": 97}
    raw = raw_config()

    def model():
        return make_model("qwen3_5", **pair)

    one = fingerprint(Target(model()), drafter_of(raw), chunk=512)
    assert one == fingerprint(Target(model()), drafter_of(raw), chunk=512)
    assert len(one) == 64
    flipped = model()
    weight = flipped.language_model.model.layers[2].mlp.down_proj
    bits = weight.weight.view(mx.uint32)
    bits[3, 5] = bits[3, 5] ^ 1
    weight.weight = bits.view(mx.float32)
    half = model()
    half.set_dtype(mx.bfloat16)
    weights = random_weights(drafter_of(raw).config)
    name = next(iter(weights))
    different = {
        "one bit": fingerprint(Target(flipped), drafter_of(raw), chunk=512),
        "dtype": fingerprint(Target(half), drafter_of(raw), chunk=512),
        "setting": fingerprint(Target(model()), drafter_of(raw), chunk=256),
        "no setting": fingerprint(Target(model()), drafter_of(raw)),
        "not exact": fingerprint(Target(model(), exact=False), drafter_of(raw), chunk=512),
        "prefill": fingerprint(Target(model(), prefill="exact"), drafter_of(raw), chunk=512),
        "plain": fingerprint(Target(model()), None, chunk=512),
        "lookup": fingerprint(Target(model()), LookupDrafter(), chunk=512),
        "combined": fingerprint(
            Target(model()), CombinedDrafter(LookupDrafter(), drafter_of(raw)), chunk=512
        ),
        "another draft": fingerprint(
            Target(model()), drafter_of(raw, weights | {name: weights[name] + 1}), chunk=512
        ),
        "a draft's theta": fingerprint(
            Target(model()), drafter_of(raw_config(rope_theta=2e4)), chunk=512
        ),
        "a target's theta": fingerprint(
            Target(make_model("qwen3_5", **pair, rope_theta=2e4)), drafter_of(raw), chunk=512
        ),
    }
    assert len({one, *different.values()}) == 1 + len(different), different


def test_the_demo_pair_and_a_second_turn():
    """What a server does: the answer is added, too, and the next turn begins after it."""
    mx.set_default_device(mx.cpu)
    model, tokenizer, drafter = load_demo()
    target = Target(model)
    read, cache = reader(target), PrefixCache(fingerprint(target, drafter), ROOMY)
    tokens = tokenizer.encode("def fibonacci(n):\n    ")
    _, session = read(cache, tokens, drafter)
    for _ in range(10):
        session.round()
    cache.add(session)
    turn = session.tokens + tokenizer.encode("\n\ndef factorial(n):\n")
    known, warm = read(cache, turn, drafter)
    cold = Session(target, drafter)
    cold.prefill(turn)
    assert known == len(session.tokens) - 1
    assert rounds_of(warm, 8) == rounds_of(cold, 8)


def test_the_readmes_example(capsys):
    """As it is printed: the second turn reads nothing of the first one again."""
    mx.set_default_device(mx.cpu)
    names: dict = {}
    exec(block("Keep a prefix"), names)
    chat, stats = names["chat"], names["cache"].stats
    *text, last = capsys.readouterr().out.splitlines()
    assert text == names["tokenizer"].decode(chat).splitlines()
    assert last == f"{stats.hits} hit, {stats.reused_tokens} tokens reused"
    assert (stats.hits, stats.misses) == (1, 1) and stats.reused_tokens >= 64
    assert stats.entries == 4
    cold = Session(names["target"], names["drafter"])
    cold.prefill(chat[: stats.reused_tokens + 1])
    cold.prefill(names["tokenizer"].encode("\n\nclass Queue:\n"))
    while len(cold.tokens) < len(chat):
        cold.round()
    assert cold.tokens == chat


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_checkpoint_that_does_not_fit_is_a_miss_and_goes(tmp_path, where):
    """Bug: one that the session refused made the request fail, and each like it ever after: the
    ValueError of `restore` left the cache as it was. Now it is dropped, and the next one is taken.
    """
    model, _, drafter = load_demo()
    target = Target(model)
    directory = tmp_path if where == "disk" else None
    cache, text = PrefixCache("f", ROOMY, directory=directory), prompt_of(40)
    reader(target)(cache, text[:20], drafter)
    reader(target)(cache, text[:30])  # plain: without the draft's context
    if where == "disk":
        cache = PrefixCache("f", ROOMY, directory=directory)
    for known in (19, 19):
        session = Session(target, drafter)
        assert cache.restore(session, text) == known
        assert cache.stats.entries == 1
    assert cache.stats.refused == cache.stats.disk_entries == (where == "disk")
    with pytest.raises(ValueError, match="fresh session"):
        cache.restore(session, text)
    assert cache.stats.entries == 1
