"""The shaders of verify_matmul, verify_gather_matmul and verify_attention on the emulator.

How a call is shared out among threadgroups (tiles, staged or not) and how many rows it has (C1)
change no bits; every such test has a control that must differ. The oracle for values is
`dflash_native.reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from dflash_native import reference

from . import SCHEDULES, frontend, launch
from .launch import KIND_OF, KINDS, decode, encode, from_mx, to_mx, verify_attention, verify_matmul
from .test_shaders import ULP, close, nudged, same

Format = tuple[int, int] | None  # bits and group; or dense

TYPES = [  # of the result and of the weight, or of its scales
    ("float", "float"),
    ("float", "half"),
    ("float", "bfloat"),
    ("half", "half"),
    ("bfloat", "bfloat"),
]
QUANTISED = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]
FORMATS: list[tuple[str, str, Format]] = [
    ("half", "half", None),
    ("float", "bfloat", None),
    ("half", "half", (4, 32)),
    ("float", "half", (8, 64)),
    ("bfloat", "bfloat", (4, 128)),
]
WIDTHS = (1, 2, 8, 9, 16, 17)
TILES = [(tiles, columns) for tiles in (1, 2) for columns in (1, 2, 4)]  # 16 outputs by 8 rows


def on_every_schedule(run: Callable[..., np.ndarray], **how: Any) -> np.ndarray:
    """The result, which the schedules have to agree on."""
    first, *others = (run(schedule=schedule, **how) for schedule in SCHEDULES)
    assert all(same(first, other) for other in others), "schedules disagree"
    return first


class Product(NamedTuple):
    """The operands of one product."""

    x: np.ndarray
    weight: np.ndarray
    scales: np.ndarray | None = None
    biases: np.ndarray | None = None
    bias: np.ndarray | None = None
    indices: np.ndarray | None = None
    bits: int = 4

    def run(self, **options: Any) -> np.ndarray:
        return verify_matmul(*self[:6], bits=self.bits, **options)

    def rows(self, start: int, stop: int) -> Product:
        return self._replace(x=np.ascontiguousarray(self.x[start:stop]))

    def expert(self, e: int, x: np.ndarray) -> Product:
        """The same of one expert alone, on rows x."""
        weight, *rest = (None if a is None else a[e] for a in self[1:5])
        assert weight is not None
        return Product(x, weight, *rest, None, self.bits)

    def oracle(self) -> np.ndarray:
        x, weight, *rest = (None if a is None else to_mx(a) for a in self[:6])
        scales, biases, bias, indices = rest
        group = 64 if scales is None else self.x.shape[-1] // scales.shape[-1]
        keywords = {"group_size": group, "bits": self.bits}
        if indices is None:
            return from_mx(reference.verify_matmul(x, weight, scales, biases, bias, **keywords))
        return from_mx(
            reference.verify_gather_matmul(x, weight, indices, scales, biases, bias, **keywords)
        )


def product(
    kind: str,
    stored: str,
    form: Format,
    x_shape: tuple[int, ...] = (17,),
    outputs: int = 40,
    experts: int | None = None,
) -> Product:
    """Random operands with a bias: each slice of K has units to add, a dense K has an odd rest."""
    rng = np.random.default_rng(7)
    lead = () if experts is None else (experts,)
    depth = form[1] * 9 if form else 603
    x = encode(rng.standard_normal((*x_shape, depth)), kind)
    bias = encode(rng.standard_normal((*lead, outputs)), kind)
    if form is None:
        weight = encode(rng.standard_normal((*lead, outputs, depth)), stored)
        return Product(x, weight, bias=bias)
    bits, group = form
    words = rng.integers(0, 2**32, (*lead, outputs, depth * bits // 32), np.uint32)
    scales = rng.uniform(0.5, 1.5, (*lead, outputs, depth // group)) / 2**bits
    biases = rng.uniform(-0.7, -0.3, scales.shape)
    return Product(x, words, encode(scales, stored), encode(biases, stored), bias, None, bits)


@pytest.mark.parametrize(
    ("kind", "stored", "form"),
    [(*types, None) for types in TYPES]
    + [(*TYPES[i % len(TYPES)], form) for i, form in enumerate(QUANTISED)],
    ids=str,
)
def test_products_are_the_reference(kind: str, stored: str, form: Format) -> None:
    given = product(kind, stored, form, (3,))
    got = on_every_schedule(given.run)
    expected = decode(given.oracle())
    assert close(decode(got), expected, 1e-5 + ULP[kind])
    assert not close(decode(given._replace(bias=None).run()), expected, 1e-5 + ULP[kind])


@pytest.mark.parametrize(("kind", "stored", "form"), FORMATS, ids=str)
def test_rows_of_a_product_have_the_bits_of_one(kind: str, stored: str, form: Format) -> None:
    """C1: at every width, however the block is shared out, and whatever the other rows hold."""
    given = product(kind, stored, form)
    single = np.concatenate([given.rows(i, i + 1).run() for i in range(17)])
    for width in WIDTHS:
        assert same(given.rows(0, width).run(schedule=width % 3), single[:width])
    for n, (tiles, columns) in enumerate(TILES):
        got = given.run(tiles=tiles, column_tiles=columns, schedule=n % 3)
        assert same(got, single), (tiles, columns)
    spoilt = given.x.copy()
    for row, bad in ((1, np.nan), (8, np.inf), (11, -np.inf)):
        spoilt[row, 17:] = encode(np.array([bad]), kind)
    got = given._replace(x=spoilt).run()
    for row in range(17):
        assert same(got[row], single[row]) == (row not in (1, 8, 11))
    assert not same(given._replace(x=nudged(given.x)).run(), single)


@pytest.mark.parametrize("depth", [1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("outputs", [1, 15, 16, 17])
def test_small_dense_products(outputs: int, depth: int) -> None:
    rng = np.random.default_rng(depth)
    x = encode(rng.integers(-3, 4, (9, depth)), "float")
    weight = encode(rng.integers(1, 4, (outputs, depth)), "half")
    expected = x @ weight.astype(np.float32).T
    assert np.array_equal(Product(x, weight).run(), expected)
    x[4, -1] += 1
    changed = Product(x, weight).run() != expected
    assert np.array_equal(changed, np.repeat(np.arange(9)[:, None] == 4, outputs, axis=1))


@pytest.mark.parametrize("form", [None, *QUANTISED], ids=str)
def test_representable_sums_are_exact(form: Format) -> None:
    """Small integers: no order of sums rounds."""
    given = product("float", "float", form, (5,))
    rng = np.random.default_rng(8)
    whole = lambda a, low, high: rng.integers(low, high, a.shape).astype(np.float32)  # noqa: E731
    given = given._replace(x=whole(given.x, -2, 3), bias=whole(given.bias, -9, 9))
    if form is None:
        given = given._replace(weight=whole(given.weight, -3, 4))
        dense = given.weight
    else:
        assert given.scales is not None and given.biases is not None
        bits, group = form
        given = given._replace(scales=whole(given.scales, 1, 3), biases=whole(given.biases, -20, 3))
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        q = (given.weight[..., None] >> shifts & np.uint32(2**bits - 1)).reshape(40, -1)
        scale, offset = (np.repeat(a, group, axis=1) for a in (given.scales, given.biases))
        dense = q * scale + offset
    expected = given.x.astype(np.float64) @ dense.T.astype(np.float64) + given.bias
    assert np.array_equal(given.run(), expected)
    given.x[3, 200] += 1
    assert np.array_equal(np.any(given.run() != expected, axis=1), np.arange(5) == 3)


@pytest.mark.parametrize(("kind", "stored", "form"), FORMATS[1:4:2], ids=str)
@pytest.mark.parametrize("slots", [1, 3])
def test_gathered_rows_have_the_bits_of_their_expert(
    kind: str, stored: str, form: Format, slots: int
) -> None:
    indices = np.array([[0, 3, 3], [2, 1, 0]], np.int32)
    given = product(kind, stored, form, (2, slots), experts=4)._replace(indices=indices)
    got = on_every_schedule(given.run)
    assert close(decode(got), decode(given.oracle()), 1e-5 + ULP[kind])
    for r, j in np.ndindex(2, 3):
        x = given.x[r, j % slots][None]
        assert same(given.expert(indices[r, j], x).run(column_tiles=2)[0], got[r, j])
    assert same(given.run(tiles=2), got)
    assert not same(given._replace(indices=(indices + 1) % 4).run(), got)
    for bad in (-1, 4, 2**31 - 1):
        wrong = indices.copy()
        wrong[1, 1] = bad
        poisoned = decode(given._replace(indices=wrong).run())
        hit = np.arange(6).reshape(2, 3) == 4
        assert np.isnan(poisoned[hit]).all() and same(poisoned[~hit], decode(got)[~hit])


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

    def one_by_one(self, **how: Any) -> np.ndarray:
        """Each row in a call of its own, what follows it NaN. For causal attention."""
        rows = []
        for t in range(self.q.shape[2]):
            at = [length + t for length in self.lengths]
            k, v = (dead_from(x, [n + 1 for n in at]) for x in (self.k, self.v))
            q = np.ascontiguousarray(self.q[:, :, t : t + 1])
            rows.append(Attention(q, k, v, at, self.options).run(**how))
        return np.concatenate(rows, axis=2)


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
    given = attention(kind, 5, [29, 7], dims, 40)
    got = on_every_schedule(given.run)
    expected = decode(given.oracle())
    assert close(decode(got), expected, 1e-5 + ULP[kind])
    assert same(given.one_by_one(), got)
    late = given._replace(lengths=[28, 6])
    assert not same(late.run(), got)
    assert not close(decode(late.run()), expected, 0.1)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["half", "float"])
def test_every_option_is_the_reference(kind: str, options: str) -> None:
    given = attention(kind, 5, [251, 20], **OPTIONS[options])
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


@pytest.mark.parametrize("inputs", [1, 4, 5, 8, 9, 16, 17])
def test_how_columns_are_shared_out_changes_no_bits(inputs: int) -> None:
    given = attention("half", inputs, [60, 255], window=70)
    got = given.run(staged=False)
    for simdgroups in (1, 2, 4):
        assert same(on_every_schedule(given.run, staged=True, simdgroups=simdgroups), got)
    assert same(given.run(), got)
    for b in range(2):  # and neither does the batch
        q, k, v = (x[b : b + 1] for x in given[:3])
        alone = Attention(q, k, v, given.lengths[b : b + 1], given.options)
        assert same(alone.run()[0], got[b])
    other = given._replace(options={"window": 71})
    assert not same(other.run(), got)


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
    given = attention(kind, 5, [38], window=37)
    given.v[:, :, 3] = encode(np.array([bad]), kind)  # which rows 0 and 1 see
    got = given.run()
    assert same(given.one_by_one(), got)
    assert np.array_equal(np.isnan(decode(got)).all((0, 1, 3)), np.arange(5) < 2)
    assert np.isfinite(decode(got)[:, :, 2:]).all()


@pytest.mark.parametrize("kind", ["half", "float"])
def test_lengths_out_of_range_poison_their_row(kind: str) -> None:
    given = attention(kind, 5, [7, 20], capacity=40)
    sound = given.run()
    for bad in (-1, 36, 2**31 - 5, -(2**31)):
        got = given._replace(lengths=[bad, 20]).run()
        assert np.isnan(decode(got)[0]).all() and same(got[1], sound[1])
    at_the_end = given._replace(lengths=[35, 20], k=given.k * 0 + 1, v=given.v * 0 + 1)
    assert not np.isnan(decode(at_the_end.run())[1]).all()


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


def test_nothing_to_contract() -> None:
    """The bits are the same whether or not a compiler may fuse multiply-adds across expressions."""
    dense, affine = (product("half", "half", form, (3,)) for form in (None, (4, 64)))
    given = attention("half", 5, [251, 20], **OPTIONS["mask and window"], **OPTIONS["sinks"])
    for run in (dense.run, affine.run, given.run, lambda **how: given.run(staged=False, **how)):
        off, on, fast = (run(contract=contract) for contract in ("off", "on", "fast"))
        assert same(off, on) and same(off, fast)


def test_the_metallib_has_every_kernel_that_the_host_asks_for() -> None:
    names = set()
    for shader in ("verify_matmul", "verify_attention"):
        text = frontend.preprocess(launch.SHADERS / f"{shader}.metal")
        names |= {name for name, _ in frontend.Source(text).instances}
    wanted = set()
    for types in TYPES:
        dense = "verify_matmul_dense_{}_{}".format(*types)
        affine = "verify_matmul_affine_{}_{}".format(*types)
        for tiles, columns in TILES:
            wanted.add(f"{dense}_{tiles}_{columns}")
            wanted |= {f"{affine}_{bits}_{n}_{tiles}_{columns}" for bits, n in QUANTISED}
    for kind in KINDS:
        for key_dim, value_dim in HEAD_DIMS:
            shared_out = ["1_1_false"]
            if kind != "float":
                shared_out += ["2_1_true", "2_2_true", "2_4_true"]
            wanted |= {f"attend_chunk_{kind}_{key_dim}_{value_dim}_{how}" for how in shared_out}
            wanted.add(f"combine_chunks_{kind}_{value_dim}")
    assert wanted == names
