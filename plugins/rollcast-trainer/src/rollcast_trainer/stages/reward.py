"""Stages of scoring: the reward, a reward model, the KL penalty, and the filter of groups with equal scores."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from rollcast.contracts.algorithm import (
    REWARD_COMPONENT,
    check_columns,
    kl_penalties,
    needs_vocabulary,
)
from rollcast.contracts.reward import MAX_REWARD
from rollcast.contracts.stage import StageSpec
from rollcast.errors import CapabilityError, ConfigError, RewardError
from rollcast.protocol import DataProto, Jagged
from rollcast_algorithms.kl_controllers import KlControllerSettings, kl_controllers
from rollcast_algorithms.schemas import AlgorithmConfig
from rollcast_rewards.scoring import Scored
from rollcast_trainer.batch.columns import MODEL, refuse_images
from rollcast_trainer.batch.groups import groups_that_differ, join_groups, mean_interval
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import RunSettings
from rollcast_trainer.run.setups import ModelNeeds, TrainingStage
from rollcast_trainer.schemas import RewardModelConfig
from rollcast_trainer.workers.reward_model import RewardModelWorker, check_reward_model
from rollcast_trainer.workers.roles import Role

__all__ = ["FilterGroups", "KlInReward", "Reward", "RewardModelScores", "filtered_scores"]

logger = logging.getLogger(__name__)
#: Column with the score by which groups are filtered, float32 ``[B]``.
_FILTERED = "filter_groups_score"
#: Key in a result's extra numbers: the amount by which a reward manager changed the score.
_SHAPING = "overlong_penalty"


class RewardModelScores(TrainingStage):
    """Stage that writes ``rm_scores``, float32 ``[B]``: the reward model's score of each response."""

    phase: ClassVar[str] = "reward"

    @classmethod
    def declare(cls, settings: RunSettings) -> StageSpec | None:
        config: RewardModelConfig = settings.section("reward_model", RewardModelConfig)
        if not config.enable:
            return None
        check_reward_model(config.model.path)
        return StageSpec(reads=MODEL, writes=("rm_scores",), roles=(Role.REWARD_MODEL,), is_recorded=True)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._config: RewardModelConfig = run.section("reward_model", RewardModelConfig)
        self._path = check_reward_model(self._config.model.path)

    def needs(self) -> Sequence[ModelNeeds]:
        rows = self._config.micro_batch_size_per_gpu or self.run.settings.actor.log_prob_micro_batch_size_per_gpu
        return [ModelNeeds(Role.REWARD_MODEL, path=self._path, micro_batch_size=rows)]

    def __call__(self, batch: DataProto) -> DataProto:
        refuse_images(batch, "a reward model")
        model = self.run.role_group(Role.REWARD_MODEL)
        scores = model.infer(RewardModelWorker.compute_rm_score, batch.select(MODEL), ["rm_scores"])
        self.run.recorder.record_later(lambda: model_metrics(scores["rm_scores"]))
        return batch.joined(scores)


def model_metrics(scores: torch.Tensor) -> dict[str, float]:
    """Return the mean of a reward model's scores without those of bad samples; empty if all are bad."""
    usable = scores[scores.abs() <= MAX_REWARD]
    return {"reward/model_mean": float(usable.mean())} if len(usable) else {}


class Reward(TrainingStage):
    """Stage that writes ``token_level_scores``, jagged float32: the score of each response at its last token.

    With ``reward.on_error=drop`` rows whose reward failed leave the batch.
    """

    phase: ClassVar[str] = "reward"

    @classmethod
    def declare(cls, settings: RunSettings) -> StageSpec:
        algorithm: AlgorithmConfig = settings.section("algorithm", AlgorithmConfig)
        has_model = settings.section("reward_model", RewardModelConfig).enable
        filters = algorithm.filter_groups.enable
        rewards = [] if algorithm.use_kl_in_reward else ["token_level_rewards"]
        return StageSpec(
            reads=("responses", "response_mask", "finished", *(["rm_scores"] if has_model else [])),
            optional=("uid", "rollout_index", "is_final", "is_scored", "environment_scores", "turn_ids", "messages"),
            writes=("token_level_scores", *rewards, REWARD_COMPONENT, *([_FILTERED] if filters else [])),
            brings=("filter_groups",) if filters else (),
            is_recorded=True,
        )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._algorithm: AlgorithmConfig = run.section("algorithm", AlgorithmConfig)
        self._model: RewardModelConfig = run.section("reward_model", RewardModelConfig)

    def __call__(self, batch: DataProto) -> DataProto:
        if "rm_scores" in batch:
            added = self._model.weight * batch["rm_scores"]
            scored = self.run.scorer.score(batch, added, self._model.rule_weight)
        else:
            scored = self.run.scorer.score(batch)
        scores = scored.token_level_scores(Jagged.of(batch["response_mask"])).column()
        columns = {"token_level_scores": scores}
        if not self._algorithm.use_kl_in_reward:
            columns["token_level_rewards"] = scores
        if self.run.settings.is_read(REWARD_COMPONENT):
            columns |= {REWARD_COMPONENT + name: values for name, values in scored.components().items()}
        if self._algorithm.filter_groups.enable:
            columns[_FILTERED] = filtered_scores(scored, self._algorithm.filter_groups.metric)
        spread = self._spread(batch, scored)
        batch = batch.with_columns(columns)
        if not bool(scored.kept.all()):
            if not bool(scored.kept.any()):
                raise RewardError(f"no sample of step {self.run.step} has a score: {scored.results[0].error}")
            batch = batch.select_idxs(scored.kept.nonzero().flatten())
        judged = self.run.scorer.take_metrics()
        self.run.record({**scored.metrics("reward"), **spread, "reward/accuracy": scored.accuracy, **judged})
        if not self._algorithm.filter_groups.enable:
            self.run.emit_batch(self.run.hook.on_batch_after_reward, batch)
        return batch

    @staticmethod
    def _spread(batch: DataProto, scored: Scored) -> dict[str, float]:
        """Return the bounds of the 95 % interval of the mean reward; none with fewer than two prompts."""
        counted = scored.kept & scored.final
        bounds = mean_interval(batch["uid"][counted], scored.rollout_scores[counted]) if "uid" in batch else None
        return {} if bounds is None else {"reward/mean/low": bounds[0], "reward/mean/high": bounds[1]}


def filtered_scores(scored: Scored, metric: str) -> torch.Tensor:
    """Return the score by which groups are filtered, float32 ``[B]``; equal for all rows of a rollout.

    Raises:
        ConfigError: the reward has no number with the metric's name.
    """
    if metric == "shaped_score":
        return scored.rollout_scores
    if metric == "score":
        shaping = torch.tensor([float(result.extra.get(_SHAPING) or 0.0) for result in scored.results])
        return scored.rollout_scores - scored.rule_weight * scored.of_rollouts(shaping)
    if metric == "accuracy":
        return torch.tensor([float(correct) for correct in scored.correct])
    components = scored.components()
    if metric not in components:
        raise ConfigError(
            f"algorithm.filter_groups.metric is {metric!r}; valid: score, shaped_score, accuracy and the extra numbers "
            f"of the reward ({', '.join(components) or 'none'})"
        )
    return scored.of_rollouts(components[metric])


class FilterGroups(TrainingStage):
    """Stage that keeps groups with differing scores, and samples further prompts to replace the others.

    Metrics of sampling and reward describe the first batch only; ``rollout/gen_batches`` and ``rollout/kept_groups``
    count generated batches and kept groups.
    """

    @classmethod
    def declare(cls, settings: RunSettings) -> StageSpec | None:
        algorithm: AlgorithmConfig = settings.section("algorithm", AlgorithmConfig)
        if not algorithm.filter_groups.enable:
            return None
        return StageSpec(
            reads=("uid", "response_mask", _FILTERED), after=("reward",), changes_rows=True, is_recorded=True
        )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._limit = run.section("algorithm", AlgorithmConfig).filter_groups.max_num_gen_batches

    def __call__(self, batch: DataProto) -> DataProto:
        wanted = self.run.settings.data.train_batch_size
        batches: list[DataProto] = []
        current, groups, count = batch, 0, 0
        while True:
            count += 1
            # A failed rollout that was kept has no trained tokens; its score must not decide about its group.
            counted = Jagged.of(current["response_mask"]).sums() > 0
            # NaN marks a rollout to which the metric does not apply.
            counted &= current[_FILTERED].isnan().logical_not()
            differ = groups_that_differ(current["uid"], current[_FILTERED], counted)
            differing = current.select_idxs(differ.nonzero().flatten())
            batches.append(differing)
            groups += len(differing["uid"].unique())
            if groups >= wanted or count >= self._limit:
                break
            current = self._refill()
        self.run.record({"rollout/gen_batches": float(count), "rollout/kept_groups": float(min(groups, wanted))})
        if groups:
            batch = join_groups(batches, wanted)
        else:
            logger.warning("step %d: no group of %d batches has scores that differ", self.run.step, count)
        self.run.emit_batch(self.run.hook.on_batch_after_reward, batch)
        return batch

    def _refill(self) -> DataProto:
        """Return the rows of further prompts as they reach this stage; their metrics do not count."""
        run = self.run
        batch = run.draw_prompts()
        with run.recorder.muted():
            for place, stage in zip(run.settings.places, run.stages, strict=True):
                if stage is self:
                    break
                batch = run.run_stage(place, stage, batch)
        return batch


class KlInReward(TrainingStage):
    """Stage that writes ``token_level_rewards``, jagged float32: the scores minus ``coefficient * penalty`` at each
    token.
    """

    phase: ClassVar[str] = "advantage"

    @classmethod
    def declare(cls, settings: RunSettings) -> StageSpec | None:
        algorithm: AlgorithmConfig = settings.section("algorithm", AlgorithmConfig)
        if not algorithm.use_kl_in_reward:
            return None
        name = algorithm.kl_penalty
        penalty = kl_penalties.get(name, requested_by="algorithm.kl_penalty")
        if needs_vocabulary(penalty):
            raise CapabilityError(
                f"algorithm.kl_penalty={name} needs the log-probs of the whole vocabulary; in the reward only "
                "penalties of the sampled tokens are possible, such as k1"
            )
        return StageSpec(
            reads=("token_level_scores", "response_mask", "old_log_probs", "ref_log_prob"),
            writes=("token_level_rewards",),
        )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        algorithm: AlgorithmConfig = run.section("algorithm", AlgorithmConfig)
        self._penalty = kl_penalties.get(algorithm.kl_penalty)
        settings = KlControllerSettings(algorithm.kl_coef, algorithm.target_kl, algorithm.horizon)
        self._controller = kl_controllers.get(algorithm.kl_controller)(settings)

    def __call__(self, batch: DataProto) -> DataProto:
        scores = Jagged.of(batch["token_level_scores"])
        inside = Jagged.of(batch["response_mask"]).values.bool()
        log_probs = batch.local(["old_log_probs", "ref_log_prob"])
        # Zero the positions outside the mask first, so that no NaN or infinity survives there. A penalty of sampled
        # tokens is elementwise, so all tokens can form one row.
        old, ref = (
            Jagged.of(log_probs[name]).values.masked_fill(~inside, 0.0).unsqueeze(0)
            for name in ("old_log_probs", "ref_log_prob")
        )
        estimate = self._penalty(old, ref)
        check_columns(self._penalty, {"estimates": estimate}, old)
        penalty = estimate.squeeze(0).masked_fill(~inside, 0.0)
        coefficient = self._controller.value
        mean = float(penalty.sum()) / max(float(inside.sum()), 1.0)
        if math.isfinite(mean):
            self._controller.update(mean, len(batch))
        else:
            logger.warning(
                "step %d: the mean KL penalty is %s, because log-probs of the actor or the reference are not finite; "
                "the penalty's weight stays %g",
                self.run.step,
                mean,
                coefficient,
            )
        self.run.record({"actor/reward_kl_penalty": mean, "actor/kl_coef": coefficient})
        return batch.with_columns({"token_level_rewards": scores.like(scores.values - coefficient * penalty)})

    def state_dict(self) -> dict[str, Any]:
        return self._controller.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._controller.load_state_dict(state)
