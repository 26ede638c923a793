"""The command that resumes a run, as the run recorded the one that started it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rollcast.errors import DataError
from rollcast_report.run_data import Status

__all__ = ["check_resumable", "python_command", "resume_arguments", "resume_command"]

#: An override with which the command would set the run aside instead of resuming it.
_DISABLE = "trainer.resume_mode=disable"


def resume_arguments(status: Status) -> list[str]:
    """Return the arguments after ``rollcast`` that resume a run; empty if its command is not known.

    An override ``trainer.resume_mode=disable`` is left out: it would start the run anew.
    """
    return [
        argument for argument in status.command if argument.replace('"', "").replace("'", "").lstrip("+") != _DISABLE
    ]


def resume_command(status: Status, here: Path | None = None) -> str | None:
    """Return the command for a shell; None if it is not known.

    Args:
        status: status of the run.
        here: folder of the shell; the current one by default. From another folder the command changes to that of the
            run first, because paths in overrides may be relative.
    """
    arguments = resume_arguments(status)
    if not arguments:
        return None
    command = shlex.join(["rollcast", *arguments])
    is_here = not status.folder or Path(status.folder) == (here or Path.cwd())
    return command if is_here else f"cd {shlex.quote(status.folder)} && {command}"


def python_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line that runs ``rollcast`` with this Python."""
    return [sys.executable, "-m", "rollcast", *arguments]


def check_resumable(run_dir: Path, status: Status, state: str) -> None:
    """Raise if a run cannot be resumed.

    Raises:
        DataError: it is running or finished, or its command is not known.
    """
    if state == "running":
        raise DataError(f"{run_dir} is running (process {status.pid} on {status.host}); stop it before it is resumed")
    if state == "finished":
        raise DataError(
            f"{run_dir} is finished at step {status.step}; to train it longer, start its command with a larger "
            "trainer.total_steps"
        )
    if not resume_arguments(status):
        raise DataError(
            f"{run_dir}/status.json does not say which command started the run: it was started from Python, or on a "
            "cluster that was there before. Start it again in the same way with the same run_dir"
        )
