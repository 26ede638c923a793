"""Log-probs of the sampled tokens under the policy before the update and under the reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from omegaconf import OmegaConf

from rollcast.contracts.engine import engines
from rollcast.contracts.rollout import ROUTED_EXPERTS
from rollcast.contracts.stage import StageSpec
from rollcast.errors import CapabilityError, ConfigError
from rollcast.protocol import DataProto, Jagged
from rollcast_algorithms.rollout_correction import correct_rollout, may_bypass
from rollcast_serving.requests import configured_sampling, cut_keys
from rollcast_trainer.batch.columns import MODEL, POLICY_GAP, model_columns
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import RunSettings
from rollcast_trainer.run.setups import ModelNeeds, TrainingStage
from rollcast_trainer.stages.policy_gap import (
    KEPT,
    acts,
    correction_columns,
    correction_of,
    log_prob_metrics,
    rollout_log_probs_serve,
    routes_of,
)
from rollcast_trainer.workers.actor import ActorRolloutRefWorker
from rollcast_trainer.workers.reference import RefWorker
from rollcast_trainer.workers.roles import Role

__all__ = [
    "OldLogProb",
    "RefLogProb",
    "RolloutCorrection",
    "add_old_log_probs",
    "compute_log_prob",
    "reference_needs",
]


def add_old_log_probs(run: Run, batch: DataProto) -> DataProto:
    """Return the batch with ``old_log_probs`` and further columns if a stage reads them; record the log-prob gap."""
    records = routes_of(run.settings) == "actor"
    asked = {**{name: run.settings.is_read(name) for name in ("sum_pi_squared", "entropy")}, ROUTED_EXPERTS: records}
    writes = ["old_log_probs", *(name for name, wanted in asked.items() if wanted)]
    if records and ROUTED_EXPERTS in batch:
        batch = batch.drop([ROUTED_EXPERTS])  # recorded by the rollout
    output, tokens = compute_log_prob(run, batch, writes), int(Jagged.of(batch["response_mask"]).values.sum())
    run.recorder.record_later(lambda: log_prob_metrics(tokens, output))
    return batch.joined(output.select(writes))


def compute_log_prob(run: Run, batch: DataProto, writes: Iterable[str] = ("old_log_probs",)) -> DataProto:
    """Return ``old_log_probs`` of the policy, jagged float32, and further columns that the setup asks for.

    If the batch has ``rollout_log_probs``, the columns ``POLICY_GAP`` (float32 ``[B]``) are returned too; they hold the
    per-row sums that the metrics need. If it has ``routed_experts``, the pass replays them.
    """
    optional = [name for name in ("rollout_log_probs", ROUTED_EXPERTS) if name in batch]
    columns = [*writes, *(POLICY_GAP if "rollout_log_probs" in optional else ())]
    rows = batch.select([*model_columns(batch), *optional])
    return run.actor.infer(ActorRolloutRefWorker.compute_log_prob, rows, columns)


class OldLogProb(TrainingStage):
    """Stage that writes ``old_log_probs``, jagged float32, and ``sum_pi_squared``, ``entropy`` and ``routed_experts``
    if needed.
    """

    phase: ClassVar[str] = "old_log_prob"

    @classmethod
    def declare(cls, settings: RunSettings) -> StageSpec:
        bypasses = correction_of(settings).bypass_mode
        others = bypasses or rollout_log_probs_serve(settings)
        gives = settings.engine_class.capabilities.sum_pi_squared
        return StageSpec(
            reads=("rollout_log_probs",),
            writes=(
                *([] if others else ["old_log_probs"]),
                *(["sum_pi_squared"] if gives else []),
                "entropy",
                *([ROUTED_EXPERTS] if routes_of(settings) == "actor" else []),
            ),
            roles=(Role.ACTOR_ROLLOUT,),
            after=("filter_groups",),
        )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._writes_old = "old_log_probs" in self.declare(run.settings).writes

    def needs(self) -> Sequence[ModelNeeds]:
        settings = self.run.settings
        squared, records = settings.is_read("sum_pi_squared"), routes_of(settings) == "actor"
        return [ModelNeeds(Role.ACTOR_ROLLOUT, sum_pi_squared=squared, routing=records)]

    def __call__(self, batch: DataProto) -> DataProto:
        with_old = add_old_log_probs(self.run, batch.drop(["old_log_probs"]) if "old_log_probs" in batch else batch)
        return with_old if self._writes_old else with_old.joined(batch.select(["old_log_probs"]), overwrite=True)


def _refuse_cut_distributions(settings: RunSettings) -> None:
    """Check that ``bypass_mode`` may use the rollout's log-probs as the policy's.

    It may not if top-p or a similar key truncates the distribution: the rollout's log-probs are then renormalized to
    larger probabilities, and as ``old_log_probs`` they would make every ratio too small.

    Raises:
        ConfigError: a key of the rollout changes the distribution; the message names it.
    """
    cuts = cut_keys(configured_sampling(settings.rollout, 1))
    if cuts:
        values = ", ".join(f"rollout.{name}={getattr(settings.rollout, name)}" for name in cuts)
        raise ConfigError(
            "algorithm.rollout_correction.bypass_mode uses the rollout's log-probs as the policy's, but with "
            f"{values} they belong to another distribution; leave these keys at their defaults, or set "
            "bypass_mode=false"
        )


class RolloutCorrection(TrainingStage):
    """Stage that weights and rejects tokens by the gap between the log-probs of rollout and actor.

    With ``bypass_mode`` this stage also decides, from the gap that was last measured, whether the step computes
    ``old_log_probs`` or uses the rollout's. The gap is saved in checkpoints.
    """

    phase: ClassVar[str] = "old_log_prob"

    @classmethod
    def declare(cls, settings: RunSettings) -> StageSpec | None:
        config = correction_of(settings)
        if not acts(config):
            return None
        columns = correction_columns(config)
        if config.bypass_mode:
            _refuse_cut_distributions(settings)
            return StageSpec(reads=("rollout_log_probs",), writes=("old_log_probs", *columns), roles=("actor_rollout",))
        return StageSpec(reads=("rollout_log_probs", "old_log_probs"), writes=columns)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._config = correction_of(run.settings)
        self._last_gap: float | None = None
        self._steps_since = 0

    def __call__(self, batch: DataProto) -> DataProto:
        if not self._config.bypass_mode:
            return self._correct(batch)
        self._steps_since += 1
        if may_bypass(self._config, self._last_gap, self._steps_since):
            return self._bypass(batch)
        return self._correct(add_old_log_probs(self.run, batch))

    def _bypass(self, batch: DataProto) -> DataProto:
        """Return the batch with the rollout's log-probs as the old ones, and therefore with all weights 1."""
        old = batch.select(["rollout_log_probs"], []).rename({"rollout_log_probs": "old_log_probs"})
        mask = Jagged.of(batch["response_mask"])
        columns = {KEPT: mask.column()}
        if self._config.rollout_is is not None:
            columns["rollout_is_weights"] = mask.like(mask.values.bool().float())
        return batch.joined(old, overwrite=True).with_columns(columns)

    def _correct(self, batch: DataProto) -> DataProto:
        """Return the batch with importance weights and the mask of the kept tokens.

        Raises:
            ConfigError: a key of ``algorithm.rollout_correction`` is not valid.
        """
        mask = Jagged.of(batch["response_mask"])
        log_probs = batch.local(["old_log_probs", "rollout_log_probs"])
        old, rollout = (Jagged.of(log_probs[name], name) for name in ("old_log_probs", "rollout_log_probs"))
        try:
            correction = correct_rollout(old, rollout, mask, self._config)
        except ValueError as error:
            raise ConfigError(f"algorithm.rollout_correction: {error}") from error
        self._last_gap, self._steps_since = correction.metrics["rollout_corr/k3_kl"], 0
        self.run.record(correction.metrics)
        columns = {KEPT: correction.response_mask.column()}
        if correction.weights is not None:
            columns["rollout_is_weights"] = correction.weights.column()
        return batch.with_columns(columns)

    def state_dict(self) -> dict[str, Any]:
        return {"last_gap": self._last_gap, "steps_since": self._steps_since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last_gap, self._steps_since = state["last_gap"], int(state["steps_since"])


def reference_needs(settings: RunSettings) -> ModelNeeds:
    """Return the needs of passes through the reference."""
    return ModelNeeds(
        Role.REF, micro_batch_size=settings.actor.log_prob_micro_batch_size_per_gpu, offload=_offloads(settings)
    )


def _offloads(settings: RunSettings) -> bool:
    return bool(OmegaConf.select(settings.config, "ref.engine.param_offload", default=False))


def check_offload(settings: RunSettings) -> None:
    """Check that the reference's engine can offload if ``ref.engine.param_offload`` is set.

    Raises:
        CapabilityError: it cannot; the message names the engine.
    """
    name = settings.role_engine("ref").name
    if _offloads(settings) and not engines.get(name).capabilities.offload:
        raise CapabilityError(f"ref.engine.param_offload is true, but the engine {name} cannot move its weights")


class RefLogProb(TrainingStage):
    """Stage that writes ``ref_log_prob``, jagged float32: log-probs under the reference policy."""

    phase: ClassVar[str] = "ref_log_prob"
    spec: ClassVar[StageSpec] = StageSpec(
        reads=MODEL, writes=("ref_log_prob",), roles=(Role.REF,), after=("filter_groups",)
    )

    @classmethod
    def declare(cls, settings: RunSettings) -> StageSpec:
        check_offload(settings)
        return cls.spec

    def needs(self) -> Sequence[ModelNeeds]:
        return [reference_needs(self.run.settings)]

    def __call__(self, batch: DataProto) -> DataProto:
        reference, rows = self.run.role_group(Role.REF), batch.select(model_columns(batch))
        return batch.joined(reference.infer(RefWorker.compute_ref_log_prob, rows, ["ref_log_prob"]))
