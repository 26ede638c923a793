"""The advantage estimator."""

from __future__ import annotations

from typing import ClassVar

from rollcast.contracts.algorithm import AdvantageInputs, advantages, needs_of
from rollcast.contracts.engine import engines
from rollcast.contracts.stage import Stage, StageSpec
from rollcast.errors import CapabilityError, ConfigError
from rollcast.protocol import DataProto
from rollcast_algorithms.schemas import AlgorithmConfig
from rollcast_trainer.batch.mini_batches import without_advantage
from rollcast_trainer.run.training_run import TrainingRun

__all__ = ["Advantage"]

#: Columns that the engine of a role computes only if it can: column to section and capability.
_CAPABILITIES = {"sum_pi_squared": ("actor", "sum_pi_squared"), "values": ("critic", "value_model")}


class Advantage(Stage):
    """``advantages`` and ``returns`` float32 ``[B, T]`` of the estimator ``algorithm.adv_estimator``."""

    run: TrainingRun
    phase: ClassVar[str] = "advantage"

    @classmethod
    def declare(cls, run: TrainingRun) -> StageSpec:
        algorithm: AlgorithmConfig = run.section("algorithm", AlgorithmConfig)
        name = algorithm.adv_estimator
        needs = needs_of(advantages.get(name))
        if needs.compares_samples and run.task.rollout.n < 2:
            raise ConfigError(
                f"algorithm.adv_estimator={name} compares the samples of a prompt with each other, "
                f"but rollout.n is {run.task.rollout.n}; set rollout.n to 2 or more"
            )
        for column, (section, capability) in _CAPABILITIES.items():
            engine = run.task.role_engine(section).name
            if column in needs.columns and not getattr(engines.get(engine).capabilities, capability):
                raise CapabilityError(
                    f"algorithm.adv_estimator={name} needs {column}, which {section}.engine.name={engine} cannot give"
                )
        weights = ["rollout_is_weights"] if algorithm.rollout_correction.rollout_is is not None else []
        return StageSpec(
            reads=("token_level_rewards", "response_mask", "uid", *sorted(needs.columns), *weights),
            optional=("old_log_probs", *sorted(needs.optional)),
            writes=("advantages", "returns"),
        )

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        self._algorithm: AlgorithmConfig = run.section("algorithm", AlgorithmConfig)
        self._estimator = advantages.get(self._algorithm.adv_estimator)
        self._needs = needs_of(self._estimator)

    def __call__(self, batch: DataProto) -> DataProto:
        algorithm = self._algorithm
        output = self._estimator(
            AdvantageInputs(
                token_level_rewards=batch["token_level_rewards"],
                response_mask=batch["response_mask"],
                group_ids=batch["uid"],
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
                options=algorithm.adv_kwargs,
                columns=self._needs.select(dict(batch)),
            )
        )
        found = batch.with_columns({"advantages": output.advantages, "returns": output.returns})
        self.run.record({"actor/zero_advantage_rows": float(without_advantage(found).float().mean())})
        if "values" in found:
            inside = found["response_mask"].bool()
            left = (output.returns - found["values"])[inside].var()
            explained = 1 - left / output.returns[inside].var().clamp(min=1e-8)
            self.run.record({"critic/explained_variance": float(explained)})
        self.run.emit_batch("on_batch_after_advantage", found)
        return found
