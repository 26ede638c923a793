"""Trainer ``ppo``: policy optimisation with sampled responses; GRPO and its relatives by config.

This version is critic-free: estimators that need values are refused at the start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollcast.contracts.algorithm import (
    AdvantageInputs,
    advantage_needs,
    advantages,
    kl_penalties,
    loss_aggregations,
    policy_losses,
)
from rollcast.controller.worker_group import WorkerGroup
from rollcast.errors import CapabilityError, ConfigError
from rollcast.protocol import DataProto
from rollcast_algorithms.losses import PpoLoss, make_ppo_loss
from rollcast_algorithms.schemas import AlgorithmConfig
from rollcast_trainer.batching import BatchAlgebra, plan_update
from rollcast_trainer.loop import LoopTrainer, Timer, logger
from rollcast_trainer.roles import Role
from rollcast_trainer.schemas import PpoTrainerConfig
from rollcast_trainer.task_runner import TaskRunner

__all__ = ["PpoTrainer"]

_MODEL_COLUMNS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]


@dataclass
class StepState:
    """A training step between its named steps: the batch so far and the metrics so far."""

    batch: DataProto
    metrics: dict[str, float]


class PpoTrainer(LoopTrainer):
    """Generate, reward, log-probs, advantages, update; each a method that a recipe can replace."""

    schema = PpoTrainerConfig

    def __init__(self, task: TaskRunner) -> None:
        self.algorithm: AlgorithmConfig = task._section("algorithm", AlgorithmConfig)
        self.estimator = advantages.get(self.algorithm.adv_estimator)
        self.needs = advantage_needs(self.estimator)
        self.algebra = BatchAlgebra(
            task.data.train_batch_size,
            task.rollout.n,
            task.actor.ppo_mini_batch_size,
            task.actor.ppo_epochs,
            task.world_size,
        )
        self._check()
        super().__init__(task)

    def _check(self) -> None:
        self.algebra.check()
        name = self.algorithm.adv_estimator
        if self.needs.values:
            raise CapabilityError(
                f"algorithm.adv_estimator={name} needs a critic's values, and this trainer has no critic yet; "
                f"estimators without one: {', '.join(n for n in advantages.names() if n != name)}"
            )
        if self.needs.groups and self.algebra.samples < 2:
            raise ConfigError(
                f"algorithm.adv_estimator={name} compares the samples of a prompt with each other, "
                f"but rollout.n is {self.algebra.samples}; set rollout.n to 2 or more"
            )

    @property
    def uses_reference(self) -> bool:
        """Whether reference log-probs are computed."""
        return self._needs_reference(self.task)

    def _needs_reference(self, task: TaskRunner) -> bool:
        return bool(task.actor.use_kl_loss or self.algorithm.use_kl_in_reward)

    def start_workers(self) -> WorkerGroup:
        task = self.task
        logger.info("%s", self.algebra.describe())
        train, infer = self.forward_settings()
        reference = self._needs_reference(task)
        role = Role.ACTOR_ROLLOUT_REF if reference else Role.ACTOR_ROLLOUT
        setup = task.worker_setup(loss_function=self._loss(), has_reference=reference, forward=train, infer=infer)
        return task.start_actor(role, setup)

    def _loss(self) -> PpoLoss:
        actor = self.task.actor
        return make_ppo_loss(
            policy_losses.get(actor.policy_loss),
            loss_aggregations.get(actor.loss_agg_mode),
            clip_ratio_low=actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio_high,
            clip_ratio_c=actor.clip_ratio_c,
            entropy_coeff=actor.entropy_coeff,
            kl_penalty=kl_penalties.get(actor.kl_loss_type) if actor.use_kl_loss else None,
            kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
            options=actor.policy_loss_kwargs,
        )

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
        """Score the responses: ``token_level_scores`` ``[B, T]``, the score at the last token."""
        scored = self.scorer.score(state.batch)
        scores = scored.token_level_scores(state.batch["response_mask"])
        state.batch = state.batch.with_columns({"token_level_scores": scores})
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
        if algorithm.use_kl_in_reward:
            inside = mask.bool()
            old, ref = (batch[name].masked_fill(~inside, 0.0) for name in ("old_log_probs", "ref_log_prob"))
            penalty = kl_penalties.get(algorithm.kl_penalty, "algorithm.kl_penalty")(old, ref).masked_fill(~inside, 0.0)
            rewards = rewards - algorithm.kl_coef * penalty
            state.metrics["actor/reward_kl"] = float(penalty.sum()) / max(float(mask.sum()), 1.0)
        output = self.estimator(
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
        flat = output.advantages.abs().amax(-1)
        state.metrics["actor/zero_advantage_rows"] = float((flat == 0).float().mean())

    def update_actor_step(self, state: StepState) -> None:
        """Mini-batches over the rows, each an optimizer step."""
        actor, batch = self.task.actor, state.batch
        exact = actor.skip_zero_advantage and actor.entropy_coeff == 0 and not actor.use_kl_loss
        skip = (batch["advantages"].abs().amax(-1) == 0) if exact else None
        columns = [*_MODEL_COLUMNS, "old_log_probs", "advantages"] + (["ref_log_prob"] if actor.use_kl_loss else [])
        arranged, plan = plan_update(
            batch.select(columns),
            self._mini_batches(batch),
            self.dp_size,
            actor.ppo_epochs,
            self.task.data.max_response_length,
            skip,
        )
        state.metrics |= self.group.update_actor(arranged, plan)[0]

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks of the actor."""
        return max(place.dp_rank for place in self.group.mesh("actor")) + 1

    def _mini_batches(self, batch: DataProto) -> list[torch.Tensor]:
        """Row indices of each mini-batch: whole prompts' groups are not kept together (as in verl)."""
        rows = len(batch)
        if self.task.actor.shuffle:
            seed = (self.task.trainer.seed * 1_000_003 + self.step) & 0x7FFF_FFFF
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
        else:
            order = torch.arange(rows)
        return list(order.chunk(self.algebra.mini_batches))
