"""Options and output functions shared by commands. A command is registered in ``rollcast.commands``."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID
    from rich.text import Text

__all__ = [
    "ConfigDir",
    "Overrides",
    "ProgressLine",
    "Traceback",
    "build_console",
    "exit_code",
    "format_clock",
    "hide_library_bars",
    "print_lines",
    "read_command",
    "record_command",
    "show_progress",
    "track",
]

T = TypeVar("T")

#: Key of ``--traceback`` in a context's ``meta``, which the contexts of a command line share.
TRACEBACK_KEY = "rollcast.traceback"

_exit_code: int | None = None


def exit_code() -> int | None:
    """Return the exit code with which this process's command ended; None before its end, or without a command.

    A function registered with ``atexit`` that has to end the process itself passes it to ``os._exit``.
    """
    return _exit_code


@contextmanager
def recorded_exit_code() -> Iterator[None]:
    """Record the exit code of the command that runs in the block, for :func:`exit_code`."""
    global _exit_code  # noqa: PLW0603  # a process has one exit code
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        # Python exits with 0 for None, and with 1 after it has printed any other object.
        _exit_code = code if isinstance(code, int) else int(code is not None)
        raise


def _remember(ctx: typer.Context, value: bool) -> bool:
    if value:
        ctx.meta[TRACEBACK_KEY] = True
    return value


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ask the root command, which knows the configuration; a plugin's command that runs by itself completes nothing."""
    complete = getattr(ctx.find_root().command, "complete_override", None)
    return [] if complete is None else list(complete(ctx.params.get("overrides") or (), incomplete))


Traceback = Annotated[
    bool, typer.Option("--traceback", callback=_remember, help="Show the traceback of an error, not only its message.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERRIDES",
        help="group=option or section.key=value, such as recipe=quickstart.",
        autocompletion=_complete,
    ),
]
ConfigDir = Annotated[
    Path | None, typer.Option("--config-dir", metavar="DIR", help="A folder of your own config groups, searched first.")
]


def build_console(stderr: bool = False) -> Console:
    """Return a console that prints text verbatim, without markup, highlighting or wrapping."""
    from rich.console import Console

    # In a notebook rich would show what is meant for standard error as an output of the cell, which is saved.
    in_notebook = False if stderr else None
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True, force_jupyter=in_notebook)


def hide_library_bars() -> None:
    """Hide the progress bars of libraries, in workers too. Set ``TQDM_DISABLE=0`` to show them."""
    os.environ.setdefault("TQDM_DISABLE", "1")


def print_lines(*lines: str | Text, stderr: bool = False) -> None:
    """Print lines without wrapping or truncating them."""
    console = build_console(stderr)
    for line in lines:
        console.print(line)


# -- the command of a run ---------------------------------------------------------------------

_COMMAND = "ROLLCAST_COMMAND"


def record_command(arguments: Sequence[str]) -> None:
    """Remember the arguments after ``rollcast`` and the current folder, for this process and those that it starts."""
    os.environ[_COMMAND] = json.dumps({"arguments": list(arguments), "folder": str(Path.cwd())})


def read_command() -> tuple[list[str], str]:
    """Return the arguments and the folder of the command that this process belongs to; empty if there is none."""
    try:
        command = json.loads(os.environ.get(_COMMAND, ""))
        return [str(argument) for argument in command["arguments"]], str(command["folder"])
    except (ValueError, KeyError, TypeError):
        return [], ""


# -- progress ---------------------------------------------------------------------------------

#: Seconds after which a task is worth a line where there is no terminal, and between two such lines.
_FIRST_LINE_S, _NEXT_LINE_S = 2.0, 10.0
#: The task that is shown; a task within it is not shown, because a terminal has one live display.
_shown = threading.Lock()


def format_clock(seconds: float) -> str:
    """Return a duration as ``0:42``, ``12:07`` or ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class ProgressLine:
    """Progress of a task with its rate and remaining time; made by :func:`show_progress`.

    Attributes:
        label: name of the task, such as ``prompts``.
        done: number of finished items.
        total: number of all items; None if unknown.
        note: name of the item in work.
    """

    def __init__(self, label: str, total: int | None = None, done: int = 0) -> None:
        self.label = label
        self.total = total
        self.done = done
        self.note = ""
        self._before = done
        self._started = time.monotonic()

    def update(self, done: int | None = None, total: int | None = None, note: str | None = None) -> None:
        """Set what is given."""
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        self.note = self.note if note is None else note
        self._show()

    def advance(self, count: int = 1) -> None:
        """Count finished items."""
        self.update(done=self.done + count)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def rate(self) -> float | None:
        """Items per second since the start; None before the first."""
        progress = self.done - self._before
        return progress / max(self.seconds, 1e-9) if progress > 0 else None

    @property
    def remaining(self) -> float | None:
        """Estimated seconds until the end; None if unknown."""
        if self.rate is None or self.total is None:
            return None
        return max(0, self.total - self.done) / self.rate

    def describe(self) -> str:
        """Return the progress as one line of text."""
        parts = [self.label]
        if self.total is not None:
            parts.append(f"{self.done}/{self.total}")
        elif self.done:
            parts.append(str(self.done))
        parts += self.figures()
        return "  ".join([*parts, *([self.note] if self.note else [])])

    def figures(self) -> list[str]:
        """Return rate, time and remaining time as texts."""
        parts = []
        if self.rate is not None:
            parts.append(f"{self.rate:.3g}/s" if self.rate >= 0.1 else f"{1 / self.rate:.3g} s each")
        parts.append(format_clock(self.seconds))
        if self.remaining is not None:
            parts.append(f"{format_clock(self.remaining)} left")
        return parts

    def _show(self) -> None:
        """Show a change; nothing for a task within another one."""


class _LiveLine(ProgressLine):
    """Progress as a bar on a terminal."""

    bar: RichProgress
    task: TaskID

    def _show(self) -> None:
        self.bar.update(self.task, total=self.total, completed=self.done)


class _PlainLine(ProgressLine):
    """Progress as lines of text: the first after two seconds, then one every ten seconds."""

    def __init__(self, label: str, total: int | None, done: int, console: Console) -> None:
        super().__init__(label, total, done)
        self._console = console
        self._ended = threading.Event()
        self.lines = 0
        # A thread, because a task without items, such as loading a model, calls nothing while it works.
        self._thread = threading.Thread(target=self._tell, name="rollcast-progress", daemon=True)
        self._thread.start()

    def _tell(self) -> None:
        wait = _FIRST_LINE_S
        while not self._ended.wait(wait):
            self._console.print(self.describe())
            self.lines += 1
            wait = _NEXT_LINE_S

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        if self.lines:
            self._console.print(self.describe())


@contextmanager
def show_progress(
    label: str, total: int | None = None, done: int = 0, console: Console | None = None
) -> Iterator[ProgressLine]:
    """Show the progress of a task while the block runs: a bar on a terminal, else a line now and then.

    A task that takes less than two seconds prints nothing where there is no terminal. A task within another one is
    counted but not shown.

    Args:
        label: name of the task, or of its items: ``prompts``, ``starting Ray``.
        total: number of items; None if unknown.
        done: number of items that were finished before; they do not count for the rate.
        console: console to write to; None for standard error.
    """
    if not _shown.acquire(blocking=False):
        yield ProgressLine(label, total, done)
        return
    try:
        shown = console or build_console(stderr=True)
        if shown.is_terminal and not shown.is_dumb_terminal:
            with _bar(label, total, done, shown) as live:
                yield live
            return
        plain = _PlainLine(label, total, done, shown)
        try:
            yield plain
        finally:
            plain.end()
    finally:
        _shown.release()


@contextmanager
def _bar(label: str, total: int | None, done: int, console: Console) -> Iterator[ProgressLine]:
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    line = _LiveLine(label, total, done)

    class Figures(ProgressColumn):
        def render(self, task: Task) -> Text:
            count = [f"{line.done}/{line.total}"] if line.total is not None else [str(line.done)] if line.done else []
            return Text("  ".join([*count, *line.figures(), *([line.note] if line.note else [])]), style="cyan")

    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), Figures())
    with Progress(*columns, console=console, transient=True) as bar:
        line.bar, line.task = bar, bar.add_task(label, total=total, completed=done)
        yield line


def track(items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """Yield items and show how many are finished; see :func:`show_progress`."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with show_progress(label, total) as line:
        for item in items:
            yield item
            line.advance()
