"""The contract of profilers: a tool that looks into one worker's process for some training steps.

Which steps, ranks and roles are looked at is the trainer's affair; a tool starts, stops, and writes its
files.

Example::

    class WallClock(BaseProfiler):
        config_schema = ProfilerConfig

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rollcast.plugins import Registry, subclass_of

__all__ = ["BaseProfiler", "ProfilerConfig", "profilers"]


@dataclass
class ProfilerConfig:
    """The keys of every ``profiler`` section: which steps, on which workers. Names are verl's where it has one.

    Attributes:
        tool: registry name of the profiler; empty for none.
        steps: training steps to look at.
        profile_continuous_steps: steps that follow each other make one file; otherwise each has its own.
        ranks: of the processes of each pool.
        all_ranks: all of them instead.
        roles: only pools in which one of these roles lives; empty for all.
        save_path: folder of the files; empty for ``RUN_DIR/profiles``.
    """

    tool: str | None = None
    steps: list[int] = field(default_factory=list)
    profile_continuous_steps: bool = False
    ranks: list[int] = field(default_factory=lambda: [0])
    all_ranks: bool = False
    roles: list[str] = field(default_factory=list)
    save_path: str | None = None


class BaseProfiler(ABC):
    """A tool in the process of a worker.

    Args:
        config: the config's ``profiler`` section, an instance of ``config_schema``.
        folder: where its files go; exists.
    """

    #: Dataclass of the ``profiler`` section, derived from ``ProfilerConfig``; importable without torch.
    config_schema: ClassVar[type[ProfilerConfig]] = ProfilerConfig

    def __init__(self, config: Any, folder: Path) -> None:
        self.config = config
        self.folder = folder

    @classmethod
    def check_config(cls, config: Any) -> None:  # noqa: ARG003  # for those that override it
        """Refuse values that the tool does not know; called before anything is started.

        Raises:
            ConfigError: names the key and what is valid.
        """
        return

    @classmethod
    def runtime_env(cls, config: Any, folder: Path, captures: int) -> dict[str, Any]:  # noqa: ARG003
        """Ray's runtime environment of the processes that are to be looked at; empty if none is needed.

        Args:
            config: an instance of ``config_schema``.
            folder: where the tool's files are to go; exists, on the driver's machine.
            captures: how often :meth:`start` is going to be called in the run.
        """
        return {}

    def check_process(self) -> None:
        """Refuse a process that the tool cannot look into; called in it, before the first step.

        Raises:
            CapabilityError: says what is missing.
        """
        return

    @abstractmethod
    def start(self, name: str) -> None:
        """Look from now on.

        Args:
            name: of what is looked at, such as ``step_3-critic-rank_0``; no file of the folder has it yet.
        """

    @abstractmethod
    def stop(self) -> list[Path]:
        """Look no more, and write down what was seen; gives the files."""


profilers: Registry[type[BaseProfiler]] = Registry(
    "rollcast.profilers",
    subclass_of(BaseProfiler),
    "profiler.tool",
    description="tools that look into the processes of workers for some steps",
)
