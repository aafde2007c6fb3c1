"""A program in processes of its own: other instruction sets and threads, the same bits."""

from __future__ import annotations

import os
import subprocess
import sys

from dflash_native import _native


def run(program: str, scale: str, **environment: str) -> list[str]:
    """The words that `program` prints, with `scale` in the place of SCALE."""
    done = subprocess.run(
        [sys.executable, "-c", program.replace("SCALE", scale)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def check_same_bits(program: str, scale: str, other: str) -> None:
    """`program` prints instruction set, threads and a digest, and that is the same whatever the
    first two are; scaled by `other`, the control, it is not.
    """
    isa, _, digest = run(program, scale)
    assert isa == _native.extension.cpu_isa()
    for threads in ("1", "2", "3"):
        assert run(program, scale, DFLASH_NATIVE_NUM_THREADS=threads) == [isa, threads, digest]
    for lesser in {"avx512": ("avx2", "baseline"), "avx2": ("baseline",)}.get(isa, ()):
        assert run(program, scale, DFLASH_NATIVE_ISA=lesser)[::2] == [lesser, digest]
    assert run(program, other)[2] != digest
