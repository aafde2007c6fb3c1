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
        self._keep = None if window is None else window - 1
        self._keys = self._values = mx.zeros((1, heads, 0, head_dim), dtype=dtype)

    @property
    def capacity(self) -> int:
        return self._keys.shape[2]

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
        self._keys = kv_write(self._keys, keys, lengths)
        self._values = kv_write(self._values, values, lengths)
        self.rows += committed

    def read(self, block: int) -> tuple[mx.array, mx.array]:
        """Keys and values `[1, Hkv, visible + block, D]`: visible context, then the block."""
        rows = slice(self.rows - self.visible(), self.rows + block)
        return self._keys[:, :, rows], self._values[:, :, rows]

    def arrays(self) -> list[mx.array]:
        return [self._keys, self._values] if self.capacity else []

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
        self._keys = self._move(self._keys, kept, capacity)
        self._values = self._move(self._values, kept, capacity)
        self.rows = kept

    def _move(self, buffer: mx.array, kept: int, capacity: int) -> mx.array:
        _, heads, _, head_dim = buffer.shape
        free = mx.zeros((1, heads, capacity - kept, head_dim), dtype=buffer.dtype)
        return mx.concatenate([buffer[:, :, self.rows - kept : self.rows], free], axis=2)


def sliding_mask(visible: int, block: int, window: int, causal: bool) -> mx.array:
    """Bool `[block, visible + block]`, True = visible, for a block right after its context.

    A context key is seen when `query_pos - key_pos < window`; block keys are causal or
    unrestricted.
    """
    query = visible + mx.arange(block)[:, None]
    key = mx.arange(visible + block)[None]
    context = (key < visible) & (query - key < window)
    own = key >= visible
    return context | (own & (key <= query) if causal else own)


def _round_up(rows: int) -> int:
    return -(-rows // _STEP) * _STEP
