"""The command line's dealings with a terminal: logging, signals that stop a command, and readable errors."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn, TextIO

import typer

from rollcast.contracts.command import build_console
from rollcast.errors import RollcastError, WorkerError
from rollcast.plugins.discovery import find_groups, find_plugins

__all__ = ["EXIT_FAILED", "interrupted", "readable_errors", "set_up_logging", "show_error", "stoppable"]

#: Exit code of a command that was refused or failed; 1 is left to bugs.
EXIT_FAILED = 2
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@dataclass
class _Received:
    """The signals that the running command was sent: their count, and the number of the first."""

    count: int = 0
    number: int = signal.SIGINT

    @property
    def exit_code(self) -> int:
        """Exit code that shells and schedulers read as "ended by this signal": 130 after Ctrl-C."""
        return 128 + self.number


_received = _Received()


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
    """Raise KeyboardInterrupt at the first SIGINT, SIGTERM or SIGHUP, and end the process at the second.

    The exit code is 128 plus the number of the first signal: 130 for SIGINT.

    What the command has started stops as the first error travels up. Should that hang, a second
    signal ends the process once Python runs again, so not within one call of a C library that never
    returns; an embedded Ray's processes end with it, and checkpoints are complete
    or absent at any moment. A SIGHUP that is ignored, as under ``nohup``, stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, _received.count, _received.number = os.getpid(), 0, signal.SIGINT

    def stop(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked child, such as a data loader's: what its parent set is not for it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        _received.count += 1
        if _received.count == 1:
            _received.number = number
            # Tasks of an event loop that the interrupt ends are reported with a traceback each, when nobody asks.
            logging.getLogger("asyncio").setLevel(logging.CRITICAL)
            raise KeyboardInterrupt
        # A live display hides the cursor, and nothing will restore it any more.
        show_cursor = b"\x1b[?25h" if sys.stderr.isatty() else b""
        with suppress(OSError):  # the terminal may have gone
            os.write(2, show_cursor + b"\nended at once\n")
        os._exit(_received.exit_code)

    under_nohup = getattr(signal, "SIGHUP", None) if _ignores_hangup() else None
    before = {number: signal.signal(number, stop) for number in _SIGNALS if number != under_nohup}
    try:
        yield
    finally:
        # After an interrupt the handler stays: a second signal may yet come while Python shuts down.
        if _received.count == 0:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _ignores_hangup() -> bool:
    return hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def interrupted() -> bool:
    """True if the running command was told to stop by a signal.

    Whatever error it ends with is then a consequence: native code may turn the interrupt into another
    exception, and a signal to the whole process group ends workers that the command is waiting for.
    """
    return _received.count > 0


@contextmanager
def readable_errors(wants_traceback: Callable[[], bool]) -> Iterator[None]:
    """Turn the errors that a user can mend into one message on stderr and exit code 2.

    These are :class:`RollcastError` and errors of the operating system such as a full disk. An
    interrupt is one message too, with exit code 128 plus the signal's number. Anything else is a bug
    and passes through, with its traceback.

    Args:
        wants_traceback: asked when an error is shown.

    Raises:
        typer.Exit: in place of the error.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        _fail(error, str(error) or "interrupted", [], wants_traceback(), label="", code=_received.exit_code)
    except (Exception, SystemExit) as error:
        if not interrupted() or isinstance(error, typer.Exit):
            _explain_failure(error, wants_traceback)
            raise
        _fail(error, "interrupted", [], wants_traceback(), label="", code=_received.exit_code)


def _explain_failure(error: BaseException, wants_traceback: Callable[[], bool]) -> None:
    """Show an error that a user can mend, and exit; return for any other.

    Raises:
        typer.Exit: in place of the error.
    """
    if isinstance(error, RollcastError):
        message, notes = explain(error)
        _fail(error, message, notes, wants_traceback())
    # With EPIPE the reader of our output has left; typer knows what to do.
    if isinstance(error, OSError) and error.errno != errno.EPIPE:
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
    error: BaseException,
    message: str,
    notes: list[str],
    with_traceback: bool,
    label: str = "error: ",
    code: int = EXIT_FAILED,
) -> NoReturn:
    if with_traceback:
        remote = getattr(error, "remote_traceback", "")
        if remote:
            sys.stderr.write(f"In the worker:\n{remote.rstrip()}\n\nIn this process:\n")
        traceback.print_exception(error)
    with suppress(OSError):  # after a SIGHUP the terminal is gone, and nobody reads it
        show_error(message, [] if with_traceback else notes, label)
    raise typer.Exit(code) from None


def show_error(message: str, notes: list[str], label: str = "error: ") -> None:
    """Print a message and its notes on stderr, as they are."""
    from rich.text import Text

    console = build_console(stderr=True)
    console.print(Text.assemble((label, "bold red"), message))
    for note in notes:
        console.print(Text(f"  {note}", style="dim"))
