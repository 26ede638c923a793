"""Functions that run in the process of a worker to start and stop the profiler."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rollcast import Worker
from rollcast_automap.profiling.contract import BaseProfiler, ProfilerConfig, profilers

__all__ = ["ProfilerSpec", "check_process", "start_profiler", "stop_profiler"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProfilerSpec:
    """The profiler to run in a process, and the processes to record.

    Attributes:
        tool: registry name of the profiler.
        config: instance of the profiler's ``config_schema``.
        folder: output folder, visible on all nodes.
        ranks: ranks of the group to record; None for all.
    """

    tool: str
    config: ProfilerConfig
    folder: str
    ranks: Collection[int] | None

    def concerns(self, worker: Worker) -> bool:
        """True if the process of ``worker`` is to be recorded."""
        return self.ranks is None or worker.rank in self.ranks

    def build(self) -> BaseProfiler:
        """Create the output folder and return a new profiler."""
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        return profilers.get(self.tool, requested_by="profiler.tool")(self.config, folder)


#: The profiler that currently records this process.
_running: BaseProfiler | None = None


def check_process(worker: Worker, spec: ProfilerSpec) -> None:
    """Check that the tool can record this process; see :meth:`BaseProfiler.check_process`.

    Raises:
        CapabilityError: the tool cannot record this process.
    """
    if spec.concerns(worker):
        spec.build().check_process()


def start_profiler(worker: Worker, spec: ProfilerSpec, name: str) -> str | None:
    """Start to record this process if the spec includes it and no profiler runs yet.

    Args:
        worker: worker in this process.
        spec: profiler to start, and the ranks to record.
        name: name of the steps and the pool, for the file.

    Returns:
        The reason for a failure, else None. A failing profiler must not end a run, so nothing is raised.
    """
    global _running  # noqa: PLW0603  # one profiler per process, as in torch
    if not spec.concerns(worker) or _running is not None:
        return None
    try:
        profiler = spec.build()
        profiler.start(f"{name}-rank_{worker.rank}")
    except Exception as error:  # noqa: BLE001  # any error of the tool is reported to the driver
        return f"rank {worker.rank}: {type(error).__name__}: {error}"
    _running = profiler
    return None


def stop_profiler(worker: Worker) -> tuple[list[str], str | None]:
    """Stop the profiler of this process.

    Returns:
        The files that were written, and the reason for a failure, else None.
    """
    global _running
    if _running is None:
        return [], None
    profiler, _running = _running, None
    try:
        return [str(file) for file in profiler.stop()], None
    except Exception as error:  # noqa: BLE001
        return [], f"rank {worker.rank}: {type(error).__name__}: {error}"
