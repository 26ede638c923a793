"""The declared surface of rollcast-trainer: what stages, trainers and commands of other packages may import.

Everything else of the package is private.
"""

from __future__ import annotations

from rollcast_trainer.batch.columns import GENERATED, PROMPT
from rollcast_trainer.batch.mini_batches import UpdatePlan
from rollcast_trainer.batch.sizes import BatchAlgebra, ParallelSizes, data_parallel_size
from rollcast_trainer.loop import LoopTrainer
from rollcast_trainer.ppo import PpoTrainer
from rollcast_trainer.run.background_rollouts import (
    BackgroundRollouts,
    PromptGroup,
    age_metrics,
    numbered,
    refuse_without_replicas,
)
from rollcast_trainer.run.data import build_dataset, train_batches, val_batches
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import RunSettings, StagedTrainer, check_run
from rollcast_trainer.run.setups import ModelNeeds, RoleSetup, TrainingStage, list_workers
from rollcast_trainer.run.supply import Place
from rollcast_trainer.schemas import (
    ActorConfig,
    CriticConfig,
    PpoActorConfig,
    PpoConfig,
    PpoTrainerConfig,
    RefConfig,
    RewardModelConfig,
    RunConfig,
    SftConfig,
    TrainerConfig,
)
from rollcast_trainer.sft.trainer import SftTrainer, UpdateSupervised
from rollcast_trainer.stages.policy_gap import rollout_log_probs_serve, routes_of
from rollcast_trainer.stages.update_actor import find_vocabulary_kl, may_skip_rows
from rollcast_trainer.workers.actor import ActorRolloutRefWorker
from rollcast_trainer.workers.critic import CriticWorker
from rollcast_trainer.workers.meter import Meter
from rollcast_trainer.workers.reference import RefWorker
from rollcast_trainer.workers.reward_model import RewardModelWorker
from rollcast_trainer.workers.roles import Role, is_served, placed_as
from rollcast_trainer.workers.training import ModelWorker, TrainingWorker, WorkerSetup

__all__ = [
    "GENERATED",
    "PROMPT",
    "ActorConfig",
    "ActorRolloutRefWorker",
    "BackgroundRollouts",
    "BatchAlgebra",
    "CriticConfig",
    "CriticWorker",
    "LoopTrainer",
    "Meter",
    "ModelNeeds",
    "ModelWorker",
    "ParallelSizes",
    "Place",
    "PpoActorConfig",
    "PpoConfig",
    "PpoTrainer",
    "PpoTrainerConfig",
    "PromptGroup",
    "RefConfig",
    "RefWorker",
    "RewardModelConfig",
    "RewardModelWorker",
    "Role",
    "RoleSetup",
    "Run",
    "RunConfig",
    "RunSettings",
    "SftConfig",
    "SftTrainer",
    "StagedTrainer",
    "TrainerConfig",
    "TrainingStage",
    "TrainingWorker",
    "UpdatePlan",
    "UpdateSupervised",
    "WorkerSetup",
    "age_metrics",
    "build_dataset",
    "check_run",
    "data_parallel_size",
    "find_vocabulary_kl",
    "is_served",
    "list_workers",
    "may_skip_rows",
    "numbered",
    "placed_as",
    "refuse_without_replicas",
    "rollout_log_probs_serve",
    "routes_of",
    "train_batches",
    "val_batches",
]
