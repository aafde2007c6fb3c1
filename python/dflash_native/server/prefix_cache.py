"""Checkpoints by the prefix of tokens that they cover, so that no prefix is read twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import Checkpoint, Unfit
from ..session import Session
from .checkpoint_files import CheckpointFiles, prefix_keys
from .fingerprints import fingerprint

__all__ = ["PrefixCache", "PrefixStats", "fingerprint"]

_NEAR = 8
"""A stop is left out where a later one follows within this part of the stride."""


@dataclass(frozen=True)
class PrefixStats:
    """What a cache has done so far, and what it holds now."""

    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    """Tokens that hits have covered."""
    entries: int = 0
    """Checkpoints in memory."""
    nbytes: int = 0
    """Of their arrays."""
    evictions: int = 0
    """Checkpoints that memory had no room for any more. Those on disk stay there."""
    spilled: int = 0
    """Files written."""
    unwritten: int = 0
    """Files that could not be written, as on a full disk."""
    disk_entries: int = 0
    disk_nbytes: int = 0
    """Of the folder's checkpoints, those of other models included."""
    recovered: int = 0
    """Files of an earlier run that were there at the start."""
    refused: int = 0
    """Files that were torn, damaged, unfit or another model's. All but the last are removed."""


class PrefixCache:
    """Checkpoints of sessions on one target with one drafter, the least recently used going first.

    Args:
        fingerprint: of all that the arrays depend on (see `fingerprint`).
        budget_bytes: most bytes of arrays in memory. A checkpoint that is larger is not kept there.
        stride: so many tokens apart `stops` asks for checkpoints of a long text.
        directory: where each checkpoint is also written when it is added, so that a killed process
            loses at most the one that it was writing; None keeps all in memory.
        disk_budget_bytes: most bytes of files in it; None for no limit.

    A hit restores KV rows, conv windows, recurrent states and the draft's context, all of one
    position. On a CPU, and elsewhere on a `Target(prefill="exact")`, a session that goes on from it
    has the bits of one that has read everything. Not for two threads: it belongs to the thread of
    the model. Raises ValueError for numbers that do not fit, OSError for a folder that cannot be
    made or read.
    """

    def __init__(
        self,
        fingerprint: str,
        budget_bytes: int,
        stride: int = 1024,
        directory: Path | None = None,
        disk_budget_bytes: int | None = None,
    ) -> None:
        for name, value, least in (
            ("budget_bytes", budget_bytes, 0),
            ("stride", stride, 1),
            ("disk_budget_bytes", disk_budget_bytes, 0),
        ):
            if value is not None and value < least:
                raise ValueError(
                    f"[PrefixCache] expected {name} of at least {least} but got {value}."
                )
        if disk_budget_bytes is not None and directory is None:
            raise ValueError("[PrefixCache] expected a directory beside disk_budget_bytes.")
        self._budget, self._stride = budget_bytes, stride
        self._held: OrderedDict[str, Checkpoint] = OrderedDict()
        """By key, the least recently used first."""
        self._hits = self._misses = self._reused = self._evictions = 0
        self._files: CheckpointFiles | None = None
        if directory is not None:
            self._files = CheckpointFiles(directory, fingerprint, disk_budget_bytes)

    def restore(self, session: Session, tokens: Sequence[int]) -> int:
        """Bring a fresh session to the longest prefix of `tokens[:-1]` that is known.

        Returns how many tokens it then covers, 0 where none is known: `session.prefill` wants the
        others, one at least. A checkpoint that does not fit the session is dropped. Raises
        ValueError for a session that is closed or not fresh.
        """
        lengths = {len(checkpoint.tokens) for checkpoint in self._held.values()}
        if self._files is not None:
            lengths |= self._files.lengths()
        for length, key in reversed(prefix_keys(tokens[:-1], lengths)):
            checkpoint = self._find(key)
            if checkpoint is None:
                continue
            try:
                session.restore(checkpoint)
            except Unfit as error:
                self._drop(key, error)
                continue
            self._hits += 1
            self._reused += length
            return length
        self._misses += 1
        return 0

    def stops(self, covered: int, length: int, boundaries: Iterable[int] = ()) -> list[int]:
        """Where a prefill of a text of `length` tokens, `covered` of them restored, should pause.

        Each is a number of covered tokens at which to `add`, in ascending order: after
        `session.prefill(tokens[covered : stop + 1])`, since a session's last token is not covered.
        They are multiples of the stride, `boundaries` (lengths of the text up to the end of each
        message), and last `length - 1`, the end of the prefill. Of stops that are near to each
        other, an eighth of the stride, only the last one is taken; of boundaries the last one in
        any case, since the next turn shares the text up to there. Raises ValueError unless
        `0 <= covered < length`.
        """
        if not 0 <= covered < length:
            raise ValueError(
                f"[stops] expected covered in 0 … {length - 1} but got {covered} of {length}."
            )
        end = length - 1
        within = [boundary for boundary in boundaries if covered < boundary < end]
        last = max(within, default=None)
        first = covered - covered % self._stride + self._stride
        found = [end]
        for stop in sorted({*within, *range(first, end, self._stride)}, reverse=True):
            if found[-1] - stop > self._stride // _NEAR or stop == last:
                found.append(stop)
        return found[::-1]

    def add(self, session: Session) -> None:
        """Keep a checkpoint of where the session stands; nothing where it covers nothing yet.

        Its last round is then final. Raises ValueError for a closed or broken session.
        """
        pending = session.pending is not None
        covered = session.tokens[:-1] if pending else session.tokens
        if not covered:
            return
        [(_, key)] = prefix_keys(covered, [len(covered)])
        if key in self._held:
            self._touch(key)
            return
        checkpoint = session.checkpoint()
        self._keep(key, checkpoint)
        if self._files is not None:
            self._files.write(key, checkpoint)

    @property
    def stats(self) -> PrefixStats:
        """Counts since the start, and sizes now."""
        stats = {
            "hits": self._hits,
            "misses": self._misses,
            "reused_tokens": self._reused,
            "entries": len(self._held),
            "nbytes": self._nbytes(),
            "evictions": self._evictions,
        }
        if self._files is not None:
            stats |= self._files.counts()
        return PrefixStats(**stats)

    def _nbytes(self) -> int:
        return sum(checkpoint.nbytes for checkpoint in self._held.values())

    def _find(self, key: str) -> Checkpoint | None:
        """From memory, or from disk and then in both."""
        if key in self._held:
            self._touch(key)
            return self._held[key]
        checkpoint = None if self._files is None else self._files.read(key)
        if checkpoint is not None:
            self._keep(key, checkpoint)
        return checkpoint

    def _drop(self, key: str, error: Unfit) -> None:
        """Of a checkpoint that does not fit the session: it would fail every time."""
        self._held.pop(key, None)
        if self._files is not None:
            self._files.refuse(key, error)

    def _touch(self, key: str) -> None:
        self._held.move_to_end(key)
        if self._files is not None:
            self._files.touch(key)

    def _keep(self, key: str, checkpoint: Checkpoint) -> None:
        if checkpoint.nbytes > self._budget:
            self._evictions += 1
            return
        self._held[key] = checkpoint
        while self._nbytes() > self._budget:
            self._held.popitem(last=False)
            self._evictions += 1
