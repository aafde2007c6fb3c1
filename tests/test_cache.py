"""Caches: buffers; verify, commit and flush on bare operations and on tiny models."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from dflash_native import ops
from dflash_native.cache import AttentionCache, Cache, RecurrentCache
from dflash_native.targets import Target
from test_targets import HYBRIDS, VOCAB, both, error, every_family, make_model, random_tokens, run

BATCH, HEADS, DIM = 2, 3, 8
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 2, 4, 32, 16, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def test_rows_of_different_lengths_are_written_where_they_belong() -> None:
    """A plain list of rows as the model, past two growths and with rejected rows written over."""
    mx.random.seed(0)
    cache = AttentionCache(BATCH, HEADS, DIM, 2 * DIM, mx.float32)
    assert cache.capacity == 0
    expected: list[list[tuple[np.ndarray, np.ndarray]]] = [[], []]
    capacities = set()
    source = random.Random(0)
    while min(map(len, expected)) < 520:
        count = source.choice([1, 1, 3, 40])
        keys, values = normal(BATCH, HEADS, count, DIM), normal(BATCH, HEADS, count, 2 * DIM)
        lengths = [len(rows) for rows in expected]
        cache.write(keys, values, lengths)
        capacities.add(cache.capacity)
        for row, rows in enumerate(expected):
            kept = source.randint(0, count)
            rows += [(np.array(keys[row, :, t]), np.array(values[row, :, t])) for t in range(kept)]
    assert capacities == {256, 512, 768} or capacities == {256, 512, 768, 1024}
    for row, rows in enumerate(expected):
        for buffer, part in ((cache.keys, 0), (cache.values, 1)):
            found = np.array(buffer[row, :, : len(rows)])
            assert np.array_equal(found, np.stack([pair[part] for pair in rows], axis=1))
            assert not np.array_equal(found, np.array(buffer[1 - row, :, : len(rows)]))


def test_a_step_writes_in_place() -> None:
    """No growth and no second buffer while the rows fit."""
    cache = AttentionCache(1, HEADS, 128, 128, mx.float32)
    cache.reserve(4000)
    assert cache.capacity == 4096
    row = normal(1, HEADS, 1, 128)
    cache.write(row, row, [0])
    mx.eval(cache.arrays())
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    for position in range(1, 6):
        cache.write(row, row, [position])
        mx.eval(cache.arrays())
    assert mx.get_peak_memory() - active < cache.keys.nbytes / 4
    # Control: a step by concatenation needs a second buffer.
    joined = mx.concatenate([cache.keys, row], axis=2)
    mx.eval(joined)
    assert mx.get_peak_memory() - active > cache.keys.nbytes / 4


def test_a_first_call_in_another_dtype_sets_the_dtype() -> None:
    cache = AttentionCache(1, HEADS, DIM, DIM, mx.bfloat16)
    rows = normal(1, HEADS, 2, DIM)
    cache.write(rows, rows, [0])
    assert cache.keys.dtype == cache.values.dtype == mx.float32
    assert mx.array_equal(cache.keys[:, :, :2], rows)


class Layer:
    """One recurrent layer's operations over random inputs, as a target runs them."""

    def __init__(self, batch_size: int = BATCH) -> None:
        self.weight = normal(CHANNELS, TAPS)
        self.batch_size = batch_size

    def cache(self) -> Cache:
        window, state = (TAPS - 1, CHANNELS), (VALUE_HEADS, VALUE_DIM, KEY_DIM)
        recurrent = RecurrentCache(self.batch_size, window, state, mx.float32)
        attention = AttentionCache(self.batch_size, HEADS, DIM, DIM, mx.float32)
        return Cache([recurrent, attention], self.batch_size)

    def inputs(self, count: int) -> tuple[mx.array, mx.array, mx.array]:
        decay = mx.random.uniform(0.5, 1, (self.batch_size, count, VALUE_HEADS))
        beta = mx.random.uniform(0, 1, (self.batch_size, count, VALUE_HEADS))
        return normal(self.batch_size, count, CHANNELS), decay, beta

    def projected(self, x: mx.array, window: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        keys = KEY_HEADS * KEY_DIM
        convolved = ops.causal_conv1d_verify(x, self.weight, window)
        q, k, v = mx.split(convolved, [keys, 2 * keys], axis=-1)
        q, k = (mx.unflatten(0.1 * each, -1, (KEY_HEADS, -1)) for each in (q, k))
        return q, k, mx.unflatten(v, -1, (VALUE_HEADS, -1))

    def verify(self, cache: Cache, inputs: tuple[mx.array, mx.array, mx.array]) -> mx.array:
        own = cache.layers[0]
        assert isinstance(own, RecurrentCache)
        window = own.logical_window()
        y, tape, state = ops.gated_delta_verify(
            *self.projected(inputs[0], window), *inputs[1:], own.state, own.tape, own.keep
        )
        own.record(window, state, tape, inputs[0])
        cache.uncommitted = inputs[0].shape[1]
        return y

    def step(self, cache: Cache, inputs: tuple[mx.array, mx.array, mx.array]) -> None:
        own = cache.layers[0]
        assert isinstance(own, RecurrentCache)
        x = inputs[0]
        _, state = ops.gated_delta_step(*self.projected(x, own.window), *inputs[1:], own.state)
        everything = mx.array([x.shape[1]] * self.batch_size, dtype=mx.int32)
        own.advance(ops.conv_window(own.window, x, everything), state)


def first(inputs: tuple[mx.array, ...], row: int, count: int) -> tuple[mx.array, ...]:
    return tuple(each[row : row + 1, :count] for each in inputs)


@pytest.mark.parametrize("width", range(1, 7))
def test_commit_and_flush_equal_the_committed_steps(width: int) -> None:
    """Bit for bit: the checkpoint after flush is that of the kept inputs run alone."""
    mx.random.seed(width)
    layer, single = Layer(), Layer(1)
    single.weight = layer.weight
    before, block = layer.inputs(5), layer.inputs(width)
    for keep in {(0, width), (width, 0), (width // 2, width), (1, 1)}:
        cache = layer.cache()
        layer.step(cache, before)
        layer.verify(cache, block)
        cache.commit(keep)
        cache.flush()
        for row, count in enumerate(keep):
            found = cache.layers[0]
            for kept in {count, max(0, count - 1)}:
                alone = single.cache()
                single.step(alone, first(before, row, 5))
                for t in range(kept):
                    single.step(alone, tuple(x[row : row + 1, t : t + 1] for x in block))
                same = [
                    mx.array_equal(found.state[row], alone.layers[0].state[0]).item(),
                    mx.array_equal(found.window[row], alone.layers[0].window[0]).item(),
                ]
                assert same == [kept == count] * 2


def test_a_commit_folded_into_the_next_verify_equals_a_flush_before_it() -> None:
    mx.random.seed(0)
    layer = Layer()
    blocks = [layer.inputs(4), layer.inputs(3)]
    found = []
    for keep, flush in (([3, 1], False), ([3, 1], True), ([3, 2], False)):
        cache = layer.cache()
        layer.verify(cache, blocks[0])
        cache.commit(keep)
        if flush:
            cache.flush()
        y = layer.verify(cache, blocks[1])
        found.append([y, *cache.layers[0].arrays()])
    folded, flushed, other = found
    assert all(mx.array_equal(*pair) for pair in zip(folded, flushed, strict=True))
    assert not mx.array_equal(folded[0], other[0])


@pytest.mark.parametrize(
    ("keep", "exception", "message"),
    [
        ([1], ValueError, r"one count for each of 2 rows but got \[1\]"),
        ([1, 2, 3], ValueError, r"one count for each of 2 rows but got \[1, 2, 3\]"),
        ([0, 4], ValueError, r"from 0 to the 3 inputs of the last verify but got \[0, 4\]"),
        ([-1, 0], ValueError, r"from 0 to the 3 inputs of the last verify but got \[-1, 0\]"),
        ([1.0, 2], TypeError, "float"),
    ],
)
def test_a_commit_that_does_not_fit_is_refused_and_may_be_repaired(
    keep: list[int], exception: type[Exception], message: str
) -> None:
    mx.random.seed(0)
    layer = Layer()
    cache = layer.cache()
    layer.verify(cache, layer.inputs(3))
    with pytest.raises(exception, match=message):
        cache.commit(keep)
    assert cache.lengths == [0, 0] and cache.uncommitted == 3
    cache.commit([np.int64(3), 0])
    assert cache.lengths == [3, 0] and cache.uncommitted is None


def test_the_order_of_verify_and_commit_is_kept() -> None:
    mx.random.seed(0)
    layer = Layer()
    cache = layer.cache()
    with pytest.raises(ValueError, match=r"\[Cache\] commit expected a verify before it"):
        cache.commit([0, 0])
    cache.flush()
    layer.verify(cache, layer.inputs(3))
    with pytest.raises(ValueError, match=r"\[Cache\] the last verify was not committed"):
        cache.flush()
    cache.commit([1, 2])
    with pytest.raises(ValueError, match=r"\[Cache\] commit expected a verify before it"):
        cache.commit([1, 2])
    assert cache.lengths == [1, 2]


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="MLX's CUDA allocator rounds small arrays up")
def test_arrays_and_bytes_are_all_that_is_held() -> None:
    """After an evaluation the process holds nbytes more than before: no parent of a slice."""
    mx.random.seed(0)
    layer = Layer()
    block = layer.inputs(64)
    mx.eval(layer.weight, block)
    active = mx.get_active_memory()
    cache = layer.cache()
    layer.verify(cache, block)
    cache.commit([2, 5])
    held = cache.layers[0]
    assert isinstance(held, RecurrentCache) and held.tape is not None
    listed = {id(array) for array in cache.arrays()}
    assert {id(held.window), id(held.state), id(held.inputs), id(held.keep)} < listed
    assert {id(part) for part in held.tape[:3]} < listed
    cache.reserve(100)
    cache.eval()
    assert cache.nbytes == sum(array.nbytes for array in cache.arrays())
    taped = cache.nbytes
    cache.flush()
    cache.eval()
    assert held.tape is None and cache.nbytes + block[0].nbytes < taped
    spare = 16384  # the allocator rounds each array up
    assert abs(mx.get_active_memory() - active - cache.nbytes) < spare < block[0].nbytes / 4


@pytest.mark.parametrize("name", ["qwen3", "llama_sliding"])
def test_past_the_first_buffer(name: str) -> None:
    """Rows 250 to 262: the KV buffers grow between two steps and inside a chunk."""
    chunks = [250, 1, 1, 1, 1, 1, 1, 1, 3, 2]
    for ours, theirs in both(make_model(name), random_tokens(2, sum(chunks)), chunks):
        assert error(ours, theirs) < 1e-5


def verify_against_fresh_prefixes(
    target: Target, cache: Cache, rows: list[list[int]], inputs: list[list[int]], commit: bool
) -> float:
    """Largest error of `inputs` against mlx-lm's forward over each row's prefix and inputs."""
    found = run(target, mx.array(inputs), cache, commit=commit)
    worst = 0.0
    for row, (prefix, added) in enumerate(zip(rows, inputs, strict=True)):
        expected = target.model(mx.array([prefix + added]))[0, len(prefix) :]
        worst = max(worst, error(found[row], expected))
    return worst


WIDTHS = (1, 4, 2, 6, 3, 5)


def play(name: str, batch_size: int, widths: tuple[int, ...] = WIDTHS, lie: int = 0) -> float:
    """Verifies with a keep of their own for each row; a plain step and a prefill between them.

    `lie` is added to every keep that is told to the cache. Returns the largest error of any logit.
    """
    target = Target(make_model(name))
    cache = target.make_cache(batch_size)
    source = random.Random(batch_size)

    def draw(count: int) -> list[list[int]]:
        return [[source.randrange(VOCAB) for _ in range(count)] for _ in range(batch_size)]

    rows: list[list[int]] = [[] for _ in range(batch_size)]
    worst = 0.0

    def commit_all(count: int) -> None:
        nonlocal worst
        inputs = draw(count)
        worst = max(worst, verify_against_fresh_prefixes(target, cache, rows, inputs, True))
        for row, added in zip(rows, inputs, strict=True):
            row.extend(added)

    commit_all(5)
    for width in widths:
        inputs = draw(width)
        worst = max(worst, verify_against_fresh_prefixes(target, cache, rows, inputs, False))
        keep = [source.randint(0, width) for _ in range(batch_size)]
        cache.commit([min(width, count + lie) for count in keep])
        for row, added, count in zip(rows, inputs, keep, strict=True):
            row.extend(added[:count])
        if not lie:
            assert cache.lengths == [len(row) for row in rows]
        if width == 2:
            commit_all(1)
        if width == 3:
            cache.flush()
            commit_all(4)
    return worst


@every_family
@pytest.mark.parametrize("batch_size", [2, 3])
def test_verify_and_commit_equal_a_fresh_prefix(name: str, batch_size: int) -> None:
    assert play(name, batch_size) < 1e-5


@every_family
def test_control_a_wrong_keep_shows(name: str) -> None:
    assert play(name, 2, (4, 3), lie=1) > 1e-2


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("keep", [[0, 3], [4, 1], [5, 5]])
def test_flush_gives_the_state_of_the_committed_prefix(name: str, keep: list[int]) -> None:
    target = Target(make_model(name))
    tokens = random_tokens(2, 11)
    cache = target.make_cache(2)
    run(target, tokens[:, :6], cache)
    run(target, tokens[:, 6:], cache, commit=False)
    cache.commit(keep)
    cache.flush()
    cache.eval()
    for row, count in enumerate(keep):
        fresh = {}
        for length in (6 + count, 6 + count - 1):
            fresh[length] = target.make_cache()
            run(target, tokens[row : row + 1, :length], fresh[length])
        for layer, own in enumerate(cache.layers):
            if not isinstance(own, RecurrentCache):
                continue
            same, other = (fresh[length].layers[layer] for length in fresh)
            assert own.tape is None and own.inputs is None and own.keep is None
            assert error(own.state[row : row + 1], same.state) < 1e-5
            assert error(own.window[row : row + 1], same.window) < 1e-5
            assert error(own.state[row : row + 1], other.state) > 1e-2
            assert error(own.window[row : row + 1], other.window) > 1e-2


@pytest.mark.parametrize("uniform", [True, False])
def test_rejected_rows_do_not_count(uniform: bool) -> None:
    """KV rows past the lengths hold whatever a rejected block left there."""
    target = Target(make_model("qwen3"))
    tokens, junk = random_tokens(2, 12), random_tokens(2, 9, seed=5)
    kept = [1, 1] if uniform else [0, 4]
    found = []
    for loud in (False, True):
        cache = target.make_cache(2)
        run(target, tokens[:, :6], cache)
        run(target, tokens[:, 6:10], cache, commit=False)
        cache.commit(kept)
        if loud:
            run(target, junk, cache, commit=False)
            cache.commit([0, 0])
            for layer in cache.layers:
                rows = mx.arange(layer.capacity) >= mx.array(cache.lengths)[:, None]
                layer.keys = mx.where(rows[:, None, :, None], 1e4, layer.keys)
                layer.values = mx.where(rows[:, None, :, None], 1e4, layer.values)
        found.append(run(target, tokens[:, 10:], cache, commit=False))
    assert mx.array_equal(found[0], found[1])


@pytest.mark.parametrize("name", ["qwen3_5", "llama"])
@pytest.mark.parametrize("commit", [True, False])
def test_a_call_before_the_commit_is_refused(name: str, commit: bool) -> None:
    target = Target(make_model(name))
    cache = target.make_cache()
    run(target, random_tokens(1, 3), cache, commit=False)
    with pytest.raises(ValueError, match=r"\[Cache\] the last verify was not committed"):
        run(target, random_tokens(1, 1), cache, commit=commit)
    cache.commit([2])
    run(target, random_tokens(1, 1), cache, commit=commit)


@pytest.mark.parametrize("evaluated", [True, False])
def test_what_was_exported_stays_as_it_is(evaluated: bool) -> None:
    """Bug: rows are written in place whatever holds the buffers, so what `export` gave changed once
    a snapshot took the cache back behind it. Proof: all 8 arrays of 4 layers, evaluated or not.
    """
    mx.set_default_device(mx.cpu)
    target = Target(make_model("llama"), prefill="exact")
    cache = target.make_cache()
    run(target, random_tokens(1, 3), cache)
    take_back = cache.snapshot()
    run(target, random_tokens(1, 2, seed=2), cache)
    exported = cache.export()
    expected = {name: np.array(array) for name, array in cache.export().items()}
    if evaluated:
        mx.eval(exported)
    take_back()
    run(target, random_tokens(1, 2, seed=3), cache)
    other = cache.export()
    cache.eval()
    for name, array in exported.items():
        assert np.array_equal(np.array(array), expected[name]), name
        assert not np.array_equal(np.array(other[name]), expected[name]), name
