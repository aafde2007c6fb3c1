"""Command line of the bench: `python -m tests.metal COMMAND`, from the repository's root."""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from . import audit, frontend, install, lint, macos, metallib, mock, oracle, selftest
from .tools import ROOT, SHADERS, BenchError


def _source_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-I", dest="include", action="append", default=[], metavar="FOLDER")
    add("-D", dest="defines", action="append", default=[], metavar="NAME=VALUE")


def _check(a: argparse.Namespace) -> int:
    failed = False
    for file in a.files or sorted(SHADERS.glob("*.metal")):
        findings, facts = lint.examine(file, a.include, a.defines, allow=a.allow)
        failed |= bool(findings)
        print(*findings, sep="\n", end="\n" if findings else "")
        print(
            f"{file}: {f'{len(findings)} findings' if findings else 'ok'}; {facts.kernels} kernels,"
            f" {facts.threadgroup_bytes} bytes of threadgroup memory"
        )
        if a.builtins:
            print(f"  built-ins: {' '.join(sorted(facts.builtins)) or 'none'}")
    return int(failed)


def _compile(a: argparse.Namespace) -> int:
    print(frontend.build(a.file, a.include, a.defines))
    return 0


def _run(a: argparse.Namespace) -> int:
    sys.argv = [a.script, *a.arguments]
    runpy.run_path(a.script, run_name="__main__")
    return 0


def _oracle(a: argparse.Namespace) -> int:
    if a.list:
        for name, entry in metallib.kernels().items():
            if all(word in name for word in a.kernels):
                print(f"{name}  (AIR {entry.air}, Metal {entry.metal})")
        return 0
    if not a.kernels:
        raise BenchError("oracle: no kernel is named; --list WORD... finds some")
    print(oracle.build(tuple(a.kernels)))
    for name in a.kernels:
        module = oracle.disassemble(name)
        print(name, *(f"  {argument.text}" for argument in module.arguments), sep="\n")
        for c in module.constants:
            print(f"  {c.kind} {c.name} [[function_constant({c.index})]]")
    return 0


def _mutate(a: argparse.Namespace) -> int:
    from . import mutate  # the tests, which need MLX and the extension

    return mutate.main(a.quick, a.files, a.jobs)


def _mock(a: argparse.Namespace) -> int:
    if not a.command:
        print(mock.build())
        return 0
    os.execvpe(a.command[0], a.command, mock.environment(a.schedule))


def _host(a: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "pytest", *a.options, *mock.TESTS]
    return subprocess.run(command, env=mock.environment(a.schedule), cwd=ROOT).returncode


def _wheel(a: argparse.Namespace) -> int:
    wheel = macos.build()
    if a.out:
        a.out.mkdir(parents=True, exist_ok=True)
        wheel = shutil.copy(wheel, a.out)
    print(wheel)
    return 0


def _audit(a: argparse.Namespace) -> int:
    results = audit.audit(a.wheel or macos.build())
    for name, (passed, found) in results.items():
        print(f"{'PASS' if passed else 'FAIL'} {name}: {found}")
    return int(not all(passed for passed, _ in results.values()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.metal", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    p = commands.add_parser("setup", help="install the compilers and build the emulator")
    p.set_defaults(function=lambda a: install.setup())
    p = commands.add_parser("check", help="type check and lint; file:line messages, exit code 1")
    p.add_argument("files", nargs="*", metavar="FILE.metal", help="default: metal/*.metal")
    p.add_argument("--builtins", action="store_true", help="also list the built-ins in use")
    p.add_argument(
        "--allow", action="append", default=[], metavar="BUILTIN", help="accept it, on your word"
    )
    _source_options(p)
    p.set_defaults(function=_check)
    p = commands.add_parser("compile", help="compile for the emulator and print the path")
    p.add_argument("file", metavar="FILE.metal")
    _source_options(p)
    p.set_defaults(function=_compile)
    p = commands.add_parser("run", help="run a script that does `from tests import metal`")
    p.add_argument("script")
    p.add_argument("arguments", nargs=argparse.REMAINDER)
    p.set_defaults(function=_run)
    p = commands.add_parser(
        "oracle", help="make kernels that Apple's compiler built ready; print their arguments"
    )
    p.add_argument("kernels", nargs="*", metavar="KERNEL")
    p.add_argument("--list", action="store_true", help="those whose names contain all the words")
    p.set_defaults(function=_oracle)
    p = commands.add_parser(
        "mutate", help="do the shaders' tests notice faults? a score, survivors"
    )
    p.add_argument(
        "files", nargs="*", metavar="FILE", help="of metal/, by its bare name; default: all"
    )
    p.add_argument("--quick", action="store_true", help="each sixth mutant")
    p.add_argument("--jobs", type=int, default=1)
    p.set_defaults(function=_mutate)
    p = commands.add_parser("selftest", help="a PASS or FAIL line for each claim; exit code 1")
    p.add_argument("--full", action="store_true", help="all of the bench's tests and mutants")
    p.set_defaults(function=lambda a: selftest.selftest(a.full))
    p = commands.add_parser(
        "mock", help="build the extension for the mock device; print its path, or run COMMAND on it"
    )
    p.add_argument("--schedule", type=int, choices=(0, 1, 2), default=0)
    p.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    p.set_defaults(function=_mock)
    p = commands.add_parser(
        "host", help="the operations' tests on the mock device; other options are pytest's"
    )
    p.add_argument("--schedule", type=int, choices=(0, 1, 2), default=0)
    p.set_defaults(function=_host)
    p = commands.add_parser("wheel", help="build the wheel for macOS and print its path")
    p.add_argument("--out", type=Path, metavar="FOLDER", help="copy it there")
    p.set_defaults(function=_wheel)
    p = commands.add_parser("audit", help="a PASS or FAIL line for each property of a macOS wheel")
    p.add_argument("wheel", nargs="?", type=Path, help="default: the one that `wheel` builds")
    p.set_defaults(function=_audit)

    a, a.options = parser.parse_known_args()
    if a.options and a.function is not _host:
        parser.error(f"unrecognized arguments: {' '.join(a.options)}")
    return a.function(a) or 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(f"tests.metal: {error}")
