"""What a Mach-O file for arm64 says of itself: its imports, exports, libraries and signature."""

from __future__ import annotations

import functools
import hashlib
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
    strings: bytes = field(repr=False)  # the file


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
        strings=path.read_bytes(),
    )
