"""Worker classes, stages and the trainers ``ppo`` and ``sft``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcast import lazy_exports

if TYPE_CHECKING:
    from rollcast_trainer.loop import LoopTrainer as LoopTrainer
    from rollcast_trainer.ppo import PpoTrainer as PpoTrainer
    from rollcast_trainer.run.task_runner import TaskRunner as TaskRunner
    from rollcast_trainer.run.training_run import TrainingRun as TrainingRun
    from rollcast_trainer.sft.trainer import SftTrainer as SftTrainer
    from rollcast_trainer.workers.actor import ActorRolloutRefWorker as ActorRolloutRefWorker
    from rollcast_trainer.workers.roles import Role as Role
    from rollcast_trainer.workers.training import TrainingWorker as TrainingWorker

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "loop": ["LoopTrainer"],
        "ppo": ["PpoTrainer"],
        "run.task_runner": ["TaskRunner"],
        "run.training_run": ["TrainingRun"],
        "sft.trainer": ["SftTrainer"],
        "workers.actor": ["ActorRolloutRefWorker"],
        "workers.roles": ["Role"],
        "workers.training": ["TrainingWorker"],
    },
)
