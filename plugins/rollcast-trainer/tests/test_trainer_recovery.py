"""Runs on Ray whose workers are killed: they go on by themselves, as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from trainer_tools import SmallTask, before_stage, launch, read_jsonl, read_metrics, without_times

from rollcast.contracts.runtime import runtimes
from rollcast.contracts.trainer import trainers
from rollcast.errors import CheckpointError, DataError, ResourceError, WorkerError
from rollcast_trainer.ppo import PpoTrainer
from rollcast_trainer.run.recovery import Recoveries

pytestmark = pytest.mark.long

ON_RAY = ["runtime=ray", "runtime.threads_per_worker=1"]


class Killed(PpoTrainer):
    """Kills workers where a test says so, each kill once."""

    #: Step and stage → role and rank that is killed.
    kills: ClassVar[dict[tuple[int, str], tuple[str, int]]] = {}

    def setup(self) -> None:
        super().setup()
        for place in self.run.settings.places:
            before_stage(self, place.name, self._killing(place.name))

    def _killing(self, stage: str) -> Callable[[Any], None]:
        def kill(_: Any) -> None:
            role, rank = type(self).kills.pop((self.step + 1, stage), ("", 0))
            if role:
                os.kill(self.run.groups[role].workers[rank].info.pid, signal.SIGKILL)

        return kill


@pytest.fixture(scope="module")
def ray_is_up() -> Iterator[None]:
    """A Ray that the runs of this module find, so that it starts once."""
    runtime: Any = runtimes.get("ray")
    here = runtime(num_cpus=4)
    here.nodes()
    trainers.register("killed", Killed)
    yield
    trainers.unregister("killed")
    here.shutdown()


@pytest.fixture(scope="module")
def undisturbed(small_task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In this process, which saves the start of a worker; the metrics of one rank are the same on Ray."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    launch(small_task.ppo(run_dir))
    return run_dir


def comparable(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics that have to repeat."""
    rows = without_times(read_metrics(run_dir))
    return [{key: value for key, value in row.items() if not key.startswith("recovery/")} for row in rows]


def test_a_run_goes_on_after_kills_with_and_without_a_checkpoint(
    small_task: SmallTask, undisturbed: Path, ray_is_up: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Killed.kills = {(1, "update_actor"): ("actor_rollout", 0), (4, "rollout"): ("actor_rollout", 0)}
    result = launch(small_task.ppo(tmp_path, *ON_RAY, "trainer.name=killed", "trackers=[jsonl,console,report]"))
    assert result.step == 4
    assert not Killed.kills
    assert comparable(tmp_path) == comparable(undisturbed)
    told = read_jsonl(tmp_path / "recoveries.jsonl")
    assert [(each["number"], each["failed_step"], each["step"]) for each in told] == [(1, 0, 0), (2, 3, 2)]
    assert all("died" in each["reason"] for each in told)
    counts = {row["step"]: row["recovery/count"] for row in read_metrics(tmp_path) if "recovery/count" in row}
    assert counts == {1: 1.0, 3: 2.0}
    out = " ".join(capsys.readouterr().out.split())
    assert "recovery 1 of 3 after step 0, from the beginning, as there is no checkpoint yet" in out
    assert "recovery 2 of 3 after step 3, from checkpoints/step_2" in out
    assert "Recoveries" in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "finished"


@pytest.mark.exhaustive
def test_a_run_goes_on_after_the_loss_of_a_replica_with_its_worker(
    small_task: SmallTask, ray_is_up: None, tmp_path: Path
) -> None:
    Killed.kills = {(2, "update_actor"): ("rollout", 0)}
    replica = ["rollout.mode=standalone", "rollout.weight_sync=shared_memory", "placement.pools={rollouts: [1]}"]
    replica += ["placement.mapping={rollout: rollouts}", "rollout.replica.env={OMP_NUM_THREADS: '1'}"]
    changes = ["trainer.name=killed", *ON_RAY, "data.val_files=[]", *replica]
    assert launch(small_task.ppo(tmp_path, *changes, "trainer.total_steps=2", "trainer.save_freq=1")).step == 2
    assert not Killed.kills
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    assert [each["step"] for each in read_jsonl(tmp_path / "recoveries.jsonl")] == [1]


@pytest.mark.exhaustive
def test_a_run_that_generates_ahead_goes_on_with_the_groups_it_had_drawn(
    small_task: SmallTask, ray_is_up: None, tmp_path: Path
) -> None:
    Killed.kills = {(3, "update_actor"): ("actor_rollout", 0)}
    ahead = ["trainer.max_staleness=1", "rollout.mode=colocated", "rollout.weight_sync=shared_memory"]
    changes = [
        "trainer.name=killed",
        *ON_RAY,
        "data.val_files=[]",
        *ahead,
        "rollout.replica.env={OMP_NUM_THREADS: '1'}",
    ]
    assert launch(small_task.ppo(tmp_path, *changes)).step == 4
    assert not Killed.kills
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert [each["step"] for each in read_jsonl(tmp_path / "recoveries.jsonl")] == [2]


def died(rank: int) -> WorkerError:
    error = WorkerError(f"actor.update_actor failed on rank {rank}: the worker's process died\n  its last lines")
    error.cause_type = "ProcessDied"
    return error


def make_run(run_dir: Path, limit: int) -> Any:
    """What recoveries need of a run that has lost its groups."""
    settings = SimpleNamespace(trainer=SimpleNamespace(max_recoveries=limit), run_dir=run_dir)
    return SimpleNamespace(settings=settings, groups={}, start_step=2, begin_again=lambda: None)


def test_recoveries_are_bounded_and_told(tmp_path: Path) -> None:
    recoveries = Recoveries(make_run(tmp_path, 1))
    assert recoveries.accept(died(1))
    recovery = recoveries.begin(failed_step=3)
    assert recovery.describe() == (
        "recovery 1 of 1 after step 3, from checkpoints/step_2: actor.update_actor failed on rank 1: "
        "the worker's process died"
    )
    assert recovery.metrics()["recovery/steps_repeated"] == 1
    last = died(0)
    assert not recoveries.accept(last)
    assert "trainer.max_recoveries=1" in last.__notes__[0]
    assert [each["reason"] for each in read_jsonl(tmp_path / "recoveries.jsonl")] == [recovery.reason]
    assert not Recoveries(make_run(tmp_path, 0)).accept(died(1))


def test_a_loss_while_a_recovery_starts_repeats_no_step(tmp_path: Path) -> None:
    recoveries = Recoveries(make_run(tmp_path, 1))
    assert recoveries.accept(died(1))
    assert recoveries.begin(failed_step=0).metrics()["recovery/steps_repeated"] == 0


def test_only_a_loss_of_processes_is_recovered_from(tmp_path: Path) -> None:
    recoveries = Recoveries(make_run(tmp_path, 3))
    assert not recoveries.accept(ValueError("a bug"))
    raised = CheckpointError("not written")
    raised.__cause__ = died(0)
    assert recoveries.accept(raised)


@pytest.mark.exhaustive
def test_the_loop_can_run_in_a_process_of_the_cluster(small_task: SmallTask, ray_is_up: None, tmp_path: Path) -> None:
    changes = [*ON_RAY, "trainer.on_driver=false", "trainer.total_steps=1", "trackers=[jsonl,report]"]
    assert launch(small_task.ppo(tmp_path, *changes, "trainer.save_freq=-1", "data.val_files=[]")).step == 1
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "finished"
    assert status["pid"] != os.getpid()


def test_an_error_in_a_process_of_the_cluster_is_raised_here(
    small_task: SmallTask, ray_is_up: None, tmp_path: Path
) -> None:
    changes = [*ON_RAY, "trainer.on_driver=false", "data.train_batch_size=50", "trainer.test_freq=-1"]
    with pytest.raises(DataError, match=r"data\.train_batch_size"):
        launch(small_task.ppo(tmp_path, *changes))


def test_a_runtime_without_other_processes_refuses_the_loop(small_task: SmallTask, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"trainer\.on_driver=true"):
        launch(small_task.ppo(tmp_path, "trainer.on_driver=false"))
