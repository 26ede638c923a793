"""Selection of the steps and workers of a run that are profiled."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rollcast import WorkerGroup, build_section
from rollcast.contracts.runtime import Runtime
from rollcast.contracts.stage import roles
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.errors import ConfigError, RollcastError
from rollcast_automap.profiling.contract import BaseProfiler, ProfilerConfig, profilers
from rollcast_automap.profiling.on_workers import ProfilerSpec, check_process, start_profiler, stop_profiler
from rollcast_trainer.api import is_served, placed_as

__all__ = ["StepProfiler", "find_step_profiler"]

logger = logging.getLogger(__name__)


class StepProfiler:
    """A controller that starts and stops the profiler on the configured workers at the configured steps.

    If the profiler fails in a step, the failure is logged, the profiler is not started again, and the run continues.

    Args:
        config: the ``profiler`` section, an instance of its tool's schema; ``tool`` is set.
        run_dir: directory of the run.
        tool: profiler class of ``config.tool``.

    Raises:
        ConfigError: a value is not valid; names the key.
    """

    def __init__(self, config: ProfilerConfig, run_dir: Path, tool: type[BaseProfiler]) -> None:
        self.config = config
        self._tool = tool
        _check(config)
        tool.check_config(config)
        folder = Path(config.save_path) if config.save_path else run_dir / "profiles"
        self._folder = folder.resolve()
        self._last = dict(_windows(config.steps, config.profile_continuous_steps))
        self._groups: dict[str, WorkerGroup] = {}
        self._ends_at: int | None = None
        self._failed = False

    def equip(self, workers: MutableMapping[str, ClassWithInitArgs[Any]], runtime: Runtime) -> None:
        """Set the runtime environment that the tool needs on the worker classes.

        Args:
            workers: worker classes by role, changed in place; replicas of a rollout stay as they are.
            runtime: runtime that starts the workers.

        Raises:
            ConfigError: the tool needs a runtime environment, and the runtime has none.
        """
        if not self._tool.runtime_env(self.config, self._folder, len(self._last)):
            return
        if not runtime.capabilities.runtime_env:
            raise ConfigError(
                f"profiler.tool={self.config.tool} needs a runtime that starts processes in an environment of its own "
                f"(capability runtime_env), which {type(runtime).__name__} does not; choose another runtime, such as "
                "runtime=ray, or profiler=torch"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        wanted = self._tool.runtime_env(self.config, self._folder, len(self._last))
        for role, cls in workers.items():
            if self._concerns([role]):
                workers[role] = cls.with_options(runtime_env=wanted)

    def _concerns(self, roles: Sequence[str]) -> bool:
        wanted = set(self.config.roles)
        return any(not is_served(role) and (not wanted or placed_as(role) in wanted) for role in roles)

    # -- the run's events ---------------------------------------------------------------------

    def on_fit_start(self, trainer: Any) -> None:
        """Check on the workers that the tool can record them.

        Raises:
            ConfigError: no worker has a role or rank of the config.
            CapabilityError: the tool cannot record a worker.
        """
        members: dict[str, list[str]] = {}
        for role, group in trainer.run.groups.items():
            members.setdefault(group.name, []).append(role)
        by_name = {group.name: group for role, group in trainer.run.groups.items() if not is_served(role)}
        self._groups = {name: group for name, group in by_name.items() if self._concerns(members[name])}
        if not self._groups:
            raise ConfigError(
                f"profiler.roles={list(self.config.roles)}: no workers of this run play one of them; its roles: "
                f"{', '.join(sorted(placed_as(role) for role in trainer.run.groups if not is_served(role)))}"
            )
        most = max(group.world_size for group in self._groups.values())
        if not self.config.all_ranks and min(self.config.ranks) >= most:
            raise ConfigError(f"profiler.ranks={list(self.config.ranks)}, but the largest pool has {most} processes")
        for group in self._groups.values():
            group.execute_func(check_process, self._spec())
        if min(self._last) > trainer.total_steps or max(self._last.values()) <= trainer.step:
            logger.warning(
                "profiler.steps=%s: none of them is left in this run, which goes from step %d to %d",
                list(self.config.steps),
                trainer.step + 1,
                trainer.total_steps,
            )

    def on_step_start(self, step: int) -> None:
        """Start the profiler if a capture begins with this step."""
        if step not in self._last or self._failed or self._ends_at is not None:
            return
        end = self._last[step]
        name = f"step_{step}" if end == step else f"steps_{step}-{end}"
        failures: list[str] = []
        for pool, group in self._groups.items():
            failures += filter(None, group.execute_func(start_profiler, self._spec(), f"{name}-{pool}"))
        self._ends_at = end
        self._report(failures)

    def on_step_end(self, step: int) -> None:
        """Stop the profiler if a capture ends with this step."""
        if self._ends_at is not None and step >= self._ends_at:
            self._stop()

    def on_fit_end(self, error: BaseException | None) -> None:
        """Stop the profiler if the run ends during a capture."""
        if self._ends_at is None:
            return
        try:
            self._stop()
        except RollcastError as failure:
            if error is None:
                raise
            logger.warning("the profile of the step that failed is lost: %s", failure)  # its worker died

    def _stop(self) -> None:
        self._ends_at = None
        files: list[str] = []
        failures: list[str] = []
        for group in self._groups.values():
            for written, failure in group.execute_func(stop_profiler):
                files += written
                failures += [failure] if failure else []
        for file in files:
            logger.info("profile: %s", file)
        self._report(failures)

    def _report(self, failures: Sequence[str]) -> None:
        if failures:
            self._failed = True
            more = f"; and {len(failures) - 1} more" if len(failures) > 1 else ""
            logger.warning("profiler.tool=%s failed and is given up: %s%s", self.config.tool, failures[0], more)

    def _spec(self) -> ProfilerSpec:
        ranks = None if self.config.all_ranks else tuple(self.config.ranks)
        return ProfilerSpec(str(self.config.tool), self.config, str(self._folder), ranks)


def find_step_profiler(config: DictConfig, run_dir: Path) -> StepProfiler | None:
    """Return the step profiler of the run's ``profiler`` section; None if the section names no tool.

    Raises:
        ConfigError: a value is not valid; names the key.
        PluginError: the tool does not exist or does not load.
    """
    section = OmegaConf.select(config, "profiler")
    name = build_section(ProfilerConfig, section or {}, "profiler").tool
    if name is None:
        return None
    tool = profilers.get(name, requested_by="profiler.tool")
    return StepProfiler(build_section(tool.config_schema, section, "profiler"), run_dir, tool)


def _windows(steps: Sequence[int], joined: bool) -> list[tuple[int, int]]:
    """Return the first and last step of each capture."""
    windows: list[tuple[int, int]] = []
    for step in sorted(set(steps)):
        if joined and windows and windows[-1][1] == step - 1:
            windows[-1] = windows[-1][0], step
        else:
            windows.append((step, step))
    return windows


def _check(config: ProfilerConfig) -> None:
    if not config.steps:
        raise ConfigError(f"profiler.tool={config.tool}, but profiler.steps is empty; give steps, such as [3,4]")
    if min(config.steps) < 1:
        raise ConfigError(f"profiler.steps is {list(config.steps)}; steps count from 1")
    if not config.all_ranks and (not config.ranks or min(config.ranks) < 0):
        raise ConfigError(f"profiler.ranks is {list(config.ranks)}; give ranks from 0, or profiler.all_ranks=true")
    known = sorted(roles.names())
    unknown = sorted(set(config.roles) - set(known))
    if unknown:
        raise ConfigError(f"profiler.roles names {', '.join(unknown)}; roles: {', '.join(known)}")
