"""What one request keeps of the tokens it has seen: KV rows, conv windows, recurrent states, tapes.

A cache covers the committed inputs of B rows. A verify adds T inputs on trial: their KV rows stand
past `lengths`, and each recurrent layer holds their tape beside the checkpoint from before them.
`commit(keep)` decides; the next verify, or `flush()`, makes the decision real.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from . import ops
from .tape import Tape


class AttentionCache:
    """Keys and values of one attention layer, preallocated.

    Rows at and past the committed length of their batch row are dead: written over, never seen.
    """

    step = 256
    """Rows by which the buffers grow."""

    def __init__(
        self, batch_size: int, heads: int, key_dim: int, value_dim: int, dtype: mx.Dtype
    ) -> None:
        self.keys = mx.zeros((batch_size, heads, 0, key_dim), dtype)
        """`[B, Hkv, capacity, Dk]`."""
        self.values = mx.zeros((batch_size, heads, 0, value_dim), dtype)
        """`[B, Hkv, capacity, Dv]`."""
        self.reader: mx.array | None = None
        """A result of the last attention over them, before which no row may be written over."""

    @property
    def capacity(self) -> int:
        """Rows that fit before the buffers grow."""
        return self.keys.shape[2]

    def reserve(self, rows: int) -> None:
        """Grow, if need be, to the next multiple of `step` that holds `rows` rows."""
        if rows > self.capacity:
            capacity = -(-rows // self.step) * self.step
            self.keys = _grown(self.keys, capacity)
            self.values = _grown(self.values, capacity)

    def hand_out(self) -> None:
        """Let others keep the buffers as they are: the next write copies them where it finds them
        held.
        """
        self.reader = None

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionCache:
        """A copy whose buffers are shared until either writes."""
        self.hand_out()
        return copy.copy(self)

    def write(self, keys: mx.array, values: mx.array, lengths: Sequence[int]) -> None:
        """Put T new rows of every batch row at `lengths[b]`, in place.

        `keys [B, Hkv, T, Dk]`, `values [B, Hkv, T, Dv]`, `lengths [B]` on the host.
        """
        if keys.dtype != self.keys.dtype:  # a model of mixed dtypes, at its first call
            self.keys = self.keys.astype(keys.dtype)
            self.values = self.values.astype(values.dtype)
        self.reserve(max(lengths) + keys.shape[2])
        self.keys = ops.kv_write(self.keys, keys, lengths, after=self.reader)
        self.values = ops.kv_write(self.values, values, lengths, after=self.reader)

    def export(self, rows: int) -> dict[str, mx.array]:
        """The first `rows` rows, which stay as they are."""
        self.hand_out()
        return {"keys": self.keys[:, :, :rows], "values": self.values[:, :, :rows]}

    def load(self, arrays: Mapping[str, mx.array]) -> None:
        """Take what `export` gave."""
        self.keys, self.values = arrays["keys"], arrays["values"]
        self.reserve(self.capacity + 1)

    def arrays(self) -> list[mx.array]:
        """Everything that an evaluation must reach."""
        return [self.keys, self.values]


class RecurrentCache:
    """Conv window and recurrent state of one GatedDeltaNet layer, and its last verify.

    `window` and `state` are the checkpoint: from before the inputs of `tape`, if there is one.
    """

    def __init__(
        self,
        batch_size: int,
        window_shape: tuple[int, int],
        state_shape: tuple[int, int, int],
        dtype: mx.Dtype,
    ) -> None:
        self.window = mx.zeros((batch_size, *window_shape), dtype)
        """The newest K - 1 conv inputs. `[B, K-1, C]`."""
        self.state = mx.zeros((batch_size, *state_shape), mx.float32)
        """`[B, Hv, Dv, Dk]`, fp32."""
        self.tape: Tape | None = None
        """Of the last verify, until a later call or `flush` has replayed it."""
        self.inputs: mx.array | None = None
        """Conv inputs of that verify. `[B, T, C]`."""
        self.keep: mx.array | None = None
        """How many of its inputs were committed. `[B]` int32; None before the commit."""

    def logical_window(self) -> mx.array:
        """The conv window after the committed inputs. `[B, K-1, C]`."""
        if self.inputs is None:
            return self.window
        assert self.keep is not None
        return ops.conv_window(self.window, self.inputs, self.keep)

    def record(self, window: mx.array, state: mx.array, tape: Tape, inputs: mx.array) -> None:
        """Hold a new checkpoint, the last verify folded in, and the verify that stands on it."""
        self.window, self.state = window, state
        self.tape, self.inputs, self.keep = tape, inputs, None

    def advance(self, window: mx.array, state: mx.array) -> None:
        """Take a window and a state that cover every committed input."""
        self.window, self.state = window, state
        self.tape = self.inputs = self.keep = None

    def flush(self) -> None:
        """Replay the committed part of the tape, if there is one, and drop it."""
        if self.tape is not None:
            assert self.keep is not None
            state = ops.gated_delta_replay(self.state, self.tape, self.keep)
            self.advance(self.logical_window(), state)

    def export(self, rows: int) -> dict[str, mx.array]:
        """Window and state, which were flushed."""
        return {"window": self.window, "state": self.state}

    def load(self, arrays: Mapping[str, mx.array]) -> None:
        """Take what `export` gave."""
        self.advance(arrays["window"], arrays["state"])

    def arrays(self) -> list[mx.array]:
        """Everything that an evaluation must reach."""
        held = [self.window, self.state, self.inputs, self.keep, *(self.tape or ())]
        return [array for array in held if array is not None]


class Cache:
    """All layers' caches of B rows, and the protocol between verify, commit and flush.

    Not for two threads at once, and one verify at a time: verify, commit, verify, commit, ...
    """

    def __init__(self, layers: Sequence[AttentionCache | RecurrentCache], batch_size: int) -> None:
        self.layers = list(layers)
        """One for each layer of the target, in order."""
        self.lengths = [0] * batch_size
        """Committed inputs of each row."""
        self.uncommitted: int | None = None
        """T of the verify that waits for its commit, or None."""
        self._last_commit: tuple[int, list[int]] | None = None
        """T and keep of a commit that can still be amended."""

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.lengths)

    def commit(self, keep: Sequence[int]) -> None:
        """Make the first `keep[b]` inputs of the last verify part of row b's committed prefix.

        `keep` holds B ints on the host, each 0 to T. The recurrent layers fold them in at the next
        verify, or at `flush`. Raises ValueError if no verify waits, or if `keep` does not fit it;
        TypeError if `keep` does not hold ints. After an error the verify still waits.
        """
        if self.uncommitted is None:
            raise ValueError("[Cache] commit expected a verify before it but none is uncommitted")
        self._take("commit", keep, self.uncommitted, [0] * self.batch_size)

    def amend(self, keep: Sequence[int]) -> None:
        """Change the last commit to `keep`, as long as nothing was called after it.

        Raises ValueError if something was, or if `keep` does not fit the verify.
        """
        if self._last_commit is None:
            raise ValueError("[Cache] amend expected a commit just before it but there is none")
        inputs, before = self._last_commit
        self._take("amend", keep, inputs, before)

    def _take(self, name: str, keep: Sequence[int], inputs: int, before: list[int]) -> None:
        """Commit `keep` of a verify of `inputs` of which `before` were committed until now."""
        counts = [operator.index(count) for count in keep]
        if len(counts) != self.batch_size:
            raise ValueError(
                f"[Cache] {name} expected one count for each of {self.batch_size} rows "
                f"but got {counts}"
            )
        if not all(0 <= count <= inputs for count in counts):
            raise ValueError(
                f"[Cache] {name} expected counts from 0 to the {inputs} inputs of the last verify "
                f"but got {counts}"
            )
        device_counts = mx.array(counts, dtype=mx.int32)
        for layer in self.layers:
            if isinstance(layer, RecurrentCache):
                layer.keep = device_counts
        changes = zip(self.lengths, counts, before, strict=True)
        lengths = [length + count - less for length, count, less in changes]
        # No call between these: a Ctrl-C finds all of them done or none.
        self.lengths, self.uncommitted, self._last_commit = lengths, None, (inputs, counts)

    def snapshot(self) -> Callable[[], None]:
        """A function that takes everything back to now, whatever was run since, however often.

        It holds the recurrent layers' arrays. KV rows written since are dead after it; so of a
        verify that waits now, no more inputs can be committed then than were at the first time.
        """
        lengths, uncommitted = list(self.lengths), self.uncommitted
        held = [
            (layer, dict(vars(layer))) for layer in self.layers if isinstance(layer, RecurrentCache)
        ]

        def restore() -> None:
            for layer, fields in held:
                vars(layer).update(fields)
            self.lengths, self.uncommitted, self._last_commit = lengths, uncommitted, None

        return restore

    def flush(self) -> None:
        """Replay what was committed: `window` and `state` become the logical ones, tapes go.

        Raises ValueError while a verify waits for its commit.
        """
        self.check_committed()
        for layer in self.layers:
            if isinstance(layer, RecurrentCache):
                layer.flush()

    def export(self) -> dict[str, mx.array]:
        """The logical state of one row, flushed: lazy arrays by layer and name.

        `{i}.keys`, `{i}.values` `[1, Hkv, length, D]`; `{i}.window` `[1, K-1, C]` and `{i}.state`
        `[1, Hv, Dv, Dk]` of recurrent layers. They may share memory with this cache, whose next
        call then copies it.
        """
        assert self.batch_size == 1
        self.flush()
        return {
            f"{index}.{name}": array
            for index, layer in enumerate(self.layers)
            for name, array in layer.export(self.lengths[0]).items()
        }

    def load(self, arrays: Mapping[str, mx.array], length: int) -> None:
        """Into an empty cache: what another one of the same model exported after `length` inputs.

        `Target.load_cache` checks that they fit.
        """
        for index, layer in enumerate(self.layers):
            prefix = f"{index}."
            layer.load(
                {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
            )
        self.lengths = [length]

    def check_committed(self) -> None:
        """Raise ValueError while a verify waits for its commit; a commit is final from here on."""
        if self.uncommitted is not None:
            raise ValueError("[Cache] the last verify was not committed")
        self._last_commit = None

    def reserve(self, rows: int) -> None:
        """Make room for `rows` KV rows at once, where the final length is known."""
        for layer in self.layers:
            if isinstance(layer, AttentionCache):
                layer.reserve(rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held, tapes and spare KV rows included."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        """Everything that an evaluation must reach. The next call writes into them."""
        return [array for layer in self.layers for array in layer.arrays()]

    def eval(self) -> None:
        """Evaluate every array, so that no graph of earlier calls stays alive."""
        mx.eval(self.arrays())


def _grown(buffer: mx.array, capacity: int) -> mx.array:
    batch_size, heads, rows, dim = buffer.shape
    grown = mx.zeros((batch_size, heads, capacity, dim), buffer.dtype)
    if rows:
        grown[:, :, :rows] = buffer
    return grown
