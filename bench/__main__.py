"""Command line of the benchmarks: `python -m bench COMMAND`, from the repository's root."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from . import machine

COMMANDS = {
    "kernels": "each operation: time, bandwidth, arithmetic, rivals",
    "cycle": "a round of drafting and verifying, in parts, by context and width",
    "e2e": "texts: mlx-lm, ours plain, ours with DFlash, other implementations",
    "memory": "peaks by phase, a long text, a long chat",
    "report": "one page from the files of the others",
    "policy": "the width chosen round by round, on recorded acceptance and end to end",
    "sampling": "acceptance where tokens are drawn, by how the draft proposes",
    "lookup": "the n-gram index, and decoding of repetitive JSON",
    "prefix": "a chat's second turn with a kept prefix, warm, from disk and cold",
    "soak": "a server under requests for a long time",
    "profile": "another command under CUPTI: times of the kernels themselves (NVIDIA)",
}
SCHEMA = 1


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; 1 where a check failed."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parsers = parser.add_subparsers(dest="command", required=True)
    name = next((word for word in given if word in COMMANDS), None)
    for command, says in COMMANDS.items():
        added = parsers.add_parser(command, help=says, description=says)
        if command != name:  # the others' modules need not be there
            continue
        module = importlib.import_module(f"bench.{command}")
        if hasattr(module, "text"):
            added.add_argument("--quick", action="store_true", help="seconds, on a tiny model")
            added.add_argument(
                "--json", action="store_true", help="the document in place of tables"
            )
            added.add_argument(
                "--save", type=Path, metavar="FOLDER", help="keep the document there"
            )
        module.add_arguments(added)
    options = parser.parse_args(given)
    if not hasattr(module, "text"):
        if name not in ("report", "profile"):  # a page, and a command with a header of its own
            print_machine(f"python -m bench {shlex.join(given)}", machine.header())
        return int(module.run(options) or 0)
    settle(options, module)
    try:
        document = measured(module, options, given)
    except AssertionError as wrong:
        print(f"FAILED: {wrong}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        about = document["machine"]
        print_machine(document["command"], about)
        print(
            f"{about['date']}, {document['seconds']} s; load {about['load']['average'][0]} before, "
            f"{document['load_after']['average'][0]} after"
        )
        for line in module.text(document):
            print(line)
    for failure in document.get("failures", []):
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if document.get("failures") else 0


def settle(options: argparse.Namespace, module: Any) -> None:
    """Gives every option that was left out its value, that of --quick where it is asked for."""
    for name, value in (module.QUICK if options.quick else module.FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def measured(module: Any, options: argparse.Namespace, given: list[str]) -> dict[str, Any]:
    """The document of a run, written to --save, too."""
    start = time.perf_counter()

    def progress(what: str) -> None:
        print(f"[{options.command} {time.perf_counter() - start:6.1f} s] {what}", file=sys.stderr)

    document = {
        "benchmark": options.command,
        "schema": SCHEMA,
        "command": f"python -m bench {shlex.join(given)}",
        "machine": machine.header(),
        "settings": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(options).items()
            if name not in ("command", "json", "save")
        },
    }
    document |= module.run(options, progress)
    document["load_after"] = machine.load()
    document["seconds"] = round(time.perf_counter() - start, 1)
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
        about = machine.slug(machine.subject(document))
        name = f"{options.command}-{about}-{machine.name(document['machine'])}.json"
        path = options.save / name
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        progress(f"wrote {path}")
    return document


def print_machine(command: str, about: dict[str, Any]) -> None:
    """Command, machine and versions, in three lines."""
    versions = {k: v for k, v in about["versions"].items() if k not in ("system", "typer", "rich")}
    print(f"$ {command}")
    print(
        f"{about['backend']}: {about['device']}; {about['cores']} cores ({about['cpu']}), "
        f"{about['memory_gb']} GB; {about['system']}"
    )
    print(
        f"{', '.join(f'{k} {v}' for k, v in versions.items())}; commit {about['commit']}; "
        f"{about['libmlx']}"
    )


if __name__ == "__main__":
    sys.exit(main())
