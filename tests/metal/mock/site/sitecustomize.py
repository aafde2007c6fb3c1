"""First on PYTHONPATH: makes `dflash_native._ext` the module that DFLASH_NATIVE_MOCK names.

`dflash_native._built` is the file beside it, so a checkout in which nothing was installed serves.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class _MockFinder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec:
        module = Path(os.environ["DFLASH_NATIVE_MOCK"])
        files = {"dflash_native._ext": module, "dflash_native._built": module.parent / "_built.py"}
        return importlib.util.spec_from_file_location(name, files[name]) if name in files else None


if "DFLASH_NATIVE_MOCK" in os.environ:
    sys.meta_path.insert(0, _MockFinder)
