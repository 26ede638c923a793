"""The stages ``agent_rollout``, which replaces ``rollout``, and ``save_trajectories``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import torch

from rollcast.contracts.rollout import MULTI_MODAL_DATA, ROUTED_EXPERTS, SamplingParams
from rollcast.contracts.stage import StageSpec
from rollcast.errors import CapabilityError, ConfigError
from rollcast.protocol import DataProto, Jagged
from rollcast_agents.host import HostSetup, check_names
from rollcast_agents.records import Record, decode_segments, record_path, save_records
from rollcast_agents.schemas import AgentConfig
from rollcast_agents.training.manager import AgentLoopManager, Rollouts, refuse_if_empty
from rollcast_agents.training.metrics import agent_metrics
from rollcast_agents.training.worker import AgentWorkerSetup
from rollcast_serving.launcher import ReplicaAddress
from rollcast_trainer.api import (
    GENERATED,
    PROMPT,
    BackgroundRollouts,
    PromptGroup,
    Role,
    RoleSetup,
    Run,
    RunSettings,
    TrainingStage,
    age_metrics,
    numbered,
    refuse_without_replicas,
    rollout_log_probs_serve,
    routes_of,
)

__all__ = ["AgentGenerator", "AgentRollout", "SaveTrajectories"]

#: Role of workers that run loops with replicas.
AGENT_LOOP = "agent_loop"
#: Role of workers that run loops with the actor's rollout, in its processes.
IN_PROCESS = "agent_loop_in_process"
_NEW = ("rollout_index", "rollout_id", "turn_ids", "environment_scores", "is_scored", "is_final", "messages")
_TASK = ("ground_truth", "data_source", "extra_info")


class AgentGenerator:
    """A generator that runs the agent loop, for training, validation and baselines.

    Args:
        run: the run; started before the first call.
        role: role of the workers.
    """

    def __init__(self, run: Run, role: str) -> None:
        self._run, self._role = run, role
        self._manager: AgentLoopManager | None = None
        self._named = (0, 0)
        self._records: list[Record] = []

    @property
    def manager(self) -> AgentLoopManager:
        """Manager of the run's workers, which must have started."""
        if self._manager is None:
            self._manager = self._build_manager(is_owner=True)
        return self._manager

    def _build_manager(self, is_owner: bool) -> AgentLoopManager:
        def addresses() -> Sequence[ReplicaAddress]:
            self._run.sampler.check_health(is_owner)
            return self._run.sampler.serve()

        return AgentLoopManager(self._run.groups[self._role], addresses if self._role == AGENT_LOOP else None)

    def __call__(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """Return the rows of one rollout per row of prompts, including failed ones."""
        return self.roll_out(prompts, sampling).batch

    def roll_out(self, prompts: DataProto, sampling: SamplingParams) -> Rollouts:
        """Run a rollout for each row of prompts."""
        run = self._run
        step, number = self._named
        self._named = (run.step, number + 1 if step == run.step else 0)
        name = "{}.{}".format(*self._named)
        with run.timeline.replicas_busy("generate"):
            return self.manager.roll_out(
                prompts, run.seeds.draw(len(prompts)), sampling, name, run.settings.trainer.seed
            )

    def roll_out_group(self, group: PromptGroup, sampling: SamplingParams) -> Rollouts:
        """Run the rollouts of one prompt; thread-safe."""
        seed = self._run.settings.trainer.seed
        manager = self._build_manager(is_owner=False)
        with self._run.timeline.replicas_busy("generate"):
            return manager.roll_out(group.rows, group.seeds, sampling, f"group {group.number}", seed)

    def keep(self, rollouts: Rollouts) -> None:
        """Keep training rollouts until they are saved."""
        columns = rollouts.batch.non_tensor_batch
        names = [name for name in _TASK if name in columns]
        self._records += [
            Record(trajectory, {name: columns[name][row] for name in names})
            for row, trajectory in enumerate(rollouts.trajectories)
        ]

    def take(self) -> list[Record]:
        """Return the rollouts that were kept since the last call."""
        records, self._records = self._records, []
        return records


class AgentRollout(TrainingStage):
    """Stage that runs ``rollout.n`` agent rollouts per prompt; rows of a prompt share a ``uid`` (int64 ``[B]``).

    A rollout has one row per trajectory; these rows share a ``rollout_index`` (int64 ``[B]``).
    """

    phase: ClassVar[str] = "generate"

    @classmethod
    def declare(cls, settings: RunSettings) -> StageSpec | None:
        config: AgentConfig = settings.section("agent", AgentConfig)
        if config.loop is None:
            return None
        check_names(config)
        refuse_without_replicas(settings)
        serves = rollout_log_probs_serve(settings)
        routes = [ROUTED_EXPERTS] if routes_of(settings) == "rollout" else []
        checks = serves and settings.actor.log_prob_check_rows > 0
        saves = config.save_trajectories > 0
        return StageSpec(
            reads=(*PROMPT, "raw_prompt"),
            writes=(*GENERATED, *_NEW, *(["old_log_probs"] if serves else []), *routes),
            roles=(Role.ACTOR_ROLLOUT, _role_of(settings)),
            brings=(*(["log_prob_check"] if checks else []), *(["save_trajectories"] if saves else [])),
            replaces=("rollout",),
            is_recorded=True,
        )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._config: AgentConfig = run.section("agent", AgentConfig)
        self._role = _role_of(run.settings)
        self._serves = rollout_log_probs_serve(run.settings)
        self._generator = AgentGenerator(run, self._role)
        run.generator = self._generator
        self._background = BackgroundRollouts(run, self._roll_out) if run.settings.max_staleness else None
        # One thread per group in flight, which waits for the group's workers.
        threads = (run.settings.max_staleness + 1) * run.settings.data.train_batch_size
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="rollcast-agents")

    def needs(self) -> Sequence[RoleSetup]:
        settings = self.run.settings
        data, model = settings.data, settings.model
        host = HostSetup(
            self._config, model.path, data.max_prompt_length + data.max_response_length, model.trust_remote_code
        )
        routing = settings.served.routing() if self._role == AGENT_LOOP else None
        return [RoleSetup(self._role, AgentWorkerSetup(host, routing))]

    def __call__(self, batch: DataProto) -> DataProto:
        if MULTI_MODAL_DATA in batch:
            raise CapabilityError(
                f"the prompts have images (column {MULTI_MODAL_DATA}), which sessions of agent loops do not send; "
                "leave agent.loop unset to generate single responses to images"
            )
        start = time.perf_counter()
        run = self.run
        if self._background is None:
            prompts = batch.with_columns({"uid": torch.arange(len(batch))})
            rollouts = self._generator.roll_out(prompts.repeat(run.settings.rollout.n, interleave=True), run.sampling())
        else:
            rollouts = _together([group.result for group in self._background.take()])
            run.record(age_metrics(rollouts.batch, run.step - 1))
        refuse_if_empty(rollouts, run.step)
        if self._config.save_trajectories > 0:
            self._generator.keep(rollouts)
        generated = self._without_failed(rollouts.batch)
        if self._serves:
            generated = generated.with_columns({"old_log_probs": generated["rollout_log_probs"]})
        tokens = sum(trajectory.sampled_tokens for trajectory in rollouts.trajectories)
        count = max(len(generated["rollout_index"].unique()), 1)
        run.record(
            {
                "rollout/tokens": float(tokens),
                "rollout/response_length_mean": float(Jagged.of(generated["response_mask"]).sums().sum()) / count,
                "rollout/finished": float(generated["finished"].float().mean()),
                "rollout/tokens_per_s": tokens / max(time.perf_counter() - start, 1e-9),
                **agent_metrics(rollouts.trajectories),
            }
        )
        run.emit_batch(run.hook.on_batch_after_rollout, generated)
        return generated

    async def _roll_out(self, group: PromptGroup) -> Rollouts:
        """Return the scored rollouts of one prompt; runs in the event loop of the replicas."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._score_group, group)

    def _score_group(self, group: PromptGroup) -> Rollouts:
        rollouts = self._generator.roll_out_group(group, self.run.sampling())
        return replace(rollouts, batch=self.run.scorer.scored(rollouts.batch))

    def state_dict(self) -> dict[str, Any]:
        return {} if self._background is None else self._background.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._background is not None:
            self._background.load_state_dict(state)

    def _without_failed(self, batch: DataProto) -> DataProto:
        """Return the batch with ``agent.on_failure`` applied; rows without sampled tokens are always removed."""
        failed, mask = batch["rollout_failed"], Jagged.of(batch["response_mask"])
        sampled = mask.sums() > 0
        if self._config.on_failure == "mask":
            trained = mask.values & failed.logical_not()[mask.rows]
            batch = batch.with_columns({"response_mask": mask.like(trained)})
        else:
            sampled &= failed.logical_not()
        return batch if bool(sampled.all()) else batch.select_idxs(sampled.nonzero().flatten())


def _together(parts: Sequence[Rollouts]) -> Rollouts:
    """Return the groups of a step as one batch."""
    batch = DataProto.concat(list(numbered([part.batch for part in parts])))
    sources, rows = [], 0
    for part in parts:
        sources += [rows + source for source in part.sources]
        rows += max(part.sources, default=-1) + 1
    return Rollouts(batch, [trajectory for part in parts for trajectory in part.trajectories], sources)


class SaveTrajectories(TrainingStage):
    """Stage that saves the step's trajectories with their scores to a file; see :mod:`rollcast_agents.records`."""

    @classmethod
    def declare(cls, settings: RunSettings) -> StageSpec | None:
        config: AgentConfig = settings.section("agent", AgentConfig)
        if config.loop is None or config.save_trajectories < 1:
            return None
        return StageSpec(
            reads=("token_level_scores", "rollout_id"),
            after=("reward", "filter_groups", "kl_in_reward"),
            is_recorded=True,
        )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._config: AgentConfig = run.section("agent", AgentConfig)

    def __call__(self, batch: DataProto) -> DataProto:
        generator = self.run.generator
        if not isinstance(generator, AgentGenerator):
            raise ConfigError(
                "trainer.stages: save_trajectories saves the samples of agent_rollout, which is not in the list"
            )
        records = generator.take()
        if self.run.step % self._config.save_trajectories == 0:
            scores = _scores(batch)
            path = record_path(self.run.settings.run_dir, self.run.step)
            save_records(path, (self._finished(record, scores) for record in records))
        return batch

    def _finished(self, record: Record, scores: Mapping[str, float]) -> Record:
        """Return the record with its score and the text of each segment."""
        texts = decode_segments(record.trajectory, self.run.settings.tokenizer)
        return replace(record, score=scores.get(record.trajectory.rollout_id), texts=texts)


def _scores(batch: DataProto) -> dict[str, float]:
    """Return rollout id → sum of the scores of its rows."""
    totals: dict[str, float] = {}
    sums = Jagged.of(batch["token_level_scores"]).sums().tolist()
    for rollout_id, score in zip(batch.non_tensor_batch["rollout_id"], sums, strict=True):
        totals[rollout_id] = totals.get(rollout_id, 0.0) + score
    return totals


def _role_of(settings: RunSettings) -> str:
    """Return the role of the workers that run the loops.

    Raises:
        ConfigError: loops must run in the actor's processes, but are placed elsewhere.
    """
    if settings.uses_replicas:
        return AGENT_LOOP
    if settings.has_own_pool(IN_PROCESS):
        raise ConfigError(
            f"placement.mapping.{IN_PROCESS} is another pool than the actor's, but rollout.name="
            f"{settings.rollout.name} with rollout.weight_sync={settings.rollout.weight_sync} generates in the actor's "
            f"processes, and its agents run in them too; remove {IN_PROCESS} from placement.mapping"
        )
    return IN_PROCESS
