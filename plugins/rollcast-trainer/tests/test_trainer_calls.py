"""Batches between stages: what the driver fetches in a step, and which calls do not wait for each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_tools import SmallTask, run_stages, set_up

from rollcast import register
from rollcast.contracts.stage import roles
from rollcast.errors import WorkerError
from rollcast.protocol import Cut, DataProto, Jagged
from rollcast_dispatch import make_nd_compute_dataproto_dispatch_fn
from rollcast_trainer.batch.mini_batches import UpdatePlan
from rollcast_trainer.workers.actor import ActorRolloutRefWorker
from rollcast_trainer.workers.critic import CriticWorker
from rollcast_trainer.workers.reference import RefWorker

PPO = [
    "algorithm=gae",
    "actor.use_kl_loss=true",
    "actor.log_prob_check_rows=-1",
    "runtime=ray",
    "runtime.threads_per_worker=1",
]
#: Bytes of a token of the columns that the driver computes with in a step of PPO: masks for lengths and estimator,
#: responses for the reward's text, values for the estimator.
TOKENS_READ = {"response_mask": 1, "responses": 4, "values": 4}
#: One number a row, for metrics and the reward.
ROWS_READ = {"finished", "entropy_sum", "log_prob_gap_sum", "log_prob_gap_max"}
#: Longest that a worker waits for another that does not come; a run in which they meet does not wait.
_PATIENCE_S = 60.0


class Fetched:
    """Counts the bytes of each column that goes from the store of a runtime to the driver."""

    def __init__(self, runtime: Any) -> None:
        self.columns: dict[str, int] = {}
        self._fetch: Callable[..., list[Any]] = runtime.fetch_rows
        runtime.fetch_rows = self

    def __call__(self, cuts: Sequence[Cut], timeout: float | None) -> list[Any]:
        found = self._fetch(cuts, timeout)
        for cut, kept in zip(cuts, found, strict=True):
            for name in cut.columns or ():
                column = kept.columns[name]
                tokens = Jagged.of(column).values if column.layout == torch.jagged else column
                self.columns[name] = self.columns.get(name, 0) + tokens.nbytes
        return found


@pytest.mark.long
@pytest.mark.exhaustive
def test_the_driver_fetches_the_columns_that_it_computes_with(
    small_task: SmallTask, ray_is_up: None, tmp_path: Path
) -> None:
    with set_up(small_task.ppo(tmp_path, *PPO)) as trainer:
        fetched = Fetched(trainer.run.actor.group.runtime)
        batch = run_stages(trainer)
        trainer.run.recorder.take()
        assert batch.is_remote
        assert fetched.columns.keys() == TOKENS_READ.keys() | ROWS_READ
        tokens = int(Jagged.of(batch["response_mask"]).values.numel())
        # Each column of tokens comes once, though several stages read it.
        assert {name: fetched.columns[name] for name in TOKENS_READ} == {
            name: size * tokens for name, size in TOKENS_READ.items()
        }


class Meeting:
    """Two calls of different processes, each of which ends only after both have begun."""

    folder: Path

    def meet(self, name: str, other: str) -> None:
        (self.folder / name).touch()
        if (self.folder / f"fail {name}").exists():
            raise RuntimeError(f"{name} was told to fail")
        end = time.monotonic() + _PATIENCE_S
        while not (self.folder / other).exists():
            if time.monotonic() > end:
                raise RuntimeError(f"{name} has begun, and {other} waits for its end")
            time.sleep(0.01)


@pytest.mark.long
def test_calls_to_pools_of_their_own_run_at_the_same_time(
    small_task: SmallTask, ray_is_up: None, tmp_path: Path
) -> None:
    """Values beside the reference's log-probs, and the critic's update beside the actor's, whose failures are theirs."""
    place = tmp_path / "meeting"
    place.mkdir()

    class MeetingRef(Meeting, RefWorker):
        folder = place

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("ref"), rows="same")
        def compute_ref_log_prob(self, data: DataProto) -> DataProto:
            self.meet("ref_log_prob", "values")
            return super().compute_ref_log_prob(data)

    class MeetingCritic(Meeting, CriticWorker):
        folder = place

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"), rows="same")
        def compute_values(self, data: DataProto) -> DataProto:
            self.meet("values", "ref_log_prob")
            return super().compute_values(data)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"))
        def update_critic(self, data: DataProto, plan: UpdatePlan) -> list[dict[str, float]]:
            self.meet("update_critic", "update_actor")
            return super().update_critic(data, plan)

    class MeetingActor(Meeting, ActorRolloutRefWorker):
        folder = place

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
        def update_actor(self, data: DataProto, plan: UpdatePlan) -> list[dict[str, float]]:
            self.meet("update_actor", "update_critic")
            return super().update_actor(data, plan)

    apart = ["placement.pools={critics: [1], refs: [1]}", "placement.mapping={critic: critics, ref: refs}"]
    with (
        roles.temporarily("ref", MeetingRef),
        roles.temporarily("critic", MeetingCritic),
        roles.temporarily("actor_rollout", MeetingActor),
        set_up(small_task.ppo(tmp_path / "run", *PPO, *apart)) as trainer,
    ):
        batch = trainer.run_stages(trainer.run.draw_prompts())
        assert {"ref_log_prob", "values"} <= set(batch.keys())
        assert {path.name for path in place.iterdir()} == {"ref_log_prob", "values", "update_critic", "update_actor"}
        metrics, line = trainer.run.recorder.take(), trainer.run.timeline.take()
        assert {"critic/grad_norm", "actor/grad_norm", "time/update_critic_s", "time/update_actor_s"} <= set(metrics)
        ((critic_start, critic_end),) = line["pools"]["critics"]["calls"]["update_critic"]
        ((actor_start, actor_end),) = line["pools"]["global_pool"]["calls"]["update_actor"]
        assert max(critic_start, actor_start) < min(critic_end, actor_end)
        (place / "fail update_critic").touch()
        with pytest.raises(WorkerError, match=r"update_critic .*\n?.*was told to fail"):
            trainer.train_step()
        assert trainer.step == 0 and "time/step_s" not in trainer.metrics
