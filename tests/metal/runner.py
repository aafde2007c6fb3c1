"""Run the kernels of a compiled .so on numpy arrays."""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .tools import BenchError, ToolError

CONSTANT_TYPES: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "int": ctypes.c_int32,
    "uint": ctypes.c_uint32,
    "float": ctypes.c_float,
    "short": ctypes.c_int16,
    "ushort": ctypes.c_uint16,
}
GUARD = 1 << 16
LIBC = ctypes.CDLL(None)
FENCED = 1  # the schedule in which stray reads are reported
# what an index without a buffer points to, by schedule: what a kernel reads there must not matter
ABSENT = (0xFF, 0x00, 0xA5)
SCHEDULES = (0, 1, 2)  # threads in order, last first, random (then also the order of reductions)
Buffers = Mapping[int, Any] | Sequence[Any]


def to_bfloat(x: np.ndarray) -> np.ndarray:
    """Float array -> uint16 array of bfloat bits, rounded to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat(x: np.ndarray) -> np.ndarray:
    """uint16 array of bfloat bits -> float32 array."""
    return (np.asarray(x).astype(np.uint32) << 16).view(np.float32)


class _Canary:
    """An array copied between two zones of 0xff bytes, which are NaN in every float format.

    A stray read shows as NaN, a stray write is reported. `fenced`: nothing can be read or written
    there, from 16 bytes past the array's end on, and a stray read is reported too.
    """

    def __init__(self, array: np.ndarray, fenced: bool) -> None:
        self.array = array
        pages = max(1, -(-array.nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        self.memory = np.frombuffer(mmap.mmap(-1, pages + 2 * GUARD), np.uint8)
        self.zone = slice(GUARD, GUARD + pages) if fenced else slice(0, pages + 2 * GUARD)
        self.start = GUARD + (pages - array.nbytes) // 16 * 16
        self.memory[self.zone] = 0xFF
        self._own()[:] = array.reshape(-1).view(np.uint8)
        base = self.memory.ctypes.data
        self.address = base + self.start
        for edge in (0, GUARD + pages) if fenced else ():
            LIBC.mprotect(ctypes.c_void_p(base + edge), ctypes.c_size_t(GUARD), 0)

    def _own(self) -> np.ndarray:
        return self.memory[self.start : self.start + self.array.nbytes]

    def offset(self, address: int) -> int | None:
        """How many bytes from the array's start, if the address is in it or near."""
        offset = address - self.address
        return offset if -GUARD <= offset < self.array.nbytes + GUARD else None

    def finish(self, index: int) -> None:
        end = self.start + self.array.nbytes
        for first, last in ((self.zone.start, self.start), (end, self.zone.stop)):
            bad = np.flatnonzero(self.memory[first:last] != 0xFF)
            if bad.size:
                byte = first + bad[0] - self.start
                raise BenchError(f"buffer {index}: write out of bounds at byte {byte}")
        if self.array.flags.writeable:
            self.array.reshape(-1).view(np.uint8)[:] = self._own()


class Library:
    """The kernels of one .so. `kernels` maps a host name to its entry and parameters,
    `constants` the index of a function constant to its type."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._so = ctypes.CDLL(str(path))
        except OSError as error:  # a built-in that the emulator lacks
            raise ToolError(f"cannot load the compiled kernel: {error}") from None
        described = json.loads(Path(f"{path}.json").read_text())
        self.kernels: dict[str, dict[str, Any]] = {k["name"]: k for k in described["kernels"]}
        self.constants: dict[int, str] = {
            index: kind.replace("const", "").strip() for index, kind, _ in described["constants"]
        }
        self._so.msl_error.restype = ctypes.c_char_p
        self._so.msl_fault.restype = ctypes.c_uint64

    def _set_constants(self, values: Mapping[int, Any]) -> None:
        for index in values:
            if index not in self.constants:
                raise BenchError(f"no function constant {index}; there are {[*self.constants]}")
        for index, kind in self.constants.items():
            value = CONSTANT_TYPES[kind](values.get(index, 0))
            getter = getattr(self._so, f"__fc_{index}")
            getter.restype = ctypes.c_uint64
            ctypes.memmove(getter(), ctypes.byref(value), ctypes.sizeof(value))

    def run(
        self,
        name: str,
        buffers: Buffers,
        grid: Sequence[int],
        threadgroup: Sequence[int],
        *,
        groups: bool = False,
        constants: Mapping[int, Any] | None = None,
        threadgroup_memory: Mapping[int, int] | None = None,
        schedule: int = 0,
        seed: int = 0,
    ) -> None:
        """Dispatch one kernel; arrays are written in place.

        `buffers` is a list, or buffer index -> contiguous array (or a scalar, for `constant T&`).
        `grid` and `threadgroup` are up to three numbers; `grid` counts threads, or threadgroups
        with `groups`. Function constants that are not given are 0. `threadgroup_memory` is
        `[[threadgroup(n)]]` index -> bytes. `schedule` is one of SCHEDULES.

        Raises BenchError on a deadlock, on SIMD-group operations or barriers that diverge, on a
        shuffle from outside the SIMD group, on a write outside a buffer or to one that is not set,
        and in schedule 1 on a read outside a buffer.
        """
        if name not in self.kernels:
            raise BenchError(f"no kernel {name}; there are {', '.join([*self.kernels][:20])}")
        self._set_constants(constants or {})
        absent = np.full(GUARD, ABSENT[schedule], np.uint8)
        addresses = (ctypes.c_uint64 * 31)(*[absent.ctypes.data] * 31)
        guarded = {}
        for index, x in buffers.items() if isinstance(buffers, Mapping) else enumerate(buffers):
            array = np.atleast_1d(x)
            if not array.flags.c_contiguous:
                raise BenchError(f"buffer {index} is not contiguous")
            guarded[index] = _Canary(array, schedule == FENCED)
            addresses[index] = guarded[index].address
        sizes = (ctypes.c_uint32 * 31)()
        for index, size in (threadgroup_memory or {}).items():
            sizes[index] = size

        def three(v: Sequence[int]) -> Any:
            return (ctypes.c_uint32 * 3)(*([*v, 1, 1][:3]))

        entry = ctypes.cast(getattr(self._so, self.kernels[name]["entry"]), ctypes.c_void_p)
        self._so.msl_seed(ctypes.c_uint64(seed))
        if self._so.msl_run(
            entry, addresses, sizes, three(grid), three(threadgroup), int(groups), schedule
        ):
            fault = self._so.msl_fault()
            for index, canary in guarded.items():
                if fault and (byte := canary.offset(fault)) is not None:
                    raise BenchError(f"{name}: buffer {index}: access out of bounds at byte {byte}")
            raise BenchError(f"{name}: {self._so.msl_error().decode()}")
        for index, canary in guarded.items():
            canary.finish(index)
        if np.any(absent != ABSENT[schedule]):
            raise BenchError(f"{name}: write to a buffer that is not set")

    def run_schedules(
        self,
        name: str,
        buffers: Buffers,
        grid: Sequence[int],
        threadgroup: Sequence[int],
        *,
        outputs: Iterable[int],
        **options: Any,
    ) -> list[list[np.ndarray]]:
        """`run` under every schedule from the same start; for each, copies of the `outputs`.

        Outputs that differ between schedules mean a race, or a reduction of the hardware's order.
        """
        given = dict(buffers.items() if isinstance(buffers, Mapping) else enumerate(buffers))
        outputs = list(outputs)
        results = []
        for schedule in SCHEDULES:
            fresh = {i: given[i].copy() for i in outputs}
            self.run(name, {**given, **fresh}, grid, threadgroup, schedule=schedule, **options)
            results.append([fresh[i] for i in outputs])
        return results
