"""The stage that updates the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from rollcast.contracts.algorithm import (
    check_options,
    kl_penalties,
    loss_aggregations,
    needs_of,
    needs_vocabulary,
    policy_losses,
)
from rollcast.contracts.rollout import ROUTED_EXPERTS
from rollcast.contracts.stage import StageSpec
from rollcast.errors import CapabilityError, ConfigError
from rollcast.protocol import DataProto, Jagged
from rollcast_algorithms.entropy_controller import AdaptiveEntropyController
from rollcast_algorithms.losses import ENTROPY_COEFF, PpoLoss, make_ppo_loss
from rollcast_trainer.batch.balance import row_lengths, seqlen_metrics
from rollcast_trainer.batch.columns import MODEL, model_columns
from rollcast_trainer.batch.mini_batches import draw_mini_batches, without_advantage
from rollcast_trainer.batch.rollouts import ROLLOUT, rollouts_of
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import RunSettings
from rollcast_trainer.run.setups import ModelNeeds, TrainingStage
from rollcast_trainer.schemas import PpoActorConfig, RefConfig
from rollcast_trainer.stages.log_probs import check_offload, reference_needs
from rollcast_trainer.stages.policy_gap import KEPT, correction_columns, correction_of, routes_of
from rollcast_trainer.workers.actor import ActorRolloutRefWorker
from rollcast_trainer.workers.roles import Role

__all__ = ["UpdateActor", "build_loss", "find_vocabulary_kl", "needs_advantage"]


class UpdateActor(TrainingStage):
    """Stage that updates the policy on mini-batches of the rows, one optimizer step each.

    Attributes:
        loss_function: loss that the update minimises.
    """

    phase: ClassVar[str] = "update_actor"

    @classmethod
    def declare(cls, settings: RunSettings) -> StageSpec:
        policy: PpoActorConfig = settings.actor
        loss_type = policy_losses.get(policy.policy_loss)
        check_options(loss_type, policy.policy_loss_kwargs, "actor.policy_loss_kwargs")
        exact = find_vocabulary_kl(settings) is not None
        if exact:
            check_offload(settings)
        correction = correction_of(settings)
        loss = build_loss(policy, correction.rollout_is is not None)
        _check_weights(policy, loss, correction.rollout_is)
        needs = loss.needs
        columns = [name for name in sorted(needs.columns) if name != "advantages"]
        rejected = [KEPT] if KEPT in correction_columns(correction) else []
        routes = [ROUTED_EXPERTS] if routes_of(settings) else []
        return StageSpec(
            reads=("token_level_scores", *columns, *rejected, *routes, "advantages"),
            optional=(ROLLOUT, *sorted(needs.optional)),
            roles=(Role.ACTOR_ROLLOUT, *([Role.REF] if exact else [])),
            after=("update_critic", "log_prob_check"),
            brings=("sync_reference",) if settings.section("ref", RefConfig).sync_ref_model else (),
        )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        settings = run.settings
        self._policy: PpoActorConfig = settings.actor
        self.loss_function = build_loss(self._policy, correction_of(settings).rollout_is is not None)
        self._routes = [ROUTED_EXPERTS] if routes_of(settings) else []
        self._may_skip = may_skip_rows(settings, self.loss_function)
        self._entropy = build_entropy_controller(self._policy)

    def needs(self) -> Sequence[ModelNeeds]:
        policy, exact = self._policy, find_vocabulary_kl(self.run.settings)
        actor = ModelNeeds(
            Role.ACTOR_ROLLOUT,
            loss_function=self.loss_function,
            micro_batch_size=policy.log_prob_micro_batch_size_per_gpu,
            entropy=True,
            update_entropy=policy.entropy_coeff != 0 or policy.use_adaptive_entropy,
            vocabulary_kl=exact,
        )
        return [actor] if exact is None else [actor, reference_needs(self.run.settings)]

    def __call__(self, batch: DataProto) -> DataProto:
        run, policy = self.run, self._policy
        ranks = run.ranks_of(Role.ACTOR_ROLLOUT)
        if run.settings.trainer.balance_batch and ranks > 1:
            run.record(seqlen_metrics(row_lengths(batch), ranks))
        if Role.CRITIC in run.settings.roles and run.step <= run.settings.trainer.critic_warmup:
            return batch
        # Train only on tokens that the correction kept.
        extra = [KEPT] if KEPT in batch else []
        rows = batch.joined(batch.select(extra, []).rename(dict.fromkeys(extra, "response_mask")), overwrite=True)
        loss = self.loss_function
        prepared: dict[str, Any] = self._prepare(rows) if loss.prepares else {}
        if self._entropy is not None:
            prepared[ENTROPY_COEFF] = torch.full((len(rows),), self._entropy.weight)
        count = run.settings.data.train_batch_size // policy.ppo_mini_batch_size
        mini_batches, epochs = draw_mini_batches(
            len(rows), count, policy.ppo_epochs, run.order_seed(0), rollouts_of(rows)
        )
        skipped = without_advantage(rows) if self._may_skip else None
        read = [name for name in loss.needs.select(dict.fromkeys(rows.keys())) if name not in MODEL]
        joined = [name for name in (ROLLOUT, *self._routes) if name in rows]
        columns = rows.with_columns(prepared).select([*model_columns(rows), *read, *joined, *prepared])
        run.meter.count_tokens(sum(row_lengths(columns)))
        update = run.actor.update(ActorRolloutRefWorker.update_actor, columns, mini_batches, epochs, skipped)
        metrics = update.get()
        run.record(metrics)
        if self._entropy is not None:
            self._entropy.update(metrics["actor/token_entropy"])
            run.record({"actor/entropy_coeff": self._entropy.coefficient})
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {} if self._entropy is None else {"entropy": self._entropy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._entropy is not None and "entropy" in state:
            self._entropy.load_state_dict(state["entropy"])

    def _prepare(self, rows: DataProto) -> dict[str, Jagged]:
        """Return the columns that the policy loss computes from the whole batch."""
        mask = Jagged.of(rows["response_mask"])
        names = {"old_log_probs", "advantages", *self.loss_function.needs.select(dict.fromkeys(rows.keys()))}
        read = rows.local(names)
        flat = {
            name: Jagged.of(read[name]).values if read[name].layout == torch.jagged else read[name][mask.rows]
            for name in names
        }
        columns = {name: values.unsqueeze(0) for name, values in flat.items()}
        chosen = mask.values.long().unsqueeze(0)
        prepared = self.loss_function.prepare(columns["old_log_probs"], columns["advantages"], chosen, columns)
        return {name: mask.with_values(column.squeeze(0)) for name, column in prepared.items()}


def may_skip_rows(settings: RunSettings, loss: PpoLoss | None = None) -> bool:
    """Return True if updates leave out rows whose advantage is zero everywhere.

    Args:
        settings: settings of the run.
        loss: loss of the run's actor; None builds it here.
    """
    policy: PpoActorConfig = settings.actor
    if getattr(settings.engine, "router_aux_loss_coef", 0):
        return False  # every row has a balance loss
    loss = loss or build_loss(policy, correction_of(settings).rollout_is is not None)
    return policy.skip_zero_advantage and needs_advantage(loss)


def needs_advantage(loss: PpoLoss) -> bool:
    """Return True if a row with zero advantages has no gradient, so that an update may leave it out."""
    has_terms = loss.entropy_coeff or loss.use_adaptive_entropy or loss.kl_penalty is not None
    return needs_of(loss.policy_loss).scales_with_advantage and not has_terms


def find_vocabulary_kl(settings: RunSettings) -> str | None:
    """Return the name of the KL penalty in the loss if it needs the whole vocabulary, else None.

    Raises:
        CapabilityError: the engine cannot compute such a penalty.
        ConfigError: the reference does not share the actor's pool or engine.
    """
    policy = settings.actor
    name = str(policy.kl_loss_type)
    if not policy.use_kl_loss or not needs_vocabulary(kl_penalties.get(name)):
        return None
    if not settings.engine_class.capabilities.vocabulary_kl:
        raise CapabilityError(
            f"actor.kl_loss_type={name} needs the policy's and the reference's log-probs of the whole vocabulary, "
            f"which actor.engine.name={settings.engine.name} does not compare; choose a penalty of the sampled tokens, "
            "such as k3, or an engine that does, such as fsdp"
        )
    if settings.has_own_pool(Role.REF):
        raise ConfigError(
            f"actor.kl_loss_type={name} compares policy and reference in one process, but placement.mapping.ref is "
            f"{settings.pools.mapping[Role.REF]!r}, not the actor's pool; remove ref from placement.mapping, or choose "
            "a penalty of the sampled tokens, such as k3"
        )
    if settings.role_engine("ref") != settings.engine:
        raise ConfigError(
            f"actor.kl_loss_type={name} compares policy and reference in one engine, but ref.engine differs from "
            "actor.engine; remove ref.engine, or choose a penalty of the sampled tokens, such as k3"
        )
    return name


def build_loss(policy: PpoActorConfig, use_rollout_is_weights: bool) -> PpoLoss:
    """Return the loss that the update minimises.

    Raises:
        ConfigError: ``actor.use_bias_correction_kl`` has no KL penalty to correct.
    """
    penalty = kl_penalties.get(policy.kl_loss_type) if policy.use_kl_loss else None
    if policy.use_bias_correction_kl and (penalty is None or needs_vocabulary(penalty)):
        problem = f"actor.kl_loss_type is {policy.kl_loss_type}" if policy.use_kl_loss else "actor.use_kl_loss is false"
        raise ConfigError(
            f"actor.use_bias_correction_kl corrects the gradient of a KL penalty of the sampled tokens, but {problem}; "
            "set actor.use_kl_loss=true with such a penalty, such as k3, or actor.use_bias_correction_kl=false"
        )
    return make_ppo_loss(
        policy_losses.get(policy.policy_loss),
        loss_aggregations.get(policy.loss_agg_mode),
        clip_ratio_low=policy.clip_ratio_low,
        clip_ratio_high=policy.clip_ratio_high,
        clip_ratio_c=policy.clip_ratio_c,
        entropy_coeff=policy.entropy_coeff,
        kl_penalty=penalty,
        kl_loss_coef=policy.kl_loss_coef if policy.use_kl_loss else 0.0,
        options=policy.policy_loss_kwargs,
        use_rollout_is_weights=use_rollout_is_weights,
        off_policy_mask_threshold=policy.off_policy_mask_threshold,
        top_entropy_quantile=policy.top_entropy_quantile,
        use_bias_correction_kl=policy.use_bias_correction_kl,
        use_adaptive_entropy=policy.use_adaptive_entropy,
    )


def build_entropy_controller(policy: PpoActorConfig) -> AdaptiveEntropyController | None:
    """Return the controller of the entropy bonus with ``actor.use_adaptive_entropy``, else None."""
    if not policy.use_adaptive_entropy:
        return None
    return AdaptiveEntropyController(
        policy.entropy_coeff,
        policy.entropy_target,
        policy.entropy_coef_delta,
        policy.entropy_coef_min,
        policy.entropy_coef_max,
    )


def _check_weights(policy: PpoActorConfig, loss: PpoLoss, level: str | None) -> None:
    """Check that the rollout correction's weights have the level that the policy loss reads.

    Raises:
        ConfigError: the policy loss multiplies the weights of a row's tokens, but each is the weight of the whole row.
    """
    if loss.weighs_rows_itself and level == "sequence":
        raise ConfigError(
            f"actor.policy_loss={policy.policy_loss} applies the importance weights of single tokens, but "
            "algorithm.rollout_correction.rollout_is is sequence; set it to token, or to null for no weights"
        )
