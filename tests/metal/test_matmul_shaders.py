"""The shader of verify_matmul and verify_gather_matmul on the emulator.

How a call is shared out among threadgroups and how many rows it has (C1) change no bits; every such
test has a control that must differ. The oracle for values is `dflash_native.reference`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from dflash_native import reference

from .compare import ULP, close, instances, nudged, on_every_schedule, same
from .launch import decode, encode, from_mx, to_mx, verify_matmul
from .runner import FENCED

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
    ("float", "half", (4, 32)),
    ("bfloat", "bfloat", (8, 64)),
    ("float", "float", (4, 128)),
]
WIDTHS = (1, 2, 8, 9, 16, 17)
TILES = [(tiles, columns) for tiles in (1, 2) for columns in (1, 2, 4)]  # 16 outputs by 8 rows


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
        poisoned = decode(given._replace(indices=wrong).run(schedule=FENCED))
        hit = np.arange(6).reshape(2, 3) == 4
        assert np.isnan(poisoned[hit]).all() and same(poisoned[~hit], decode(got)[~hit])


@pytest.mark.parametrize("form", [None, (4, 64)], ids=str)
def test_nothing_to_contract(form: Format) -> None:
    """The bits are the same whether or not a compiler may fuse multiply-adds across expressions."""
    given = product("float", "half", form, (3,))
    off, on, fast = (given.run(contract=contract) for contract in ("off", "on", "fast"))
    assert same(off, on) and same(off, fast)


def test_the_metallib_has_every_kernel_that_the_host_asks_for() -> None:
    wanted = set()
    for types in TYPES:
        dense = "verify_matmul_dense_{}_{}".format(*types)
        affine = "verify_matmul_affine_{}_{}".format(*types)
        for tiles, columns in TILES:
            wanted.add(f"{dense}_{tiles}_{columns}")
            wanted |= {f"{affine}_{bits}_{n}_{tiles}_{columns}" for bits, n in QUANTISED}
    assert wanted == instances("verify_matmul")
