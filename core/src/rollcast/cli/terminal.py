"""Terminal handling of the command line: logging, signals that stop a command, and readable errors."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, TextIO

import typer

from rollcast.contracts.command import build_console
from rollcast.contracts.logs import set_log_level
from rollcast.errors import RollcastError, WorkerError

__all__ = ["EXIT_FAILED", "interrupted", "readable_errors", "run_process", "set_up_logging", "show_error", "stoppable"]

#: Exit code of a command that was rejected or failed; 1 is reserved for bugs.
EXIT_FAILED = 2
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@dataclass
class _Received:
    """Signals received by the running command: their count, and the number of the first."""

    count: int = 0
    number: int = signal.SIGINT

    @property
    def exit_code(self) -> int:
        """Exit code that shells and schedulers read as "ended by this signal": 130 after Ctrl-C."""
        return 128 + self.number


_received = _Received()


class _StderrHandler(logging.StreamHandler[TextIO]):
    """A handler that writes to the current ``sys.stderr``, which a live display replaces while it runs."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        raise AttributeError("this handler always writes to sys.stderr")


class _PlainFormatter(logging.Formatter):
    """A formatter that prints the message, prefixed with the level from WARNING upwards."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the name is logging's
        if record.levelno < logging.WARNING:
            return record.message
        return f"{record.levelname.lower()}: {record.message}"


def set_up_logging() -> None:
    """Show log messages of rollcast from INFO upwards, and of other libraries from WARNING upwards.

    Raises:
        ConfigError: :data:`~rollcast.contracts.logs.LOG_LEVEL_VARIABLE`, which sets another level, names none.
    """
    root = logging.getLogger()
    if any(isinstance(handler, _StderrHandler) for handler in root.handlers):
        return
    handler = _StderrHandler()
    handler.setFormatter(_PlainFormatter())
    root.addHandler(handler)
    set_log_level(logging.INFO)


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first SIGINT, SIGTERM or SIGHUP, and end the process at the second.

    The exit code is 128 plus the number of the first signal: 130 for SIGINT.

    The first signal unwinds the command, which stops the processes that it has started. If that hangs, a second signal
    ends the process as soon as Python code runs again, that is not inside a C function that never returns. The
    processes of an embedded Ray end too, and every checkpoint is either complete or absent. A signal that is ignored
    stays ignored, such as SIGHUP under ``nohup`` and SIGINT in a shell's background job.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, _received.count, _received.number = os.getpid(), 0, signal.SIGINT

    def stop(number: int, _frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked child, such as a data loader's, inherits the handler but must not use it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        _received.count += 1
        if _received.count == 1:
            _received.number = number
            # asyncio would log a traceback for each task that the interrupt ends.
            logging.getLogger("asyncio").setLevel(logging.CRITICAL)
            raise KeyboardInterrupt
        # A live display hides the cursor and cannot restore it after this exit.
        show_cursor = b"\x1b[?25h" if sys.stderr.isatty() else b""
        with suppress(OSError):  # the terminal may have gone
            os.write(2, show_cursor + b"\nended at once\n")
        os._exit(_received.exit_code)

    before = {number: signal.signal(number, stop) for number in _heeded()}
    try:
        yield
    finally:
        # After an interrupt, keep the handler for a second signal during Python's shutdown.
        if _received.count == 0:
            _restore(before)


def run_process(command: Sequence[str]) -> int:
    """Run a command in a process of its own, which gets the signals that would stop this process; return its exit code.

    The caller asks :func:`interrupted` afterwards.
    """
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, _frame: FrameType | None) -> None:
        _received.number = number if _received.count == 0 else _received.number
        _received.count += 1
        if process is not None:
            process.send_signal(number)

    before = {number: signal.signal(number, stop) for number in _heeded()}
    try:
        # Outside this process group, or a terminal would send it each signal too.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)  # noqa: S603
        if interrupted():
            process.send_signal(_received.number)
        return process.wait()
    finally:
        _restore(before)


def _heeded() -> list[int]:
    return [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def _restore(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def interrupted() -> bool:
    """Return True if the running command received a signal to stop.

    Any error of the command is then a consequence of the signal: native code may convert the interrupt to another
    exception, and a signal to the whole process group ends workers that the command is waiting for.
    """
    return _received.count > 0


@contextmanager
def readable_errors(wants_traceback: Callable[[], bool]) -> Iterator[None]:
    """Convert errors that a user can fix into one message on stderr and exit code 2.

    These are :class:`RollcastError` and errors of the operating system such as a full disk. An
    interrupt is one message too, with exit code 128 plus the signal's number. Any other error is a bug
    and propagates with its traceback.

    Args:
        wants_traceback: Function that returns True if the traceback should be shown; called when an error is shown.

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
    """Show an error that a user can fix, and exit; return for any other error.

    Raises:
        typer.Exit: in place of the error.
    """
    if isinstance(error, RollcastError):
        message, notes = explain(error)
        _fail(error, message, notes, wants_traceback())
    # EPIPE means that the reader of the output has closed it, which typer handles.
    if isinstance(error, OSError) and error.errno != errno.EPIPE:
        _fail(error, _explain_os(error), ["--traceback shows where it was raised"], wants_traceback())


def explain(error: RollcastError) -> tuple[str, list[str]]:
    """Return the message for an error, and further lines of notes.

    For an error that a worker raised on purpose, the message is the same as without a worker.
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
    with suppress(OSError):  # after a SIGHUP, the terminal no longer exists
        show_error(message, [] if with_traceback else notes, label)
    raise typer.Exit(code) from None


def show_error(message: str, notes: list[str], label: str = "error: ") -> None:
    """Print a message and its notes on stderr, without markup."""
    from rich.text import Text

    console = build_console(stderr=True)
    console.print(Text.assemble((label, "bold red"), message))
    for note in notes:
        console.print(Text(f"  {note}", style="dim"))
