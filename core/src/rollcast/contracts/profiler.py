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

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rollcast.plugins import Registry, subclass_of

__all__ = [
    "BaseProfiler",
    "MarkListener",
    "ProfilerConfig",
    "add_listener",
    "mark",
    "profilers",
    "remove_listener",
]


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
        """The runtime environment of the processes that are to be looked at; empty if none is needed.

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


#: Called with a block's name; the result is entered around the block.
MarkListener = Callable[[str], AbstractContextManager[None]]
_listeners: list[MarkListener] = []


def add_listener(listener: MarkListener) -> None:
    """Call ``listener`` for every marked block of this process from now on."""
    _listeners.append(listener)


def remove_listener(listener: MarkListener) -> None:
    """Stop calling a listener; nothing if it was not added."""
    if listener in _listeners:
        _listeners.remove(listener)


@contextmanager
def mark(name: str) -> Iterator[None]:
    """Name a block in the traces of a torch profiler, and as an NVTX range where CUDA is in use.

    Example::

        with mark("advantage"):
            ...

    Without a profiler it costs a microsecond or two.
    """
    torch = sys.modules.get("torch")  # a process that has not imported it has nothing to profile
    if torch is None or not hasattr(torch, "autograd"):
        yield
        return
    with ExitStack() as marks:
        for listener in _listeners:
            marks.enter_context(listener(name))
        # A record_function costs ten times as much as this look at torch's own flag.
        if getattr(torch.autograd.profiler, "_is_profiler_enabled", True):
            marks.enter_context(torch.autograd.profiler.record_function(name))
        if torch.cuda.is_initialized():
            torch.cuda.nvtx.range_push(name)
            marks.callback(torch.cuda.nvtx.range_pop)
        yield
