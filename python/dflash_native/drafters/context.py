"""The draft's context: keys and values of committed positions, one cache a layer."""

from __future__ import annotations

import mlx.core as mx

from ..ops import kv_write

_STEP = 256


class ContextCache:
    """Keys and values `[1, Hkv, capacity, D]` of one layer, in the order of their positions.

    Rows `0 … rows - 1` are context and stay. Rows past them are dead: a block writes its own there,
    and the next write goes over them. A sliding layer keeps at least its newest `window - 1` rows;
    when its buffer is full, they move to the front. Positions are the session's: the last context
    row is the last committed one.
    """

    def __init__(self, heads: int, head_dim: int, dtype: mx.Dtype, window: int | None) -> None:
        self.rows = 0
        """Of context."""
        self._keep = None if window is None else window - 1
        self.keys = self.values = mx.zeros((1, heads, 0, head_dim), dtype=dtype)

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def visible(self) -> int:
        """How many of the context rows a block may see."""
        return self.rows if self._keep is None else min(self.rows, self._keep)

    def skip(self, new: int) -> int:
        """How many of the first of `new` rows no block can see. With them go all rows before."""
        skipped = 0 if self._keep is None else max(0, new - self._keep)
        if skipped:
            self.rows = 0
        return skipped

    def write(self, keys: mx.array, values: mx.array, committed: int) -> None:
        """Write `keys, values [1, Hkv, T, D]` after the context, which `committed` of them join."""
        self._reserve(keys.shape[2])
        lengths = mx.array([self.rows], dtype=mx.int32)
        self.keys = kv_write(self.keys, keys, lengths)
        self.values = kv_write(self.values, values, lengths)
        self.rows += committed

    def export(self) -> tuple[mx.array, mx.array]:
        """Keys and values of the rows that a block may see."""
        rows = slice(self.rows - self.visible(), self.rows)
        return self.keys[:, :, rows], self.values[:, :, rows]

    def fits(self, shape: tuple[int, ...], positions: int) -> bool:
        """Whether arrays of this shape are what such a layer exports after so many positions."""
        _, heads, _, head_dim = self.keys.shape
        if len(shape) != 4 or (shape[0], shape[1], shape[3]) != (1, heads, head_dim):
            return False
        if self._keep is None:
            return shape[2] == positions
        return shape[2] <= min(positions, self._keep)

    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values] if self.capacity else []

    def _reserve(self, new: int) -> None:
        if self.rows + new <= self.capacity:
            return
        kept = self.visible()
        if kept < self.rows:
            # Twice the window: the next move is a window's worth of rows away, not one round.
            capacity = max(self.capacity, _round_up(2 * kept + new))
        else:
            capacity = _round_up(max(kept + new, 2 * self.capacity))
            if self._keep is not None:
                capacity = min(capacity, _round_up(2 * self._keep + new))
        self.keys = self._move(self.keys, kept, capacity)
        self.values = self._move(self.values, kept, capacity)
        self.rows = kept

    def _move(self, buffer: mx.array, kept: int, capacity: int) -> mx.array:
        _, heads, _, head_dim = buffer.shape
        free = mx.zeros((1, heads, capacity - kept, head_dim), dtype=buffer.dtype)
        return mx.concatenate([buffer[:, :, self.rows - kept : self.rows], free], axis=2)


def _round_up(rows: int) -> int:
    return -(-rows // _STEP) * _STEP
