"""The innovation tape: what a verify records so that any accepted prefix can be replayed."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx


class Tape(NamedTuple):
    """One verify's inputs to the recurrence, as `gated_delta_replay` needs them.

    `replay(state, tape, n)` is, bit for bit, the state after the first n inputs (contract C2).
    """

    g: mx.array
    """Decay, linear (not its log). `[B, T, Hv]` or `[B, T, Hv, Dk]`, fp32."""

    k: mx.array
    """Keys. `[B, T, Hk, Dk]`, the activations' dtype."""

    delta: mx.array
    """Innovations `beta * (v - g S k)`. `[B, T, Hv, Dv]`, fp32."""

    valid: mx.array | None = None
    """`[B, T]` bool, False where an input was masked, or None if none was."""
