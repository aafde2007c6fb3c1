"""What the commands share: consoles, one-sentence errors, exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 + SIGINT."""


class OptionError(ValueError):
    """A value on the command line that no model can make right: exit code 2."""


def out() -> Console:
    """Standard output, as it is at the time of the call."""
    return Console(highlight=False, markup=False, emoji=False)


def err() -> Console:
    """Standard error, as it is at the time of the call."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


@contextmanager
def guard() -> Iterator[None]:
    """Turn what a user can cause into one sentence on standard error and an exit code.

    2 for a bad option, 1 for what cannot be loaded or run, 130 for Ctrl-C. An error of our own
    making keeps its traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        raise  # `| head`: typer ends quietly
    except OptionError as error:
        _fail(error, 2)
    except (ValueError, OSError, ImportError) as error:
        _fail(error, 1)
    except (TypeError, RuntimeError) as error:
        if not str(error).startswith("["):  # our sentences name their operation first
            raise
        _fail(error, 1)


def check_block_size(block_size: int | None, largest: int | None = None) -> None:
    """Refuse what no draft allows or, once it is known, what is over the draft's own block."""
    if block_size is None or (1 <= block_size <= (largest or block_size)):
        return
    allowed = f"in 1 … {largest}" if largest else "of at least 1"
    raise OptionError(f"expected --block-size {allowed} but got {block_size}")


def _fail(message: object, code: int) -> None:
    sentence = " ".join(str(message).split())
    typer.secho(f"dflash-native: {sentence}", err=True, fg=typer.colors.RED)
    raise typer.Exit(code) from None
