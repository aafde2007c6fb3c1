"""`python -m tests.metal selftest`: a PASS or FAIL line for each thing that the bench claims."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from .tools import BENCH, ROOT

# name -> tests, as pytest's arguments
FAST: dict[str, list[str]] = {
    "check: bad lines are reported and no others": ["test_bench.py", "-k", "check"],
    "check: the shipped shaders are clean": ["test_shaders.py", "-k", "test_check"],
    "emulator: planted faults are shown": ["test_bench.py", "-k", "fault"],
    "emulator: contraction changes bits": ["test_bench.py", "-k", "contraction"],
    "emulator: it has every built-in that MLX uses": ["test_oracles.py", "-k", "builtin"],
    "front end: MLX's headers equal Apple's compilation": ["test_fidelity.py", "-k", "equal"],
    "front end: changed headers, shim and rounding differ": ["test_fidelity.py", "-k", "differs"],
    "oracles: the metallib": ["test_oracles.py", "-k", "metallib or wheel"],
    "oracles: attention": ["test_oracles.py", "-k", "attention"],
    "oracles: products": ["test_oracles.py", "-k", "products"],
    "oracles: gated delta": ["test_oracles.py", "-k", "gated_delta"],
    "mock device: host code": ["test_mock.py"],
    "mutants: planted ones are noticed": ["test_shaders.py", "-k", "mutants"],
}
FULL: dict[str, list[str]] = {
    "mutants: planted in products and attention": ["test_verify_mutants.py"],
    "shaders: recurrence, convolution, cache": ["test_shaders.py"],
    "shaders: products": ["test_matmul_shaders.py"],
    "shaders: attention": ["test_attention_shaders.py"],
}


def _run(command: list[str]) -> tuple[bool, str, str]:
    """Whether it passed, its last line, and all that it printed."""
    # with CI a test whose tools are missing fails
    environment = {**os.environ, "CI": "true", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()] or [done.stderr[-200:]]
    return done.returncode == 0, lines[-1].strip("= "), done.stdout + done.stderr


def selftest(full: bool) -> int:
    """Run and print; 1 if something failed."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    metal = [sys.executable, "-m", "tests.metal"]
    commands = {
        name: [*pytest, str(BENCH / tests), *options]
        for name, (tests, *options) in (FAST | (FULL if full else {})).items()
    }
    every = [] if full else ["--every", "4"]
    commands["mock device: the operations' tests"] = [*metal, "host", "-q", *every]
    commands["macOS: the wheel and its audit"] = [*metal, "audit"]
    commands["macOS: damaged wheels are refused"] = [*pytest, str(BENCH / "test_macos.py")]
    which = "the whole run" if full else "a sample"
    commands[f"mutants: {which}"] = [
        *metal,
        "mutate",
        "--jobs",
        "2",
        *([] if full else ["--quick"]),
    ]
    failed = 0
    for name, command in commands.items():
        passed, last, printed = _run(command)
        print(f"{'PASS' if passed else 'FAIL'} {name}: {last}", flush=True)
        if not passed:
            failed += 1
            found = re.findall(r"^(?:FAILED|ERROR|ALIVE).*$", printed, re.M)
            print(*(f"    {line}" for line in found[:10]), sep="\n", flush=True)
    print(f"{len(commands) - failed} passed, {failed} failed")
    return int(failed > 0)
