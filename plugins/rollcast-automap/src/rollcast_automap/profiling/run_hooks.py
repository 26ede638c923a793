"""Hooks of a run: the step meter in every run, and the profiler that its config names."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rollcast.contracts.hooks import hookimpl
from rollcast.contracts.runtime import Runtime
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast_automap.profiling.memory_watch import stop_watch
from rollcast_automap.profiling.meter import StepMeter
from rollcast_automap.profiling.stepper import StepProfiler, find_step_profiler
from rollcast_trainer.api import LoopTrainer

__all__ = ["RunProfiling"]


class RunProfiling:
    """Listener that meters each step of a trainer of rollcast-trainer and runs the config's profiler."""

    def __init__(self) -> None:
        self._profiler: StepProfiler | None = None

    @hookimpl
    def on_configure(self, config: DictConfig) -> None:
        """Read the section ``profiler``.

        Raises:
            ConfigError: a value is not valid; names the key.
        """
        self._profiler = find_step_profiler(config, Path(config.run_dir))

    @hookimpl
    def on_start_workers(self, workers: MutableMapping[str, ClassWithInitArgs[Any]], runtime: Runtime) -> None:
        """Have the runtime start processes as the profiler needs them."""
        if self._profiler is not None:
            self._profiler.equip(workers, runtime)

    @hookimpl
    def on_fit_start(self, trainer: Any) -> None:
        """Meter the trainer's worker calls, and check the profiler on the workers."""
        if isinstance(trainer, LoopTrainer):
            run = trainer.run
            run.meter = StepMeter(run.groups, run.model_paths, run.settings.model.trust_remote_code)
        if self._profiler is None:
            return
        try:
            self._profiler.on_fit_start(trainer)
        except BaseException:
            stop_watch()  # a run that fails to start never calls on_fit_end
            raise

    @hookimpl
    def on_step_start(self, step: int) -> None:
        """Start the profiler if a capture begins with this step."""
        if self._profiler is not None:
            self._profiler.on_step_start(step)

    @hookimpl
    def on_step_end(self, step: int) -> None:
        """Stop the profiler if a capture ends with this step."""
        if self._profiler is not None:
            self._profiler.on_step_end(step)

    @hookimpl
    def on_fit_end(self, error: BaseException | None) -> None:
        """Stop the profiler and the memory watch of workers in this process (runtime ``local``)."""
        try:
            if self._profiler is not None:
                self._profiler.on_fit_end(error)
        finally:
            stop_watch()
