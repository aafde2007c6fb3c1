"""Checkpoints as safetensors files that a killed process cannot damage."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from ..checkpoint import Checkpoint

_FORMAT = "dflash-native checkpoint 1"
_PREFIX, _SUFFIX, _UNFINISHED = "checkpoint-", ".safetensors", ".unfinished"
_log = logging.getLogger("dflash_native.server")


class CheckpointFiles:
    """The checkpoints of a folder, a file each, the least recently used going first.

    `checkpoint-{fingerprint}-{key}.safetensors`, both cut to 16 and 64 hexadecimal digits, holds
    the checkpoint's arrays, `tokens` int32, and as metadata format, fingerprint, length and a
    sha256 of all of it. A file is written under another name, synced, and renamed. Files of other
    fingerprints are left to their models and only count in the budget; other names are not touched.
    Several processes may share a folder: each misses what another one has removed.

    Raises OSError for a folder that cannot be made or listed.
    """

    def __init__(self, directory: Path, fingerprint: str, budget_bytes: int | None = None) -> None:
        self._directory, self._fingerprint, self._budget = (
            Path(directory),
            fingerprint,
            budget_bytes,
        )
        self._own = f"{_PREFIX}{hashlib.sha256(fingerprint.encode()).hexdigest()[:16]}-"
        self._sizes: OrderedDict[Path, int] = OrderedDict()
        """Of every checkpoint in the folder, the least recently used first."""
        self._lengths: dict[str, int] = {}
        """Of those with our fingerprint, by key."""
        self._spilled = self._unwritten = self._recovered = self._refused = 0
        self._directory.mkdir(parents=True, exist_ok=True)
        self._scan()

    def lengths(self) -> set[int]:
        """Of the prefixes that are there."""
        return set(self._lengths.values())

    def counts(self) -> dict[str, int]:
        """As in `PrefixStats`."""
        return {
            "spilled": self._spilled,
            "unwritten": self._unwritten,
            "disk_entries": len(self._sizes),
            "disk_nbytes": sum(self._sizes.values()),
            "recovered": self._recovered,
            "refused": self._refused,
        }

    def write(self, key: str, checkpoint: Checkpoint) -> None:
        """Write a checkpoint unless it is there, and remove old ones to be within the budget.

        A disk that refuses it is logged and counted; whatever is raised, no part of a file stays.
        """
        path = self._path(key)
        if path in self._sizes:
            self.touch(key)
            return
        arrays = {**checkpoint.arrays, "tokens": mx.array(checkpoint.tokens, dtype=mx.int32)}
        if self._budget is not None and _nbytes(arrays) > self._budget:
            return
        metadata = {
            "format": _FORMAT,
            "fingerprint": self._fingerprint,
            "length": str(len(checkpoint.tokens)),
            "checksum": _checksum(self._fingerprint, arrays),
        }
        unfinished: Path | None = None
        try:
            descriptor, name = tempfile.mkstemp(_UNFINISHED, _PREFIX, self._directory)
            unfinished = Path(name)
            with os.fdopen(descriptor, "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, or the process is killed
                mx.save_safetensors(file, arrays, metadata)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            os.replace(unfinished, path)
            _sync(self._directory)
        except (OSError, RuntimeError) as error:
            self._unwritten += 1
            _log.warning("a checkpoint was not written to %s: %s", self._directory, error)
            _remove(unfinished)
            return
        except BaseException:
            _remove(unfinished)
            raise
        self._sizes[path], self._lengths[key] = size, len(checkpoint.tokens)
        self._spilled += 1
        self._trim()

    def read(self, key: str) -> Checkpoint | None:
        """The checkpoint of a key, or None. A damaged file is removed and counted."""
        if key not in self._lengths:
            return None
        path = self._path(key)
        try:
            self._check(path)
            loaded = mx.load(str(path), return_metadata=True)
            arrays, metadata = cast("tuple[dict[str, mx.array], dict[str, str]]", loaded)
            mx.eval(arrays)
            if metadata["checksum"] != _checksum(self._fingerprint, arrays):
                raise ValueError("its checksum is another")
            tokens = cast("list[int]", arrays.pop("tokens").tolist())
            if prefix_keys(tokens, [len(tokens)]) != [(self._lengths[key], key)]:
                raise ValueError("its tokens are others")
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            self._refuse(path, error)
            return None
        self.touch(key)
        return Checkpoint(tuple(tokens), arrays)

    def touch(self, key: str) -> None:
        """Mark a file as used just now, if it is there."""
        path = self._path(key)
        if path in self._sizes:
            self._sizes.move_to_end(path)
            try:
                os.utime(path)
            except OSError:  # another process has removed it
                self._forget(path)

    def refuse(self, key: str, error: Exception) -> None:
        """Remove and count a file that is of no use, if it is there."""
        path = self._path(key)
        if path in self._sizes:
            self._refuse(path, error)

    def _scan(self) -> None:
        """Take up what earlier processes have left; contents are checked when they are read."""
        found = []
        for path in self._directory.glob(f"{_PREFIX}*"):
            try:
                if path.suffix == _UNFINISHED and _is_left(path):
                    self._refused += 1
                    _remove(path)
                elif path.suffix == _SUFFIX:
                    status = path.stat()
                    found.append((status.st_mtime_ns, path, status.st_size))
            except FileNotFoundError:  # another process has renamed or removed it
                continue
        for _, path, size in sorted(found):
            self._sizes[path] = size
            if not path.name.startswith(self._own):
                self._refused += 1
                continue
            try:
                length = self._check(path)
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                self._refuse(path, error)
                continue
            self._lengths[path.name.removeprefix(self._own).removesuffix(_SUFFIX)] = length
            self._recovered += 1
        self._trim()

    def _check(self, path: Path) -> int:
        """A file's header against its size, and whose it is. The length of its prefix."""
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
        for name, expected in (("format", _FORMAT), ("fingerprint", self._fingerprint)):
            if metadata.get(name) != expected:
                raise ValueError(f"expected {name} {expected} but got {metadata.get(name)}")
        length = int(metadata["length"])
        if length < 1:
            raise ValueError(f"expected a length of at least 1 but got {length}")
        return length

    def _refuse(self, path: Path, error: Exception) -> None:
        self._refused += 1
        _log.warning("the checkpoint %s is removed: %s", path, error)
        _remove(path)
        self._forget(path)

    def _trim(self) -> None:
        while self._budget is not None and sum(self._sizes.values()) > self._budget:
            path = next(iter(self._sizes))
            _remove(path)
            self._forget(path)

    def _forget(self, path: Path) -> None:
        self._sizes.pop(path, None)
        self._lengths.pop(path.name.removeprefix(self._own).removesuffix(_SUFFIX), None)

    def _path(self, key: str) -> Path:
        return self._directory / f"{self._own}{key}{_SUFFIX}"


def prefix_keys(tokens: Sequence[int], lengths: Iterable[int]) -> list[tuple[int, str]]:
    """Those of `lengths` that the text has, ascending, each with the sha256 of so many tokens."""
    data = np.asarray(tokens, np.int32).tobytes()
    digest, done, keys = hashlib.sha256(), 0, []
    for length in sorted(lengths):
        if length > len(tokens):
            break
        digest.update(data[4 * done : 4 * length])  # int32
        done = length
        keys.append((length, digest.hexdigest()))
    return keys


def _checksum(fingerprint: str, arrays: Mapping[str, mx.array]) -> str:
    """sha256 of names, dtypes, shapes and bytes, for one fingerprint."""
    ordered = sorted(arrays.items())
    names = [(name, str(array.dtype), array.shape) for name, array in ordered]
    digest = hashlib.sha256(json.dumps([_FORMAT, fingerprint, names]).encode())
    for _, array in ordered:
        if array.size:
            digest.update(memoryview(array.reshape(-1).view(mx.uint8)))  # type: ignore[arg-type]
    return digest.hexdigest()


def _nbytes(arrays: Mapping[str, mx.array]) -> int:
    return sum(array.nbytes for array in arrays.values())


def _is_left(path: Path) -> bool:
    """Whether no process writes this file any more. Raises FileNotFoundError."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _sync(directory: Path) -> None:
    """Make a rename last."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path | None) -> None:
    """If it is there and may be removed."""
    if path is not None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s could not be removed: %s", path, error)
