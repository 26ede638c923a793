"""The stage that moves the reference policy towards the policy in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rollcast.contracts.stage import StageSpec
from rollcast.errors import CapabilityError, ConfigError
from rollcast.protocol import DataProto
from rollcast_algorithms.schemas import AlgorithmConfig
from rollcast_trainer.run.settings import RunSettings
from rollcast_trainer.run.setups import ModelNeeds, TrainingStage
from rollcast_trainer.schemas import RefConfig
from rollcast_trainer.workers.roles import Role

__all__ = ["SyncReference"]


class SyncReference(TrainingStage):
    """Stage that mixes the policy into the reference after every ``ref.ref_model_sync_steps`` steps.

    ::

        π_ref ← m · π + (1 - m) · π_ref    of the weights, with m = ref.ref_model_mixup_alpha

    Source: Gorbatovski et al. 2024, Learn Your Reference Model for Real Good Alignment, arXiv:2404.09656 (TR-DPO).
    """

    phase: ClassVar[str] = "sync_reference"

    @classmethod
    def declare(cls, settings: RunSettings) -> StageSpec | None:
        if not settings.section("ref", RefConfig).sync_ref_model:
            return None
        _check(settings)
        return StageSpec(roles=(Role.ACTOR_ROLLOUT, Role.REF), after=("update_actor",))

    def needs(self) -> Sequence[ModelNeeds]:
        return [ModelNeeds(Role.REF, moves=True)]

    def __call__(self, batch: DataProto) -> DataProto:
        config: RefConfig = self.run.section("ref", RefConfig)
        is_due = self.run.step % config.ref_model_sync_steps == 0
        if is_due:
            self.run.workers(Role.ACTOR_ROLLOUT).mix_reference(config.ref_model_mixup_alpha)
        self.run.record({"actor/reference_moved": float(is_due)})
        return batch


def _check(settings: RunSettings) -> None:
    """Check that the reference is a copy of the model beside the actor, which the engine can move.

    Raises:
        ConfigError: no KL uses the reference, it is elsewhere, or the actor trains an adapter.
        CapabilityError: the engine cannot mix weights.
    """
    key = "ref.sync_ref_model is true, which moves the reference's weights towards the policy's"
    algorithm: AlgorithmConfig = settings.section("algorithm", AlgorithmConfig)
    if not settings.actor.use_kl_loss and not algorithm.use_kl_in_reward:
        raise ConfigError(
            f"{key}, but nothing reads the reference; set actor.use_kl_loss=true or algorithm.use_kl_in_reward=true"
        )
    if settings.model.trains_adapter:
        raise ConfigError(
            f"{key}, but with model.lora_rank={settings.model.lora_rank} the reference is the model without its "
            "adapter; train the whole model, or set ref.sync_ref_model=false"
        )
    if settings.has_own_pool(Role.REF) or settings.role_engine("ref") != settings.engine:
        raise ConfigError(
            f"{key} in one process, but the reference has a pool or an engine of its own; remove ref from "
            "placement.mapping and from the keys ref.engine.*, except param_offload"
        )
    if not settings.engine_class.capabilities.weight_mixing:
        raise CapabilityError(
            f"{key}, but actor.engine.name={settings.engine.name} cannot mix weights (capabilities.weight_mixing); use "
            "engine=fsdp, or set ref.sync_ref_model=false"
        )
