"""Generation: responses to the step's prompts, greedy baselines, and the check of the rollout's log-probs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from rollcast.contracts.rollout import MULTI_MODAL_DATA, ROUTED_EXPERTS
from rollcast.contracts.stage import StageSpec
from rollcast.errors import CapabilityError
from rollcast.protocol import DataProto, Jagged
from rollcast_serving.manager import Stragglers
from rollcast_trainer.batch.columns import DATA, GENERATED, PROMPT, prompt_columns
from rollcast_trainer.batch.groups import first_rows
from rollcast_trainer.run.background_rollouts import (
    BackgroundRollouts,
    PromptGroup,
    age_metrics,
    numbered,
    refuse_without_replicas,
    replicas_of,
)
from rollcast_trainer.run.run import Run
from rollcast_trainer.run.settings import RunSettings
from rollcast_trainer.run.setups import TrainingStage
from rollcast_trainer.stages.log_probs import compute_log_prob
from rollcast_trainer.stages.policy_gap import log_prob_metrics, rollout_log_probs_serve, routes_of
from rollcast_trainer.workers.roles import Role

__all__ = ["LogProbCheck", "RewardBaselines", "Rollout"]


class Rollout(TrainingStage):
    """Stage that generates ``rollout.n`` responses for each prompt; rows of a prompt share a ``uid`` (int64
    ``[B]``).
    """

    phase: ClassVar[str] = "generate"

    @classmethod
    def declare(cls, settings: RunSettings) -> StageSpec:
        refuse_without_replicas(settings)
        _refuse_stragglers(settings)
        serves = rollout_log_probs_serve(settings)
        routes = [ROUTED_EXPERTS] if routes_of(settings) == "rollout" else []
        checks = serves and settings.actor.log_prob_check_rows > 0
        return StageSpec(
            reads=PROMPT,
            writes=(*GENERATED, *(["old_log_probs"] if serves else []), *routes),
            roles=(Role.ACTOR_ROLLOUT,),
            brings=("log_prob_check",) if checks else (),
            is_recorded=True,
        )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._serves = rollout_log_probs_serve(run.settings)
        stragglers = run.settings.rollout.stragglers
        self._stragglers = Stragglers(stragglers.share, stragglers.grace_s) if stragglers.share else None
        self._background = BackgroundRollouts(run, self._roll_out) if run.settings.max_staleness else None

    def __call__(self, batch: DataProto) -> DataProto:
        start = time.perf_counter()
        if self._background is None:
            prompts = batch.with_columns({"uid": torch.arange(len(batch))})
            rows = prompts.repeat(self.run.settings.rollout.n, interleave=True)
            generated = self.run.respond(rows, self.run.sampling(), self._stragglers)
        else:
            generated = DataProto.concat(list(numbered([group.result for group in self._background.take()])))
            self.run.record(age_metrics(generated, self.run.step - 1))
        if self._serves:
            old = generated.select(["rollout_log_probs"], []).rename({"rollout_log_probs": "old_log_probs"})
            generated = generated.joined(old)
        lengths = Jagged.of(generated["response_mask"]).sums().float()
        tokens = float(lengths.sum())
        self.run.record(
            {
                "rollout/tokens": tokens,
                "rollout/response_length_mean": float(lengths.mean()),
                "rollout/finished": float(generated["finished"].float().mean()),
                "rollout/tokens_per_s": tokens / max(time.perf_counter() - start, 1e-9),
                **self.run.sampler.take_metrics(),
            }
        )
        self.run.emit_batch(self.run.hook.on_batch_after_rollout, generated)
        return generated

    async def _roll_out(self, group: PromptGroup) -> DataProto:
        """Return the scored responses to one prompt; runs in the event loop of the replicas."""
        run, replicas = self.run, replicas_of(self.run)
        prompts = group.rows.select(prompt_columns(group.rows)).with_columns({"seed": group.seeds})
        with run.timeline.replicas_busy(self.phase):
            output = await replicas.respond(prompts, run.sampling(), stragglers=self._stragglers)
        return await asyncio.to_thread(run.scorer.scored, group.rows.drop(PROMPT).joined(output))

    def state_dict(self) -> dict[str, Any]:
        return {} if self._background is None else self._background.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._background is not None:
            self._background.load_state_dict(state)


def _refuse_stragglers(settings: RunSettings) -> None:
    """Check that the rollout can cut responses if ``rollout.stragglers.share`` is set.

    Raises:
        CapabilityError: it cannot; the message names the keys.
    """
    rollout, share = settings.rollout, settings.rollout.stragglers.share
    if share and not (settings.uses_replicas and settings.rollout_class.capabilities.abort):
        raise CapabilityError(
            f"rollout.stragglers.share={share:g} cuts responses at replicas, but rollout.name={rollout.name} with "
            f"rollout.weight_sync={rollout.weight_sync} cannot abort single ones (capabilities.abort); choose a "
            "weight sync that sends to replicas, such as shared_memory, or leave the key out"
        )


class LogProbCheck(TrainingStage):
    """Stage that measures the log-prob gap between rollout and actor, and the entropy, on some rows of the batch."""

    phase: ClassVar[str] = "old_log_prob"
    spec: ClassVar[StageSpec] = StageSpec(reads=("rollout_log_probs",), roles=(Role.ACTOR_ROLLOUT,))

    def __call__(self, batch: DataProto) -> DataProto:
        count = min(self.run.settings.actor.log_prob_check_rows, len(batch))
        # Rows of different prompts; a deterministic choice, so that a resumed run selects the same.
        rows = batch.select_idxs(torch.arange(count) * len(batch) // max(count, 1))
        output, tokens = compute_log_prob(self.run, rows), int(Jagged.of(rows["response_mask"]).values.sum())
        self.run.recorder.record_later(lambda: log_prob_metrics(tokens, output))
        return batch


class RewardBaselines(TrainingStage):
    """Stage that writes ``reward_baselines``, float32 ``[B]``: the score of a greedy response to each row's prompt."""

    phase: ClassVar[str] = "baseline"
    spec: ClassVar[StageSpec] = StageSpec(
        reads=("uid", "prompts"),
        writes=("reward_baselines",),
        roles=(Role.ACTOR_ROLLOUT,),
        after=("reward",),
        is_recorded=True,
    )

    def __call__(self, batch: DataProto) -> DataProto:
        first, place = first_rows(batch)
        columns = [*PROMPT, *(name for name in (*DATA[len(PROMPT) :], "index", MULTI_MODAL_DATA) if name in batch)]
        prompts = batch.select(columns).select_idxs(first)
        greedy = replace(self.run.sampling(), temperature=0.0)
        scored = self.run.scorer.score(self.run.generate(prompts, greedy))
        scores = scored.rollout_scores[scored.final]
        self.run.record({"reward/baseline_mean": float(scores.mean())})
        return batch.with_columns({"reward_baselines": scores[place]})
