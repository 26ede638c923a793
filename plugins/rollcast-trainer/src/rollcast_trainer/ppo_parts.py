"""What trainer ``ppo`` is put together from, and what it refuses before anything is started."""

from __future__ import annotations

from typing import Any

from rollcast.contracts.algorithm import (
    Needs,
    kl_penalties,
    loss_aggregations,
    needs_vocabulary,
    policy_losses,
)
from rollcast.errors import CapabilityError, ConfigError
from rollcast_algorithms.losses import PpoLoss, make_ppo_loss
from rollcast_algorithms.schemas import AlgorithmConfig
from rollcast_trainer.batching import BatchAlgebra
from rollcast_trainer.parallel import data_parallel_size, pass_tokens
from rollcast_trainer.roles import Role
from rollcast_trainer.schemas import PpoActorConfig
from rollcast_trainer.task_runner import TaskRunner

__all__ = ["build_algebra", "build_loss", "check_needs", "check_offload", "find_vocabulary_kl"]


def build_algebra(task: TaskRunner, policy: PpoActorConfig) -> BatchAlgebra:
    """The sizes of a step.

    Raises:
        ConfigError: they do not fit; with the nearest that do.
    """
    algebra = BatchAlgebra(
        task.data.train_batch_size,
        task.rollout.n,
        policy.ppo_mini_batch_size,
        policy.ppo_epochs,
        data_parallel_size(task.engine, task.world_size),
        policy.ppo_micro_batch_size_per_gpu,
        pass_tokens(policy, task.engine),
    )
    algebra.check()
    return algebra


def check_needs(task: TaskRunner, algorithm: AlgorithmConfig, needs: Needs, samples: int) -> None:
    """Refuse an estimator that the engine or the samples of a prompt cannot serve.

    Raises:
        CapabilityError, ConfigError: says what is missing.
    """
    name, capabilities = algorithm.adv_estimator, task.engine_class.capabilities
    for need, what in (("values", "value_model"), ("sum_pi_squared", "sum_pi_squared")):
        if need in needs.columns and not getattr(capabilities, what):
            raise CapabilityError(
                f"algorithm.adv_estimator={name} needs {need}, which actor.engine.name={task.engine.name} cannot give"
            )
    if needs.compares_samples and samples < 2:
        raise ConfigError(
            f"algorithm.adv_estimator={name} compares the samples of a prompt with each other, "
            f"but rollout.n is {samples}; set rollout.n to 2 or more"
        )


def find_vocabulary_kl(task: TaskRunner, policy: PpoActorConfig) -> str | None:
    """The name of the KL penalty in the loss, if it is one of the whole vocabulary, which the engine calculates.

    Raises:
        CapabilityError: the engine cannot.
        ConfigError: the reference is not where the actor is.
    """
    name = policy.kl_loss_type
    if not policy.use_kl_loss or not needs_vocabulary(kl_penalties.get(name)):
        return None
    if not task.engine_class.capabilities.vocabulary_kl:
        raise CapabilityError(
            f"actor.kl_loss_type={name} needs the policy's and the reference's log-probs of the whole vocabulary, "
            f"which actor.engine.name={task.engine.name} does not compare; choose a penalty of the sampled tokens, "
            "such as k3, or an engine that does, such as fsdp"
        )
    if task.has_own_pool(Role.REF):
        raise ConfigError(
            f"actor.kl_loss_type={name} compares policy and reference in one process, but placement.mapping.ref is "
            f"{task.pools.mapping[Role.REF]!r}, where the actor is not; take ref out of placement.mapping, or choose a "
            "penalty of the sampled tokens, such as k3"
        )
    return name


def check_offload(task: TaskRunner, ref: Any) -> None:
    """Refuse to offload the reference of an engine that cannot.

    Args:
        task: The run.
        ref: The section ``ref.engine``.

    Raises:
        CapabilityError: The engine's name.
    """
    if getattr(ref, "param_offload", False) and not task.engine_class.capabilities.offload:
        raise CapabilityError(
            f"ref.engine.param_offload is true, but actor.engine.name={task.engine.name} cannot move its weights"
        )


def build_loss(policy: PpoActorConfig, use_rollout_is_weights: bool) -> PpoLoss:
    """What the update minimises."""
    return make_ppo_loss(
        policy_losses.get(policy.policy_loss),
        loss_aggregations.get(policy.loss_agg_mode),
        clip_ratio_low=policy.clip_ratio_low,
        clip_ratio_high=policy.clip_ratio_high,
        clip_ratio_c=policy.clip_ratio_c,
        entropy_coeff=policy.entropy_coeff,
        kl_penalty=kl_penalties.get(policy.kl_loss_type) if policy.use_kl_loss else None,
        kl_loss_coef=policy.kl_loss_coef if policy.use_kl_loss else 0.0,
        options=policy.policy_loss_kwargs,
        use_rollout_is_weights=use_rollout_is_weights,
    )
