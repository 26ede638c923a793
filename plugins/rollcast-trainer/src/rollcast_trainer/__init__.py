"""Worker classes and the trainers ``ppo`` and ``sft``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcast import lazy_exports

if TYPE_CHECKING:
    from rollcast_trainer.ppo import PpoTrainer as PpoTrainer
    from rollcast_trainer.ppo import StepState as StepState
    from rollcast_trainer.roles import Role as Role
    from rollcast_trainer.sft import SftTrainer as SftTrainer
    from rollcast_trainer.task_runner import TaskRunner as TaskRunner
    from rollcast_trainer.workers import ActorRolloutRefWorker as ActorRolloutRefWorker
    from rollcast_trainer.workers import TrainingWorker as TrainingWorker

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "ppo": ["PpoTrainer", "StepState"],
        "roles": ["Role"],
        "sft": ["SftTrainer"],
        "task_runner": ["TaskRunner"],
        "workers": ["ActorRolloutRefWorker", "TrainingWorker"],
    },
)
