"""Contract of profilers, which record one worker's process for some training steps.

The run's hook selects steps, ranks and roles; a profiler starts, stops and writes its files. Example::

    class WallClock(BaseProfiler):
        def start(self, name):
            self._started = name, time.perf_counter()

        def stop(self):
            name, start = self._started
            file = self.folder / f"{name}.txt"
            file.write_text(f"{time.perf_counter() - start:.6f}")
            return [file]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar

from rollcast.contracts.config import LocalPath, config
from rollcast.plugins import Registry, subclass_of

__all__ = ["BaseProfiler", "ProfilerConfig", "profilers"]


@config
class ProfilerConfig:
    """Keys of every profiler: the steps and workers to record. Keys that verl also has use verl's names."""

    tool: str | None = None
    """Registry name of the profiler; null for none."""
    steps: list[int] = field(default_factory=list)
    """Training steps to profile, such as `[3,4]`."""
    profile_continuous_steps: bool = False
    """Write consecutive steps into one file; otherwise each step has its own."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks of each pool to profile."""
    all_ranks: bool = False
    """Profile all ranks instead."""
    roles: list[str] = field(default_factory=list)
    """Profile only pools with one of these roles; empty for all pools."""
    save_path: LocalPath | None = None
    """Folder of the files; null for `RUN_DIR/profiles`."""


class BaseProfiler(ABC):
    """A profiling tool in the process of a worker.

    Args:
        config: config's ``profiler`` section, an instance of ``config_schema``.
        folder: existing folder for the files.
    """

    #: Dataclass of the ``profiler`` section, derived from ``ProfilerConfig``; importable without torch.
    config_schema: ClassVar[type[ProfilerConfig]] = ProfilerConfig

    def __init__(self, config: Any, folder: Path) -> None:
        self.config = config
        self.folder = folder

    @classmethod
    def check_config(cls, config: Any) -> None:  # noqa: ARG003  # for subclasses
        """Check the tool's values before anything starts.

        Raises:
            ConfigError: names the key and the valid values.
        """
        return

    @classmethod
    def runtime_env(cls, config: Any, folder: Path, captures: int) -> dict[str, Any]:  # noqa: ARG003
        """Return the runtime environment of the recorded processes; empty if none is needed.

        Args:
            config: instance of ``config_schema``.
            folder: existing folder of the files, on the driver's machine.
            captures: number of calls of :meth:`start` in the run.
        """
        return {}

    def check_process(self) -> None:
        """Check that the tool can record this process, before the first step.

        Raises:
            CapabilityError: names what is missing.
        """
        return

    @abstractmethod
    def start(self, name: str) -> None:
        """Start recording.

        Args:
            name: unique name of the record, such as ``step_3-critic-rank_0``.
        """

    @abstractmethod
    def stop(self) -> list[Path]:
        """Stop recording, write the files and return them."""


profilers: Registry[type[BaseProfiler]] = Registry(
    "rollcast.profilers",
    subclass_of(BaseProfiler),
    "profiler.tool",
    description="tools that record the processes of workers during some steps",
)
