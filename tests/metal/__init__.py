"""A bench for Metal shaders without a Mac: check them, run them on the CPU, mock the device.

`check` type-checks and lints a `.metal` file, `compile` turns it into a `Library` whose kernels
run on numpy arrays under three thread schedules, and `mock` builds the C++ extension against a
mock Metal device. README.md says what each proves and what it does not.
"""

from __future__ import annotations

from .frontend import compile
from .lint import check
from .runner import SCHEDULES, Library, from_bfloat, to_bfloat
from .tools import BenchError, missing

__all__ = [
    "SCHEDULES",
    "BenchError",
    "Library",
    "check",
    "compile",
    "from_bfloat",
    "missing",
    "to_bfloat",
]
