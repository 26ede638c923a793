"""The command line's dealings with a terminal: logging, Ctrl-C and SIGTERM, and readable errors."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TextIO

import typer

from rollcast.contracts.command import build_console
from rollcast.errors import RollcastError, WorkerError
from rollcast.plugins.discovery import find_groups, find_plugins

__all__ = ["EXIT_FAILED", "readable_errors", "set_up_logging", "show_error", "stoppable"]

#: Exit code of a command that was refused, failed or was interrupted; 1 is left to bugs.
EXIT_FAILED = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is at the moment: a live display replaces it while it runs."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        raise AttributeError("this handler always writes to sys.stderr")


class _PlainFormatter(logging.Formatter):
    """The message; from warnings upwards with the level in front."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the name is logging's
        if record.levelno < logging.WARNING:
            return record.message
        return f"{record.levelname.lower()}: {record.message}"


def set_up_logging() -> None:
    """Show rollcast's own messages from INFO upwards, and everybody else's from WARNING upwards."""
    root = logging.getLogger()
    if any(isinstance(handler, _StderrHandler) for handler in root.handlers):
        return
    handler = _StderrHandler()
    handler.setFormatter(_PlainFormatter())
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    packages = {part.module.split(".")[0] for group in find_groups() for part in find_plugins(group)}
    for package in {"rollcast", *packages}:
        if package.startswith("rollcast"):
            logging.getLogger(package).setLevel(logging.INFO)


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first SIGINT or SIGTERM, and exit with code 2 at the second.

    What the command has started stops as the first error travels up. Should that hang, a second
    signal ends the process once Python runs again, so not within one call of a C library that never
    returns; an embedded Ray's processes end with it, and checkpoints are complete
    or absent at any moment.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, count = os.getpid(), 0

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal count
        if os.getpid() != owner:  # a forked child, such as a data loader's: what its parent set is not for it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        count += 1
        if count == 1:
            raise KeyboardInterrupt
        # A live display hides the cursor, and nothing will restore it any more.
        show_cursor = b"\x1b[?25h" if sys.stderr.isatty() else b""
        os.write(2, show_cursor + b"\nended at once\n")
        os._exit(2)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        # After an interrupt the handler stays: a second signal may yet come while Python shuts down.
        if count == 0:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)


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
