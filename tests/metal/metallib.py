"""The metallib of MLX's wheel for macOS: its kernels, as AIR bitcode."""

from __future__ import annotations

import functools
import mmap
import struct
from typing import NamedTuple

from . import macos
from .tools import BenchError


class Entry(NamedTuple):
    """Where a kernel's bitcode lies, and for which versions it was compiled."""

    offset: int
    size: int
    air: str
    metal: str


@functools.cache
def _container() -> tuple[mmap.mmap, dict[str, Entry]]:
    path = macos.MLX / "mlx" / "lib" / "mlx.metallib"
    if not path.exists():
        wheel = f"mlx-metal=={macos.MLX_VERSION} for macOS"
        raise BenchError(f"{wheel} is missing: run `python -m tests.metal setup`")
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if data[:4] != b"MTLB":
        raise BenchError(f"{path} is not a metallib")
    # offset and size of the list of functions, of public and of private metadata, of the bitcode
    functions, _, _, _, _, _, bitcode, _ = struct.unpack_from("<8Q", data, 24)
    (count,) = struct.unpack_from("<I", data, functions)
    kernels, at = {}, functions + 4
    for _ in range(count):
        tags, tag_at = {}, at + 4
        while (tag := data[tag_at : tag_at + 4]) != b"ENDT":
            (size,) = struct.unpack_from("<H", data, tag_at + 4)
            tags[tag] = data[tag_at + 6 : tag_at + 6 + size]
            tag_at += 6 + size
        (own_offset,) = struct.unpack_from("<Q", tags[b"OFFT"], 16)
        (size,) = struct.unpack("<Q", tags[b"MDSZ"])
        numbers = struct.unpack("<4H", tags[b"VERS"])
        name = tags[b"NAME"].rstrip(b"\0").decode()
        kernels[name] = Entry(
            bitcode + own_offset,
            size,
            air="{}.{}".format(*numbers[:2]),
            metal="{}.{}".format(*numbers[2:]),
        )
        at += struct.unpack_from("<I", data, at)[0]
    return data, kernels


def kernels() -> dict[str, Entry]:
    """Every kernel of the metallib, by name, in its order."""
    return _container()[1]


def bitcode(name: str) -> bytes:
    """One kernel's AIR."""
    data, found = _container()
    if name not in found:
        near = [k for k in found if name.lower() in k.lower()][:8]
        hint = f"; some that contain it: {', '.join(near)}" if near else ""
        raise BenchError(f"no kernel {name} in the metallib{hint}")
    entry = found[name]
    return data[entry.offset : entry.offset + entry.size]
