"""First on PYTHONPATH: makes `dflash_native._ext` the module that DFLASH_NATIVE_MOCK names."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class _MockFinder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec:
        if name == "dflash_native._ext":
            return importlib.util.spec_from_file_location(name, os.environ["DFLASH_NATIVE_MOCK"])
        return None


if "DFLASH_NATIVE_MOCK" in os.environ:
    sys.meta_path.insert(0, _MockFinder)
