"""Trainer ``ppo``: policy optimisation with sampled responses; GRPO and its relatives by config.

This version is critic-free: estimators that need values are refused at the start.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import cast

import torch

from rollcast.contracts.algorithm import (
    AdvantageInputs,
    KlPenalty,
    PolicyLossInputs,
    advantage_needs,
    advantages,
    kl_penalties,
    loss_aggregations,
    policy_losses,
)
from rollcast.controller.worker_group import WorkerGroup
from rollcast.errors import CapabilityError, ConfigError, RewardError
from rollcast.protocol import DataProto
from rollcast_algorithms.losses import PpoLoss, make_ppo_loss
from rollcast_algorithms.schemas import AlgorithmConfig
from rollcast_trainer.batching import BatchAlgebra, draw_mini_batches, plan_update
from rollcast_trainer.loop import LoopTrainer, Timer
from rollcast_trainer.roles import Role
from rollcast_trainer.schemas import PpoActorConfig, PpoTrainerConfig
from rollcast_trainer.task_runner import TaskRunner

__all__ = ["PpoTrainer", "StepState"]

logger = logging.getLogger(__name__)
_MODEL_COLUMNS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]


@dataclass
class StepState:
    """A training step between its named steps: the batch so far and the metrics so far."""

    batch: DataProto
    metrics: dict[str, float]


class PpoTrainer(LoopTrainer):
    """Generate, reward, log-probs, advantages, update; each a method that a recipe can replace.

    Attributes:
        policy: the config's ``actor`` section.
        algorithm: the config's ``algorithm`` section.
        algebra: the sizes of a step.
        loss_function: what the update minimises.
    """

    schema = PpoTrainerConfig

    def __init__(self, task: TaskRunner) -> None:
        super().__init__(task)
        self.policy: PpoActorConfig = task.actor
        self.algorithm: AlgorithmConfig = task.section("algorithm", AlgorithmConfig)
        self.algebra = self._algebra()
        self.algebra.check()
        self._estimator = advantages.get(self.algorithm.adv_estimator)
        self._check_needs()
        self._reward_penalty: KlPenalty | None = None
        if self.algorithm.use_kl_in_reward:
            self._reward_penalty = kl_penalties.get(self.algorithm.kl_penalty, "algorithm.kl_penalty")
        self.loss_function = self._loss()
        self._may_skip = self.policy.skip_zero_advantage and needs_advantage(self.loss_function)

    def _algebra(self) -> BatchAlgebra:
        policy = self.policy
        return BatchAlgebra(
            self.task.data.train_batch_size,
            self.task.rollout.n,
            policy.ppo_mini_batch_size,
            policy.ppo_epochs,
            self.task.world_size,
            policy.ppo_micro_batch_size_per_gpu,
            policy.ppo_max_token_len_per_gpu if policy.use_dynamic_bsz else None,
        )

    def _check_needs(self) -> None:
        name, needs = self.algorithm.adv_estimator, advantage_needs(self._estimator)
        if needs.values:
            raise CapabilityError(
                f"algorithm.adv_estimator={name} needs a critic's values, and this trainer has no critic yet; "
                f"installed estimators: {', '.join(advantages.names())}"
            )
        if needs.groups and self.algebra.samples < 2:
            raise ConfigError(
                f"algorithm.adv_estimator={name} compares the samples of a prompt with each other, "
                f"but rollout.n is {self.algebra.samples}; set rollout.n to 2 or more"
            )

    def _loss(self) -> PpoLoss:
        policy = self.policy
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
        )

    @property
    def uses_reference(self) -> bool:
        """Whether reference log-probs are computed."""
        return self.policy.use_kl_loss or self.algorithm.use_kl_in_reward

    def start_workers(self) -> WorkerGroup:
        logger.info("%s", self.algebra.describe())
        settings = self.forward_settings()
        rows = self.policy.log_prob_micro_batch_size_per_gpu or self.policy.ppo_micro_batch_size_per_gpu
        setup = self.task.worker_setup(
            loss_function=self.loss_function,
            has_reference=self.uses_reference,
            forward=replace(settings, calculate_entropy=self.policy.entropy_coeff != 0),
            infer=replace(settings, calculate_entropy=True, micro_batch_size_per_gpu=rows),
        )
        role = Role.ACTOR_ROLLOUT_REF if self.uses_reference else Role.ACTOR_ROLLOUT
        return self.task.start_actor(role, setup)

    def train_step(self, batch: DataProto, timer: Timer) -> dict[str, float]:
        state = StepState(batch, {})
        with timer.phase("generate"):
            self.rollout_step(state)
        state.metrics["rollout/tokens_per_s"] = state.metrics["rollout/tokens"] / max(timer.seconds["generate"], 1e-9)
        self.task.emit("on_batch_after_rollout", trainer=self, step=self.step + 1, batch=state.batch)
        with timer.phase("reward"):
            self.reward_step(state)
        self.task.emit("on_batch_after_reward", trainer=self, step=self.step + 1, batch=state.batch)
        with timer.phase("old_log_prob"):
            self.old_log_prob_step(state)
        if self.uses_reference:
            with timer.phase("ref_log_prob"):
                self.ref_log_prob_step(state)
        with timer.phase("advantage"):
            self.advantage_step(state)
        self.task.emit("on_batch_after_advantage", trainer=self, step=self.step + 1, batch=state.batch)
        with timer.phase("update_actor"):
            self.update_actor_step(state)
        return state.metrics

    # -- named steps --------------------------------------------------------------------------

    def rollout_step(self, state: StepState) -> None:
        """Sample ``rollout.n`` responses a prompt; rows of a prompt share ``uid`` (int64)."""
        prompts = state.batch.with_columns({"uid": torch.arange(len(state.batch))})
        rows = prompts.repeat(self.algebra.samples, interleave=True)
        state.batch = self.generate(rows, self.sampling())
        lengths = state.batch["response_mask"].sum(-1).float()
        state.metrics |= {
            "rollout/tokens": float(lengths.sum()),
            "rollout/response_length_mean": float(lengths.mean()),
            "rollout/finished": float(state.batch["finished"].float().mean()),
        }

    def reward_step(self, state: StepState) -> None:
        """Score the responses: ``token_level_scores`` ``[B, T]``, the score at the last token.

        Rows that ``reward.on_error=drop`` drops leave the batch.

        Raises:
            RewardError: no row is left.
        """
        scored = self.scorer.score(state.batch)
        scores = scored.token_level_scores(state.batch["response_mask"])
        state.batch = state.batch.with_columns({"token_level_scores": scores})
        if not bool(scored.kept.all()):
            if not bool(scored.kept.any()):
                raise RewardError(f"no sample of step {self.step + 1} has a score: {scored.results[0].error}")
            state.batch = state.batch.select_idxs(scored.kept.nonzero().flatten())
        state.metrics |= {**scored.metrics("reward"), "reward/accuracy": scored.accuracy}

    def old_log_prob_step(self, state: StepState) -> None:
        """Log-probs under the policy before the update, and how far the rollout's are from them."""
        output = self.group.compute_log_prob(state.batch.select(_MODEL_COLUMNS))
        mask = state.batch["response_mask"].bool()
        tokens = max(int(mask.sum()), 1)
        gap = (output["old_log_probs"] - state.batch["rollout_log_probs"]).abs().masked_fill(~mask, 0.0)
        state.batch = state.batch.union(output.select(["old_log_probs"]))
        state.metrics |= {
            "actor/entropy": float(output["entropy"].masked_fill(~mask, 0.0).sum()) / tokens,
            "rollout/logprob_gap_max": float(gap.max()),
            "rollout/logprob_gap_mean": float(gap.sum()) / tokens,
        }

    def ref_log_prob_step(self, state: StepState) -> None:
        """Log-probs under the reference policy."""
        state.batch = state.batch.union(self.group.compute_ref_log_prob(state.batch.select(_MODEL_COLUMNS)))

    def advantage_step(self, state: StepState) -> None:
        """Scores less the KL penalty (if it is in the reward), then the estimator."""
        batch, algorithm = state.batch, self.algorithm
        mask = batch["response_mask"]
        rewards = batch["token_level_scores"]
        if self._reward_penalty is not None:
            inside = mask != 0
            old, ref = (batch[name].masked_fill(~inside, 0.0) for name in ("old_log_probs", "ref_log_prob"))
            penalty = self._reward_penalty(old, ref).masked_fill(~inside, 0.0)
            rewards = rewards - algorithm.kl_coef * penalty
            state.metrics["actor/reward_kl_penalty"] = float(penalty.sum()) / max(float(inside.sum()), 1.0)
        output = self._estimator(
            AdvantageInputs(
                token_level_rewards=rewards,
                response_mask=mask,
                group_ids=batch["uid"],
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
                options=algorithm.adv_kwargs,
            )
        )
        columns = {"token_level_rewards": rewards, "advantages": output.advantages, "returns": output.returns}
        state.batch = batch.with_columns(columns)
        state.metrics["actor/zero_advantage_rows"] = float(_without_advantage(state.batch).float().mean())

    def update_actor_step(self, state: StepState) -> None:
        """Mini-batches over the rows, each an optimizer step."""
        batch, policy = state.batch, self.policy
        seed = (self.task.trainer.seed * 1_000_003 + self.step) & 0x7FFF_FFFF if policy.shuffle else None
        mini_batches, epochs = draw_mini_batches(len(batch), self.algebra.mini_batches, policy.ppo_epochs, seed)
        columns = [*_MODEL_COLUMNS, "old_log_probs", "advantages"] + (["ref_log_prob"] if policy.use_kl_loss else [])
        arranged, plan = plan_update(
            batch.select(columns),
            mini_batches,
            self.dp_size,
            self.task.data.max_response_length,
            epochs,
            _without_advantage(batch) if self._may_skip else None,
        )
        state.metrics |= self.group.update_actor(arranged, plan)[0]


def needs_advantage(loss: PpoLoss) -> bool:
    """Whether a row with zero advantages has no gradient, so that it may be left out of an update.

    Terms beside the policy loss always have one. The policy loss itself is tried on a few tokens,
    which also finds options that it refuses.

    Raises:
        ConfigError: it does not take its options.
    """
    generator = torch.Generator().manual_seed(0)
    old = torch.rand((4, 16), generator=generator).log()
    new = (old + torch.randn((4, 16), generator=generator)).requires_grad_()
    inputs = PolicyLossInputs(
        log_probs=new,
        old_log_probs=old,
        advantages=torch.zeros(4, 16),
        response_mask=torch.ones(4, 16, dtype=torch.int64),
        clip_ratio_low=loss.clip_ratio_low,
        clip_ratio_high=loss.clip_ratio_high,
        clip_ratio_c=loss.clip_ratio_c,
        options=loss.options,
    )
    try:
        total = loss.policy_loss(inputs).losses.sum()
    except (ValueError, TypeError, LookupError) as error:
        raise ConfigError(f"actor.policy_loss does not work with the settings in actor: {error}") from error
    if loss.entropy_coeff or loss.kl_penalty is not None:
        return False
    if not total.requires_grad:
        return True
    (gradient,) = torch.autograd.grad(total, new, allow_unused=True)
    return gradient is None or not bool(gradient.any())


def _without_advantage(batch: DataProto) -> torch.Tensor:
    """Rows (bool ``[B]``) whose advantage is zero at every token."""
    return cast("torch.Tensor", batch["advantages"].abs().amax(-1) == 0)
