"""The runtime and the worker groups of a run; they outlive an attempt that loses processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from rollcast import WorkerGroup, start_groups
from rollcast.contracts.command import show_progress
from rollcast.contracts.device import hide_accelerators
from rollcast.contracts.runtime import Runtime
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.errors import ResourceError
from rollcast_rewards.reward_worker import RewardWorker, RewardWorkerSetup
from rollcast_rewards.scoring import RewardSetup
from rollcast_trainer.recording import CallRecorder
from rollcast_trainer.run.settings import RunSettings
from rollcast_trainer.workers.roles import Role, role_trains

__all__ = ["RunGroups", "build_runtime"]

logger = logging.getLogger(__name__)


def build_runtime(settings: RunSettings) -> Runtime:
    """Return the runtime of a run, started."""
    config = settings.runtime
    runtime = settings.runtime_class.from_config(config, processes=settings.processes, run_dir=settings.run_dir)
    if config.record is not None:
        runtime.recorder = CallRecorder(config.record, settings.run_dir / "records")
    return runtime


class RunGroups:
    """The worker groups of a run, by role.

    Args:
        runtime: runtime that hosts them.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.by_role: dict[str, WorkerGroup] = {}
        self._with_model: set[str] = set()

    def start(
        self, settings: RunSettings, workers: Mapping[str, ClassWithInitArgs[Any]], on_restart: Callable[[], None]
    ) -> dict[str, WorkerGroup]:
        """Start a group in each pool and build the models; roles of one pool share its processes.

        Groups that exist are restarted.

        Args:
            settings: settings of the run.
            workers: worker classes of the roles that stages call.
            on_restart: called when the processes of the previous attempt have ended.

        Raises:
            ResourceError: a pool cannot be placed.
            WorkerError: a worker or model cannot be built.
        """
        chosen = dict(workers)
        with show_progress("starting workers"):
            fresh = self._restart(chosen, on_restart) if self.by_role else None
            if fresh is None:
                fresh = self._start(settings, chosen)
        self._with_model -= fresh
        waiting = [
            role
            for role, worker in chosen.items()
            if role not in self._with_model and hasattr(worker.cls, "init_model")
        ]
        with show_progress("loading models", len(waiting)) as line:
            for role in waiting:
                line.update(note=role)
                self.by_role[role].init_model()
                self._with_model.add(role)
                line.advance()
        return dict(self.by_role)

    def _start(self, settings: RunSettings, chosen: dict[str, ClassWithInitArgs[Any]]) -> set[str]:
        """Start all groups, and return their roles."""
        settings.hooks.hook.on_start_workers(workers=chosen, runtime=self.runtime)
        workers = {**chosen, **_served_workers(settings)}
        copies = settings.copies.planned
        everyone: dict[Hashable, ClassWithInitArgs[Any]] = {
            role: worker.with_options(copies=copies) for role, worker in workers.items()
        }
        groups = start_groups(
            settings.pools,
            everyone,
            runtime=self.runtime,
            timeout=settings.runtime.call_timeout_s,
            launch_timeout=settings.runtime.launch_timeout_s,
            env=hide_accelerators() if settings.placement.device == "cpu" else None,
            threads=settings.runtime.threads_per_worker,
        )
        self.by_role = {str(role): group for role, group in groups.items()}
        return set(self.by_role)

    def _restart(self, chosen: Mapping[str, ClassWithInitArgs[Any]], on_restart: Callable[[], None]) -> set[str] | None:
        """Restart groups after a run has lost processes; return the roles whose processes are new.

        Groups that are alive and hold only frozen models are kept. Trained models go back to the checkpoint, and
        replicas may hold half an update, so their groups are restarted too.

        Returns:
            None if a group cannot be placed where it was; all groups are then shut down.
        """
        fresh: set[str] = set()
        views = {group.name: group for group in self.by_role.values()}
        try:
            for name, group in views.items():
                roles = {role for role, view in self.by_role.items() if view.name == name}
                is_frozen = all(
                    role in (Role.JUDGE, Role.REWARD) or (role in chosen and not role_trains(role)) for role in roles
                )
                if not is_frozen or group.lost_ranks or group.poisoned:
                    group.restart()
                    fresh |= roles
        except ResourceError as error:
            logger.warning("the workers cannot be restarted in place and are placed again: %s", error)
            for group in views.values():
                group.shutdown()
            self.by_role = {}
            return None
        on_restart()
        return fresh

    def close(self) -> None:
        """Stop the runtime and with it all workers; warn if a record of worker calls is empty."""
        self.runtime.shutdown()
        recorder = self.runtime.recorder
        if isinstance(recorder, CallRecorder) and recorder.recorded is None:
            calls = recorder.describe_calls()
            logger.warning("runtime.record=%s recorded nothing; calls that were made: %s", recorder.wanted, calls)


def _served_workers(settings: RunSettings) -> dict[str, ClassWithInitArgs[Any]]:
    """Return the workers of the roles that no stage's worker class plays: replicas, rewards and the judge."""
    logs, device = str((settings.run_dir / "logs").resolve()), settings.placement.device
    model, seed = settings.model, settings.trainer.seed
    workers: dict[str, ClassWithInitArgs[Any]] = {}
    if settings.starts_replicas:
        workers[Role.ROLLOUT] = settings.served.worker(settings.served_model, seed, device, logs)
    if settings.has_reward_workers:
        setup = RewardSetup.of(settings.reward, settings.data.max_response_length)
        reward = RewardWorkerSetup(setup, model.path, model.trust_remote_code)
        workers[Role.REWARD] = ClassWithInitArgs(RewardWorker, reward)
    if settings.judge is not None:
        workers[Role.JUDGE] = settings.judge.worker(seed, device, logs)
    return workers
