"""The shaders of verify_attention on the emulator.

How a call's columns are shared out among SIMD groups and how many rows it has (C1) change no bits;
every such test has a control that must differ. The oracle for values is `dflash_native.reference`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from dflash_native import reference

from .compare import ULP, close, instances, nudged, on_every_schedule, same
from .launch import (
    KIND_OF,
    KINDS,
    attend_chunks,
    decode,
    encode,
    from_mx,
    to_mx,
    verify_attention,
)
from .runner import FENCED

HEAD_DIMS = [(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
MASK = np.random.default_rng(9).uniform(size=(5, 5)) < 0.5
MASK |= np.eye(5, dtype=bool)  # each sees itself at least
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "unrestricted": {"causal": False},
    "mask": {"mask": MASK},
    "mask and window": {"mask": MASK, "window": 4},
    "window 1": {"window": 1},
    "window 9": {"window": 9},
    "window 300": {"window": 300},
    "sinks": {"sinks": np.array([0.5, -np.inf, 3.0, -2.0], np.float32)},
}


class Attention(NamedTuple):
    """The operands of one attention."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    lengths: list[int]
    options: dict[str, Any]

    def run(self, **how: Any) -> np.ndarray:
        scale = self.q.shape[3] ** -0.5
        return verify_attention(*self[:4], scale, **self.options, **how)

    def oracle(self) -> np.ndarray:
        arrays = {n: to_mx(x) for n, x in self.options.items() if isinstance(x, np.ndarray)}
        operands = (*(to_mx(x) for x in self[:3]), mx.array(self.lengths))
        scale = self.q.shape[3] ** -0.5
        return from_mx(reference.verify_attention(*operands, scale, **(self.options | arrays)))

    def chunks(self, **how: Any) -> np.ndarray:
        """The statistics and sums of each chunk, in one array."""
        scale = self.q.shape[3] ** -0.5
        sums, statistics = attend_chunks(*self[:4], scale, **self.options, **how)
        return np.concatenate([statistics, sums], axis=-1)

    def row(self, t: int) -> Attention:
        """Row t of the block in a call of its own, what follows it NaN. For causal attention."""
        at = [length + t for length in self.lengths]
        k, v = (dead_from(x, [n + 1 for n in at]) for x in (self.k, self.v))
        return Attention(np.ascontiguousarray(self.q[:, :, t : t + 1]), k, v, at, self.options)

    def one_by_one(self) -> np.ndarray:
        return np.concatenate([self.row(t).run() for t in range(self.q.shape[2])], axis=2)


def attention(
    kind: str,
    inputs: int,
    lengths: list[int],
    dims: tuple[int, int] = (32, 32),
    capacity: int = 300,
    **options: Any,
) -> Attention:
    """Four heads on two key heads; the rows past the blocks are NaN."""
    rng = np.random.default_rng(10)
    batch = len(lengths)
    q = rng.standard_normal((batch, 4, inputs, dims[0])) * 2
    k = rng.standard_normal((batch, 2, capacity, dims[0]))
    v = rng.standard_normal((batch, 2, capacity, dims[1]))
    q, k, v = (encode(x, kind) for x in (q, k, v))
    ends = [length + inputs for length in lengths]
    return Attention(q, dead_from(k, ends), dead_from(v, ends), lengths, options)


def dead_from(x: np.ndarray, starts: list[int], value: float = np.nan) -> np.ndarray:
    """The cache with its rows from starts[b] on dead."""
    x = x.copy()
    for b, start in enumerate(starts):
        x[b, :, start:] = encode(np.array([value]), KIND_OF[x.dtype])
    return x


@pytest.mark.parametrize(
    ("kind", "dims"),
    [(kind, dims) for kind in ("float", "half") for dims in HEAD_DIMS] + [("bfloat", (192, 128))],
    ids=str,
)
def test_attention_is_the_reference(kind: str, dims: tuple[int, int]) -> None:
    """fp32 without staging, half and bfloat with it; rows alone, never staged, give their bits."""
    given = attention(kind, 5, [7, 29], dims, 40)
    got = on_every_schedule(given.run)
    expected = decode(given.oracle())
    assert close(decode(got), expected, 1e-5 + ULP[kind])
    assert same(given.one_by_one(), got)
    late = given._replace(lengths=[6, 28])
    assert not same(late.run(), got)
    assert not close(decode(late.run()), expected, 0.1)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["half", "float"])
def test_every_option_is_the_reference(kind: str, options: str) -> None:
    given = attention(kind, 5, [255, 20], **OPTIONS[options])
    got = given.run()
    expected = decode(given.oracle())
    assert close(decode(got), expected, 1e-5 + ULP[kind])
    assert same(given.run(staged=False), got)
    if not {"mask", "causal"} & {*given.options}:
        assert same(given.one_by_one(), got)
    plain = given._replace(options={})
    assert same(plain.run(), got) == (options in ("causal", "window 300"))


@pytest.mark.parametrize("first", range(1, 68, 17))
def test_every_window(first: int) -> None:
    """Windows that begin at, before and after the edges of groups of 32 keys and of chunks."""
    for window in range(first, first + 17):
        given = attention("float", 3, [64, 286], window=window)
        got = given.run()
        assert close(decode(got), decode(given.oracle()), 1e-5)
        assert same(given.one_by_one(), got)
        other = given._replace(options={"window": window + 1}).run()
        assert not close(other[1], got[1], 1e-4)


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 254, 255, 256, 257])
@pytest.mark.parametrize("kind", ["bfloat", "float"])
def test_rows_at_every_edge(kind: str, length: int) -> None:
    """C1: a key belongs to the chunk of its position, whatever the block."""
    given = attention(kind, 9, [length])
    got = given.run()
    assert same(given.one_by_one(), got)
    assert close(decode(got), decode(given.oracle()), 1e-5 + ULP[kind])
    assert not same(given._replace(k=nudged(given.k)).run(), got)
    short = [np.ascontiguousarray(x[:, :, : length + 9]) for x in given[1:3]]
    assert same(Attention(given.q, *short, [length], {}).run(), got)


@pytest.mark.parametrize("options", ["unrestricted", "mask"])
def test_a_block_that_ends_with_a_chunk(options: str) -> None:
    """The chunk after it has been written by nobody."""
    given = attention("float", 5, [251, 20], **OPTIONS[options])
    got = given.run()
    assert close(decode(got), decode(given.oracle()), 1e-5)
    later = given._replace(lengths=[250, 20]).run()
    assert not same(later[0], got[0]) and same(later[1], got[1])


@pytest.mark.parametrize("inputs", [1, 4, 5, 8, 9, 16, 17])
def test_how_columns_are_shared_out_changes_no_bits(inputs: int) -> None:
    """Of fp32 sums, which show what the rounding to half would hide."""
    given = attention("half", inputs, [60, 255], window=70)
    got = given.chunks(staged=False)
    for simdgroups in (1, 2, 4):
        assert same(on_every_schedule(given.chunks, staged=True, simdgroups=simdgroups), got)
    assert same(given.chunks(), got)
    for b in range(2):  # and neither does the batch
        q, k, v = (x[b : b + 1] for x in given[:3])
        alone = Attention(q, k, v, given.lengths[b : b + 1], given.options)
        assert same(alone.chunks()[0], got[b])
    for t in range(inputs):  # nor the block
        alone = given.row(t).chunks()[:, :, 0]
        written = ~np.isnan(alone)
        assert written.any() and same(alone[written], got[:, :, t][written])
    assert not same(given._replace(options={"window": 71}).chunks(), got)


@pytest.mark.parametrize("kind", ["half", "float"])
@pytest.mark.parametrize("window", [None, 2, 700, 4000])
def test_many_chunks(window: int | None, kind: str) -> None:
    """More chunks than stripes, and windows that begin in any of them."""
    given = attention(kind, 2, [4330], capacity=4400, window=window)
    got = given.run()
    assert close(decode(got), decode(given.oracle()), 1e-5 + ULP[kind])
    assert same(given.one_by_one(), got)
    assert not same(given._replace(v=nudged(given.v)).run(), got)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("options", ["causal", "mask", "window 1"])
def test_other_rows_do_not_reach_a_row(options: str, bad: float) -> None:
    for kind, length in (("half", 30), ("half", 254), ("float", 30)):
        given = attention(kind, 5, [length], **OPTIONS[options])
        q, k, v = (x.copy() for x in given[:3])
        value = encode(np.array([bad]), kind)
        q[:, :, 3] = k[:, :, length + 3] = v[:, :, length + 3] = value
        spoilt = given._replace(q=q, k=k, v=v)
        hears = {3, 4} if options == "causal" else {3}
        if options == "mask":
            hears |= {*np.flatnonzero(MASK[:, 3])}
        assert len(hears) < 5
        for how in ({}, {"staged": False}):
            got, clean = spoilt.run(**how), given.run(**how)
            for t in range(5):
                assert same(got[:, :, t], clean[:, :, t]) == (t not in hears)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("kind", ["half", "float"])
def test_infinity_in_the_history_has_one_result(kind: str, bad: float) -> None:
    """C1: in a block where some row does not see the value it left NaN, alone infinity."""
    given = attention(kind, 5, [38], window=39)
    given.v[:, :, 1] = encode(np.array([bad]), kind)  # which rows 0 and 1 see
    got = given.run()
    assert same(given.one_by_one(), got)
    assert np.array_equal(np.isnan(decode(got)).all((0, 1, 3)), np.arange(5) < 2)
    assert np.isfinite(decode(got)[:, :, 2:]).all()


@pytest.mark.parametrize("kind", ["half", "float"])
def test_lengths_out_of_range_poison_their_row(kind: str) -> None:
    given = attention(kind, 5, [20, 7], capacity=40)
    sound = given.run()
    for bad in (-1, 36, 2**31 - 5, -(2**31)):
        got = given._replace(lengths=[20, bad]).run(schedule=FENCED)
        assert np.isnan(decode(got)[1]).all() and same(got[0], sound[0])
    last = attention(kind, 5, [35, 20], capacity=40)
    assert np.isfinite(decode(last.run())).all()


@pytest.mark.parametrize("kind", ["half", "float"])
def test_a_row_that_sees_nothing_is_zero(kind: str) -> None:
    mask = np.zeros((5, 5), bool)
    mask[1, 0] = True
    for sinks in (None, np.array([1, -5, 0, -np.inf], np.float32)):
        given = attention(kind, 5, [0], mask=mask, sinks=sinks)
        given.k[:, :, 1:] = given.v[:, :, 1:] = encode(np.array([np.nan]), kind)
        got = given.run()
        assert not got[:, :, [0, 2, 3, 4]].view(np.uint8).any()
        assert got[:, :, 1].any(axis=-1).all()


def test_equal_scores_give_the_exact_mean() -> None:
    given = attention("half", 3, [62])
    v = encode(np.random.default_rng(11).integers(-8, 9, given.v.shape), "half")
    got = given._replace(q=given.q * 0, v=v).run()
    mean = np.repeat(v[:, :, :64].mean(2, dtype=np.float64), 2, axis=1)
    assert np.array_equal(got[:, :, 1], mean)  # of row 1, which sees 64 keys
    assert not np.array_equal(got[:, :, 2], mean)


@pytest.mark.parametrize("staged", [False, True], ids=["alone", "staged"])
def test_nothing_to_contract(staged: bool) -> None:
    """The bits are the same whether or not a compiler may fuse multiply-adds across expressions."""
    given = attention("half", 5, [251, 20], **OPTIONS["mask and window"])
    parts = [given.chunks(staged=staged, contract=contract) for contract in ("off", "on", "fast")]
    assert same(parts[0], parts[1]) and same(parts[0], parts[2])
    given = attention("float", 5, [251, 20], **OPTIONS["sinks"])
    off, on, fast = (given.run(contract=contract) for contract in ("off", "on", "fast"))
    assert same(off, on) and same(off, fast)


def test_the_metallib_has_every_kernel_that_the_host_asks_for() -> None:
    wanted = set()
    for kind in KINDS:
        for key_dim, value_dim in HEAD_DIMS:
            shared_out = ["1_1_false"]
            if kind != "float":
                shared_out += ["2_1_true", "2_2_true", "2_4_true"]
            wanted |= {f"attend_chunk_{kind}_{key_dim}_{value_dim}_{how}" for how in shared_out}
            wanted.add(f"combine_chunks_{kind}_{value_dim}")
    assert wanted == instances("verify_attention")
