"""The profiler's side in the process of a worker; sent there as functions."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rollcast import Worker
from rollcast_profiling.contract import BaseProfiler, ProfilerConfig, profilers

__all__ = ["ProfilerSpec", "check_process", "start_profiler", "stop_profiler"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProfilerSpec:
    """What a process is to be looked at with.

    Attributes:
        tool: registry name.
        config: an instance of its ``config_schema``.
        folder: where files go; seen by all nodes.
        ranks: of the group; None for all.
    """

    tool: str
    config: ProfilerConfig
    folder: str
    ranks: Collection[int] | None

    def concerns(self, worker: Worker) -> bool:
        """Whether a worker's process is to be looked at."""
        return self.ranks is None or worker.rank in self.ranks

    def build(self) -> BaseProfiler:
        """The tool, and its folder."""
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        return profilers.get(self.tool, requested_by="profiler.tool")(self.config, folder)


#: The profiler that looks at this process at present.
_running: BaseProfiler | None = None


def check_process(worker: Worker, spec: ProfilerSpec) -> None:
    """See :meth:`BaseProfiler.check_process`.

    Raises:
        CapabilityError: the tool cannot look into this process.
    """
    if spec.concerns(worker):
        spec.build().check_process()


def start_profiler(worker: Worker, spec: ProfilerSpec, name: str) -> str | None:
    """Look at this process from now on.

    Args:
        worker: of the process.
        spec: with what.
        name: of the steps and the pool.

    Returns:
        Why it cannot be looked at; None if it is, or is not to be. A profiler that fails must not end a run.
    """
    global _running  # noqa: PLW0603  # one for the process, as torch's is
    if not spec.concerns(worker) or _running is not None:
        return None
    try:
        profiler = spec.build()
        profiler.start(f"{name}-rank_{worker.rank}")
    except Exception as error:  # noqa: BLE001  # whatever the tool raises is told to the driver
        return f"rank {worker.rank}: {type(error).__name__}: {error}"
    _running = profiler
    return None


def stop_profiler(worker: Worker) -> tuple[list[str], str | None]:
    """Look no more.

    Returns:
        The files that were written, and why there are none if that failed.
    """
    global _running
    if _running is None:
        return [], None
    profiler, _running = _running, None
    try:
        return [str(file) for file in profiler.stop()], None
    except Exception as error:  # noqa: BLE001
        return [], f"rank {worker.rank}: {type(error).__name__}: {error}"
