"""What a Mach-O file for arm64 says of itself: its imports, exports, libraries and signature."""

from __future__ import annotations

import functools
import hashlib
import struct
from dataclasses import dataclass, field
from pathlib import Path

from .tools import BenchError


@dataclass(frozen=True)
class MachO:
    kind: str  # as lief names it: "BUNDLE", "DYLIB"
    minimum_os: str  # "14.0", "" without LC_BUILD_VERSION
    libraries: list[str]  # install names
    rpaths: list[str]
    imports: dict[str, str | None]  # undefined symbol -> the library to look in, None: in all
    exports: set[str] = field(repr=False)
    content: bytes = field(repr=False)
    signature: bytes = field(repr=False)  # b"" if there is none


@functools.cache
def read(path: Path) -> MachO:
    """Raises BenchError if it is no Mach-O file for arm64."""
    import lief

    lief.logging.disable()
    fat = lief.MachO.parse(str(path))  # its parts live as long as it does
    binary = fat.take(lief.MachO.Header.CPU_TYPE.ARM64) if fat else None
    if binary is None:
        raise BenchError(f"{path}: expected a Mach-O file for arm64")
    version = binary.build_version
    macos = version and version.platform == lief.MachO.BuildVersion.PLATFORMS.MACOS
    content, place = path.read_bytes(), binary.code_signature
    own = lief.MachO.LoadCommand.TYPE.ID_DYLIB
    libraries = [str(x.name) for x in binary.libraries if x.command != own]
    return MachO(
        kind=binary.header.file_type.name,
        minimum_os=".".join(str(x) for x in version.minos[:2]) if macos else "",
        libraries=libraries,
        rpaths=[str(x.path) for x in binary.rpaths],
        imports={
            str(s.name): libraries[s.library_ordinal - 1]
            if 0 < s.library_ordinal <= len(libraries)
            else None
            for s in binary.imported_symbols
        },
        exports={str(s.name) for s in binary.exported_symbols},
        content=content,
        signature=content[place.data_offset :][: place.data_size] if place else b"",
    )


def code_directory(signature: bytes) -> bytes:
    """The blob of a signature that has the hashes; BenchError if there is none."""
    kind_of_all, kind, slot = 0xFADE0CC0, 0xFADE0C02, 0
    if len(signature) < 12:
        raise BenchError("no signature")
    magic, _, count = struct.unpack_from(">3I", signature)
    slots = [struct.unpack_from(">2I", signature, 12 + 8 * i) for i in range(min(count, 64))]
    start = dict(slots).get(slot)
    if magic != kind_of_all or start is None:
        raise BenchError("no code directory in the signature")
    found, size = struct.unpack_from(">2I", signature, start)
    if found != kind:
        raise BenchError(f"expected a code directory but got the magic number {found:#x}")
    return signature[start : start + size]


def verify_signature(binary: MachO) -> str:
    """What the signature covers; BenchError if it is not ad hoc or a hash is not that of its page.

    The layout is CS_CodeDirectory of Apple's cs_blobs.h.
    """
    directory = code_directory(binary.signature)
    _, flags, hashes, _, _, pages, limit = struct.unpack_from(">7I", directory, 8)
    size, kind, _, page_bits = struct.unpack_from(">4B", directory, 36)
    if not flags & 0x2:
        raise BenchError(f"expected the flag of an ad-hoc signature but got {flags:#x}")
    if (size, kind) != (32, 2):
        raise BenchError(f"expected SHA-256 hashes but got kind {kind} of {size} bytes")
    if limit != binary.content.find(binary.signature):
        raise BenchError(f"the signature covers {limit} bytes, not all before it")
    page = 1 << page_bits
    if pages != -(-limit // page):
        raise BenchError(f"expected a hash for each of {-(-limit // page)} pages but got {pages}")
    for i in range(pages):
        digest = hashlib.sha256(binary.content[i * page : min((i + 1) * page, limit)]).digest()
        if digest != directory[hashes + 32 * i :][:32]:
            raise BenchError(f"the hash of page {i} is not that of its bytes")
    return f"ad hoc, the hashes of {pages} pages are right"
