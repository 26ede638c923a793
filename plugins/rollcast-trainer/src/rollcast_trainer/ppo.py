"""Trainer ``ppo``: policy optimisation with sampled responses; PPO, GRPO and their relatives by config.

What a step does beyond generating, scoring and updating follows from what the estimator says that it
needs: a critic's values, a greedy baseline.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from rollcast import WorkerGroup
from rollcast.contracts.algorithm import REWARD_COMPONENT, AdvantageInputs, advantages, loss_aggregations, needs_of
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.errors import RewardError
from rollcast.protocol import DataProto
from rollcast_algorithms.schemas import AlgorithmConfig
from rollcast_algorithms.value_loss import ValueLoss
from rollcast_trainer.balancing import row_lengths, seqlen_metrics
from rollcast_trainer.batching import draw_mini_batches
from rollcast_trainer.correction import OffPolicyCorrection
from rollcast_trainer.critic import CriticWorker
from rollcast_trainer.dynamic_batch import groups_that_differ, join_groups
from rollcast_trainer.loop import LoopTrainer, Timer
from rollcast_trainer.ppo_parts import build_algebra, build_loss, check_needs, check_offload, find_vocabulary_kl
from rollcast_trainer.reference import RefWorker
from rollcast_trainer.reward_kl import RewardKl
from rollcast_trainer.reward_model import RewardModelWorker, check_reward_model
from rollcast_trainer.roles import Role
from rollcast_trainer.schemas import CriticConfig, PpoActorConfig, PpoConfig, RewardModelConfig
from rollcast_trainer.setups import value_setup
from rollcast_trainer.skipping import needs_advantage, without_advantage
from rollcast_trainer.step_state import StepState
from rollcast_trainer.task_runner import TaskRunner
from rollcast_trainer.workers import ActorRolloutRefWorker, WorkerSetup

__all__ = ["PpoTrainer", "StepState"]

logger = logging.getLogger(__name__)
_MODEL_COLUMNS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]


class PpoTrainer(LoopTrainer):
    """Generate, reward, log-probs, advantages, update; each a method that a recipe can replace.

    Attributes:
        policy, critic, algorithm: The config's sections ``actor``, ``critic`` and ``algorithm``.
        ref: The section ``ref.engine``.
        algebra: the sizes of a step.
        vocabulary_kl: name of the KL penalty in the loss, if it is one that the engine calculates.
        loss_function: what the update minimises.
    """

    schema = PpoConfig

    def __init__(self, task: TaskRunner) -> None:
        super().__init__(task)
        self.policy: PpoActorConfig = task.actor
        self.critic: CriticConfig = task.sections.critic
        self.ref = task.role_engine("ref")
        check_offload(task, self.ref)
        self.reward_model: RewardModelConfig = task.sections.reward_model
        if self.reward_model.enable:
            check_reward_model(self.reward_model.model.path)
        self.algorithm: AlgorithmConfig = task.section("algorithm", AlgorithmConfig)
        self.algebra = build_algebra(task, self.policy)
        self._estimator = advantages.get(self.algorithm.adv_estimator)
        self._needs = needs_of(self._estimator)
        check_needs(task, self.algorithm, self._needs, self.algebra.samples)
        self._reward_kl = RewardKl(self.algorithm) if self.algorithm.use_kl_in_reward else None
        self._correction = OffPolicyCorrection(self.algorithm.rollout_correction)
        self.vocabulary_kl = find_vocabulary_kl(task, self.policy)
        self.loss_function = build_loss(self.policy, self._correction.gives_weights)
        self._may_skip = self.policy.skip_zero_advantage and needs_advantage(self.loss_function)

    @property
    def uses_critic(self) -> bool:
        """Whether there is a value model."""
        return "values" in self._needs.columns

    @property
    def uses_reference(self) -> bool:
        """Whether there is a reference policy."""
        return self.policy.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def uses_ref_log_prob(self) -> bool:
        """Whether the reference's log-probs of the sampled tokens are computed."""
        return self.algorithm.use_kl_in_reward or (self.policy.use_kl_loss and self.vocabulary_kl is None)

    def model_paths(self) -> dict[Role, str]:
        own = {Role.CRITIC: self.critic.model.path, Role.REWARD_MODEL: self.reward_model.model.path}
        return {**super().model_paths(), **{role: path for role, path in own.items() if path is not None}}

    def start_workers(self) -> dict[Role, WorkerGroup]:
        logger.info("%s", self.algebra.describe())
        settings = self.forward_settings()
        rows = self.policy.log_prob_micro_batch_size_per_gpu or self.policy.ppo_micro_batch_size_per_gpu
        apart = self.uses_reference and self.task.has_own_pool(Role.REF)
        fused = self.uses_reference and not apart
        setup = self.task.worker_setup(
            loss_function=self.loss_function,
            has_reference=fused,
            optim=self.scheduled(self.policy.optim),
            offload_reference=getattr(self.ref, "param_offload", False),
            forward=replace(
                settings,
                calculate_entropy=self.policy.entropy_coeff != 0,
                vocabulary_kl=self.vocabulary_kl,
            ),
            infer=replace(
                settings,
                calculate_entropy=True,
                calculate_sum_pi_squared="sum_pi_squared" in self._needs.columns,
                micro_batch_size_per_gpu=rows,
            ),
        )
        actor = Role.ACTOR_ROLLOUT_REF if fused else Role.ACTOR_ROLLOUT
        workers: dict[Role, ClassWithInitArgs[Any]] = {actor: ClassWithInitArgs(ActorRolloutRefWorker, setup)}
        if apart:
            workers[Role.REF] = ClassWithInitArgs(RefWorker, replace(setup, optim=None, rollout=None))
        if self.uses_critic:
            workers[Role.CRITIC] = ClassWithInitArgs(CriticWorker, self._critic_setup(setup))
        if self.reward_model.enable:
            judge = value_setup(setup, self.reward_model.model.path, self.reward_model.micro_batch_size_per_gpu)
            workers[Role.REWARD_MODEL] = ClassWithInitArgs(RewardModelWorker, judge)
        return self.task.start_roles(workers)

    def _critic_setup(self, setup: WorkerSetup) -> WorkerSetup:
        critic = self.critic
        rows = critic.ppo_micro_batch_size_per_gpu or self.policy.ppo_micro_batch_size_per_gpu
        values = value_setup(setup, critic.model.path, rows)
        forward = replace(values.forward, micro_batch_size_per_gpu=rows)
        loss = ValueLoss(loss_aggregations.get(critic.loss_agg_mode), critic.cliprange_value)
        return replace(values, optim=self.scheduled(critic.optim), loss_function=loss, forward=forward, infer=forward)

    def train_step(self, batch: DataProto, timer: Timer) -> dict[str, float]:
        state = StepState(batch, prompts=batch)
        self.sample(state, timer)
        if self.algorithm.filter_groups.enable:
            self.filter_groups_step(state, timer)
        if self.task.trainer.balance_batch and self.dp_size > 1:
            state.metrics |= seqlen_metrics(row_lengths(state.batch), self.dp_size)
        self.task.emit("on_batch_after_reward", trainer=self, step=self.step + 1, batch=state.batch)
        if "reward_baselines" in self._needs.columns:
            with timer.phase("baseline"):
                self.baseline_step(state)
        with timer.phase("old_log_prob"):
            self.old_log_prob_step(state)
        if self.uses_ref_log_prob:
            with timer.phase("ref_log_prob"):
                self.ref_log_prob_step(state)
        if self.uses_critic:
            with timer.phase("values"):
                self.values_step(state)
        with timer.phase("advantage"):
            self.advantage_step(state)
        self.task.emit("on_batch_after_advantage", trainer=self, step=self.step + 1, batch=state.batch)
        if self.uses_critic:
            with timer.phase("update_critic"):
                self.update_critic_step(state)
        if not self.uses_critic or self.step >= self.task.trainer.critic_warmup:
            with timer.phase("update_actor"):
                self.update_actor_step(state)
        return state.metrics

    def sample(self, state: StepState, timer: Timer) -> None:
        """Generate and score."""
        with timer.phase("generate"):
            self.rollout_step(state)
        state.metrics["rollout/tokens_per_s"] = state.metrics["rollout/tokens"] / max(timer.seconds["generate"], 1e-9)
        self.task.emit("on_batch_after_rollout", trainer=self, step=self.step + 1, batch=state.batch)
        with timer.phase("reward"):
            self.reward_step(state)

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
        if Role.REWARD_MODEL in self.groups:
            judged = self.infer(Role.REWARD_MODEL, "compute_rm_score", state.batch.select(_MODEL_COLUMNS))["rm_scores"]
            scored.rule_weight = self.reward_model.rule_weight
            scored.scores = self.reward_model.weight * judged + scored.rule_weight * scored.scores
            state.metrics["reward/model_mean"] = float(judged.mean())
        scores = scored.token_level_scores(state.batch["response_mask"])
        columns = {"token_level_scores": scores}
        if any(name.startswith(REWARD_COMPONENT) for name in self._needs.columns):
            columns |= {REWARD_COMPONENT + name: values for name, values in scored.components().items()}
        state.batch = state.batch.with_columns(columns)
        if not bool(scored.kept.all()):
            if not bool(scored.kept.any()):
                raise RewardError(f"no sample of step {self.step + 1} has a score: {scored.results[0].error}")
            state.batch = state.batch.select_idxs(scored.kept.nonzero().flatten())
        state.metrics |= {**scored.metrics("reward"), "reward/accuracy": scored.accuracy}

    def filter_groups_step(self, state: StepState, timer: Timer) -> None:
        """Groups with scores that differ, from further prompts where too many have none.

        Metrics are those of the first batch, which is not chosen, and ``rollout/gen_batches`` and
        ``rollout/kept_groups``.
        """
        wanted, limit = self.algebra.prompts, self.algorithm.filter_groups.max_num_gen_batches
        kept: list[tuple[DataProto, DataProto]] = []
        current, groups, count = state, 0, 0
        while True:
            count += 1
            differing = current.batch.select_idxs(groups_that_differ(current.batch).nonzero().flatten())
            kept.append((differing, cast("DataProto", current.prompts)))
            groups += len(differing["uid"].unique())
            if groups >= wanted or count >= limit:
                break
            further = next(self.batches)
            current = StepState(further, prompts=further)
            self.sample(current, timer)
        state.metrics |= {"rollout/gen_batches": float(count), "rollout/kept_groups": float(min(groups, wanted))}
        if not groups:
            logger.warning("step %d: no group of %d batches has scores that differ", self.step + 1, count)
            return
        state.batch, state.prompts = join_groups(kept, wanted, int(self.task.tokenizer.pad_token_id))

    def baseline_step(self, state: StepState) -> None:
        """The score of a greedy response to each prompt: ``reward_baselines`` float32 ``[B]``."""
        prompts = cast("DataProto", state.prompts)
        greedy = replace(self.sampling(), temperature=0.0)
        scores = self.scorer.score(self.generate(prompts, greedy)).scores
        state.batch = state.batch.with_columns({"reward_baselines": scores[state.batch["uid"]]})
        state.metrics["reward/baseline_mean"] = float(scores.mean())

    def old_log_prob_step(self, state: StepState) -> None:
        """Log-probs under the policy before the update, and how far the rollout's are from them."""
        if self._correction.may_bypass():
            state.batch = self._correction.bypass(state.batch)
            return
        output = self.infer(Role.ACTOR_ROLLOUT, "compute_log_prob", state.batch.select(_MODEL_COLUMNS))
        mask = state.batch["response_mask"].bool()
        tokens = max(int(mask.sum()), 1)
        gap = (output["old_log_probs"] - state.batch["rollout_log_probs"]).abs().masked_fill(~mask, 0.0)
        state.batch = state.batch.joined(output.drop(["entropy"]))
        state.metrics |= {
            "actor/entropy": float(output["entropy"].masked_fill(~mask, 0.0).sum()) / tokens,
            "rollout/logprob_gap_max": float(gap.max()),
            "rollout/logprob_gap_mean": float(gap.sum()) / tokens,
        }
        state.batch, metrics = self._correction.apply(state.batch)
        state.metrics |= metrics

    def ref_log_prob_step(self, state: StepState) -> None:
        """Log-probs under the reference policy."""
        rows = state.batch.select(_MODEL_COLUMNS)
        state.batch = state.batch.joined(self.infer(Role.REF, "compute_ref_log_prob", rows))

    def values_step(self, state: StepState) -> None:
        """The critic's values of the states in which tokens were chosen: ``values`` ``[B, T]``."""
        rows = state.batch.select(_MODEL_COLUMNS)
        state.batch = state.batch.joined(self.infer(Role.CRITIC, "compute_values", rows))

    def advantage_step(self, state: StepState) -> None:
        """Scores less the KL penalty (if it is in the reward), then the estimator."""
        batch, algorithm = state.batch, self.algorithm
        rewards = batch["token_level_scores"]
        if self._reward_kl is not None:
            rewards, metrics = self._reward_kl.subtract(rewards, batch)
            state.metrics |= metrics
        output = self._estimator(
            AdvantageInputs(
                token_level_rewards=rewards,
                response_mask=batch["response_mask"],
                group_ids=batch["uid"],
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
                options=algorithm.adv_kwargs,
                columns=self._needs.select(batch.batch),
            )
        )
        columns = {"token_level_rewards": rewards, "advantages": output.advantages, "returns": output.returns}
        state.batch = batch.with_columns(columns)
        state.metrics["actor/zero_advantage_rows"] = float(without_advantage(state.batch).float().mean())
        if "values" in batch:
            inside = batch["response_mask"].bool()
            left = (output.returns - batch["values"])[inside].var()
            state.metrics["critic/explained_variance"] = float(1 - left / output.returns[inside].var().clamp(min=1e-8))

    def update_critic_step(self, state: StepState) -> None:
        """Mini-batches over all rows, each an optimizer step of the critic."""
        batch, critic = state.batch, self.critic
        prompts = critic.ppo_mini_batch_size or self.policy.ppo_mini_batch_size
        count = max(self.algebra.prompts // prompts, 1)
        mini_batches, epochs = draw_mini_batches(len(batch), count, critic.ppo_epochs, self._order_seed(1))
        columns = batch.select([*_MODEL_COLUMNS, "values", "returns"])
        state.metrics |= self.update(Role.CRITIC, "update_critic", columns, mini_batches, epochs)

    def update_actor_step(self, state: StepState) -> None:
        """Mini-batches over the rows, each an optimizer step."""
        batch, policy = self._correction.mask_rejected(state.batch), self.policy
        loss = self.loss_function
        prepared = loss.prepare(batch["old_log_probs"], batch["advantages"], batch["response_mask"], batch.batch)
        batch = batch.with_columns(prepared)
        mini_batches, epochs = draw_mini_batches(
            len(batch), self.algebra.mini_batches, policy.ppo_epochs, self._order_seed(0)
        )
        read = [name for name in loss.needs.select(batch.batch) if name not in _MODEL_COLUMNS]
        state.metrics |= self.update(
            Role.ACTOR_ROLLOUT,
            "update_actor",
            batch.select([*_MODEL_COLUMNS, *read, *prepared]),
            mini_batches,
            epochs,
            without_advantage(batch) if self._may_skip else None,
        )

    def _order_seed(self, stream: int) -> int | None:
        """Seed of the order of rows in this step's mini-batches; None to keep the batch's."""
        if not self.policy.shuffle:
            return None
        seed = int(self.task.trainer.seed)
        return (seed * 1_000_003 + self.step + stream * 500_009) & 0x7FFF_FFFF

    def state_dict(self) -> dict[str, Any]:
        kl = {} if self._reward_kl is None else {"kl_controller": self._reward_kl.controller.state_dict()}
        return {**kl, "rollout_correction": self._correction.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._reward_kl is not None and "kl_controller" in state:
            self._reward_kl.controller.load_state_dict(state["kl_controller"])
        if "rollout_correction" in state:
            self._correction.load_state_dict(state["rollout_correction"])
