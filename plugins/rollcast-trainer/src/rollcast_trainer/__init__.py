"""Worker classes and the trainers ``ppo`` and ``sft``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollcast_trainer.ppo import PpoTrainer, StepState
    from rollcast_trainer.roles import Role
    from rollcast_trainer.sft import SftTrainer
    from rollcast_trainer.task_runner import TaskRunner
    from rollcast_trainer.workers import ActorRolloutRefWorker, TrainingWorker

__all__ = ["ActorRolloutRefWorker", "PpoTrainer", "Role", "SftTrainer", "StepState", "TaskRunner", "TrainingWorker"]

_EXPORTS = {
    "ActorRolloutRefWorker": "workers",
    "PpoTrainer": "ppo",
    "Role": "roles",
    "SftTrainer": "sft",
    "StepState": "ppo",
    "TaskRunner": "task_runner",
    "TrainingWorker": "workers",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"rollcast_trainer.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
