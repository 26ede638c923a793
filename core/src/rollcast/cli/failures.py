"""What a person sees when a command fails: one readable message, and a traceback if asked for."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from rollcast.cli.output import build_console
from rollcast.errors import RollcastError, WorkerError

__all__ = ["EXIT_FAILED", "readable_errors", "show_error"]

#: Exit code of a command that was refused, failed or was interrupted; 1 is left to bugs.
EXIT_FAILED = 2


@contextmanager
def readable_errors(wants_traceback: Callable[[], bool]) -> Iterator[None]:
    """Turn the errors that a user can mend into one message on stderr and exit code 2.

    These are :class:`RollcastError`, an interrupt, and errors of the operating system such as a
    full disk. Anything else is a bug and passes through, with its traceback.

    Args:
        wants_traceback: asked when an error is shown.

    Raises:
        typer.Exit: in place of the error.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        _fail(error, str(error) or "interrupted", [], wants_traceback(), label="")
    except RollcastError as error:
        message, notes = explain(error)
        _fail(error, message, notes, wants_traceback())
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader of our output has left; typer knows what to do
            raise
        _fail(error, _explain_os(error), ["--traceback shows where it was raised"], wants_traceback())


def explain(error: RollcastError) -> tuple[str, list[str]]:
    """The message for an error, and further lines about it.

    An error that a worker raised on purpose reads as it would have without a worker.
    """
    if not isinstance(error, WorkerError):
        return str(error) or type(error).__name__, []
    where = f"raised in {error.group}.{error.role}.{error.method} on rank {error.rank} (node {error.node})"
    cause: BaseException | None = error.__cause__
    if isinstance(cause, RollcastError) and not isinstance(cause, WorkerError):
        return str(cause) or type(cause).__name__, [where]
    return str(error), ["--traceback shows the worker's traceback"] if error.remote_traceback else []


def _explain_os(error: OSError) -> str:
    return str(error) if error.errno is not None else f"{type(error).__name__}: {error}"


def _fail(
    error: BaseException, message: str, notes: list[str], with_traceback: bool, label: str = "error: "
) -> NoReturn:
    if with_traceback:
        remote = getattr(error, "remote_traceback", "")
        if remote:
            sys.stderr.write(f"In the worker:\n{remote.rstrip()}\n\nIn this process:\n")
        traceback.print_exception(error)
    show_error(message, [] if with_traceback else notes, label)
    raise typer.Exit(EXIT_FAILED) from None


def show_error(message: str, notes: list[str], label: str = "error: ") -> None:
    """Print a message and its notes on stderr, as they are."""
    from rich.text import Text

    console = build_console(stderr=True)
    console.print(Text.assemble((label, "bold red"), message))
    for note in notes:
        console.print(Text(f"  {note}", style="dim"))
