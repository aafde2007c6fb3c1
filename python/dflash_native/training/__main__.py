"""The command line: one command a stage, all in one folder of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CUT = 3
"""Exit code of a command whose time ended: the same command goes on."""

app = typer.Typer(
    help="The recipe of the demo pair.", no_args_is_help=True, pretty_exceptions_enable=False
)

Run = Annotated[Path, typer.Option(help="The folder of the run.")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]
Seconds = Annotated[float, typer.Option(help="Training time over all commands.")]
CommandSeconds = Annotated[
    float, typer.Option(help="After so long this command saves, stops and exits with 3.")
]
Compiled = Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile, on a GPU.")]

_RUN = Path("training-run")


@app.command()
def sources(
    wheels: Annotated[Path, typer.Option(help="The wheels to list.")] = Path("wheels"),
    library: Annotated[Path | None, typer.Option(help="The standard library to list.")] = None,
    version: Annotated[str, typer.Option(help="Its version.")] = "",
    out: Annotated[Path | None, typer.Option(show_default="sources.json beside the code")] = None,
) -> None:
    """Make the list of sources anew from wheels on the disk; says which are refused and why."""
    from . import corpus as stage

    limits = {source.name.lower(): source.megabytes for source in stage.read_sources()}
    found, refused = stage.make_list(wheels, library, version, limits, default=4.0)
    stage.write_sources(found, out or stage.SOURCES)
    for line in refused:
        typer.echo(line)
    typer.echo(f"{len(found)} sources, {len(refused)} wheels refused")


@app.command()
def corpus(
    run: Run = _RUN,
    wheels: Annotated[Path, typer.Option(help="Where wheels are kept.")] = Path("wheels"),
    library: Annotated[
        Path | None, typer.Option(help="The standard library of the version in sources.json.")
    ] = None,
) -> None:
    """Fetch the listed sources, check their licences, filter, deduplicate and split."""
    from . import corpus as stage

    figures = stage.build(stage.read_sources(), wheels, library, run)
    for name, count in figures["files"].items():
        typer.echo(f"{count:>9,}  {name}")
    typer.echo(f"characters by kind: {figures['train_characters']}")


@app.command()
def tokenizer(
    run: Run = _RUN,
    vocab_size: Annotated[int, typer.Option(help="Entries, special tokens included.")] = 8192,
    tokens: Annotated[int, typer.Option(help="At most so many training tokens.")] = 54_000_000,
) -> None:
    """Train the tokenizer on the corpus and encode it."""
    from . import tokenizer as stage

    for name, value in stage.build(run, vocab_size, tokens).items():
        typer.echo(f"{name}: {value}")


@app.command()
def target(
    run: Run = _RUN,
    seconds: Seconds = 270.0,
    command_seconds: CommandSeconds = 540.0,
    seed: Seed = 0,
    compiled: Compiled = True,
) -> None:
    """Train the target."""
    from . import loop, stages

    plan = loop.Plan(seconds, command_seconds=command_seconds)
    _finish(stages.train_target(run, plan, seed=seed, compiled=compiled))


@app.command()
def continuations(
    run: Run = _RUN,
    batches: Annotated[int, typer.Option(help="Of 4096 texts of 640 tokens each.")] = 9,
    seed: Seed = 0,
) -> None:
    """Let the target write what the drafts learn from."""
    from . import stages

    stages.make_continuations(run, batches, seed=seed)


def _draft(
    kind: str, run: Path, seconds: float, command_seconds: float, seed: int, compiled: bool
) -> None:
    from . import loop, stages

    plan = loop.Plan(seconds, flat=0.3, command_seconds=command_seconds, report_steps=200)
    _finish(stages.train_draft(run, plan, kind, seed=seed, compiled=compiled))


@app.command()
def draft(
    run: Run = _RUN,
    seconds: Seconds = 330.0,
    command_seconds: CommandSeconds = 540.0,
    seed: Seed = 0,
    compiled: Compiled = True,
) -> None:
    """Train the DFlash draft."""
    _draft("dflash", run, seconds, command_seconds, seed, compiled)


@app.command()
def draft2(
    run: Run = _RUN,
    seconds: Seconds = 330.0,
    command_seconds: CommandSeconds = 540.0,
    seed: Seed = 0,
    compiled: Compiled = True,
) -> None:
    """Train the DFlash2 draft."""
    _draft("dflash2", run, seconds, command_seconds, seed, compiled)


@app.command()
def evaluate(
    run: Run = _RUN,
    rows: Annotated[int, typer.Option(help="Held-out cuts of each kind of text.")] = 256,
) -> None:
    """Measure losses, loops and acceptance; writes evaluation.json."""
    import json

    from . import evaluate as stage

    figures = stage.evaluate(run, rows)
    typer.echo(json.dumps({k: v for k, v in figures.items() if k != "samples"}, indent=1))


@app.command()
def export(
    run: Run = _RUN,
    out: Annotated[Path, typer.Option(help="Gets target/, draft/, draft2/, MODEL_CARD.md.")] = Path(
        "pair"
    ),
) -> None:
    """Quantise the target, copy the drafts, write the model card. Needs MLX."""
    from . import export as stage

    for path, size in stage.export(run, out):
        typer.echo(f"{size:>12,}  {path}")


def _finish(done: bool) -> None:
    if not done:
        raise typer.Exit(CUT)


if __name__ == "__main__":
    app()
