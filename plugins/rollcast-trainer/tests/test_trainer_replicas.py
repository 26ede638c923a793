"""Training with replicas: the same run as in one process, wherever they stand, and whatever dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from trainer_tools import SmallTask, launch, read_metrics, set_up

from rollcast.errors import WeightSyncError
from rollcast_trainer.ppo import PpoTrainer

pytestmark = pytest.mark.long

REPLICAS = ["rollout.mode=colocated", "rollout.replica.env={OMP_NUM_THREADS: '1'}", "trainer.total_steps=2"]
SHARED = [*REPLICAS, "rollout.weight_sync=shared_memory"]
ON_RAY = ["runtime=ray", "runtime.threads_per_worker=1"]
STANDALONE = [
    "rollout.mode=standalone",
    "placement.pools={rollouts: [2]}",
    "placement.mapping={rollout: rollouts}",
]

#: Metrics of the engines' load, which only replicas tell.
LOAD = {
    *("rollout/running_max", "rollout/waiting_max", "rollout/window"),
    *("rollout/kv_cache_usage_max", "rollout/preemptions"),
}


def of_the_run(row: dict[str, Any]) -> dict[str, float]:
    """What does not depend on how the weights travelled, nor on the clock."""
    return {
        key: value
        for key, value in row.items()
        if not key.startswith(("time/", "perf/", "sync/", "rollout/logprob_gap"))
        and not key.endswith("_per_s")
        and key not in LOAD
    }


def children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "rollcast_serving.process" in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def in_process(small_task: SmallTask, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("in_process")
    # Replicas have their old log-probs computed, for all rows.
    launch(small_task.ppo(folder, "trainer.total_steps=2", "actor.log_prob_check_rows=-1"))
    return read_metrics(folder)


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 60.0  # Ray's workers, and replicas with them, end by themselves
    while (left := children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "changes",
    [
        ["rollout.weight_sync=shared_memory", "rollout.update_weights_bucket_megabytes=1"],
        ["rollout.weight_sync=collective", "rollout.mode=hybrid"],
        ["rollout.weight_sync=disk"],
        ["rollout.weight_sync=delta"],
        ["rollout.weight_sync=shared_memory", *ON_RAY, *STANDALONE],
        ["rollout.weight_sync=collective", *ON_RAY, *STANDALONE],
    ],
    ids=["shared_memory", "collective", "disk", "delta", "standalone", "standalone-collective"],
)
def test_the_same_run(
    small_task: SmallTask,
    tmp_path: Path,
    in_process: list[dict[str, Any]],
    changes: list[str],
    request: pytest.FixtureRequest,
) -> None:
    if "runtime=ray" in changes:
        request.getfixturevalue("ray_is_up")
    folder = tmp_path / "weights"
    launch(small_task.ppo(tmp_path, *REPLICAS, *changes, f"rollout.sync_folder={folder}"))
    assert folder.exists() == (bool({"rollout.weight_sync=disk", "rollout.weight_sync=delta"} & set(changes)))
    rows = read_metrics(tmp_path)
    assert rows[-1]["rollout/window"] % 1024 == 0 < rows[-1]["rollout/window"]  # rollout.max_batch_size for each
    assert len(rows) == len(in_process)
    for row, expected in zip(rows, in_process, strict=True):
        assert of_the_run(row) == pytest.approx(of_the_run(expected), rel=1e-3, abs=1e-5)
        if "reward/mean" in row:
            assert row["rollout/logprob_gap_max"] < 1e-4
            assert row["rollout/weight_version"] == row["step"]
            assert row["sync/canary_gap"] < 1e-4
            assert row["sync/seconds"] >= row["sync/load_seconds"] >= 0
            assert row["sync/GB_per_s"] > 0
    assert list((tmp_path / "logs").glob("replica_*.log"))


@pytest.mark.exhaustive
def test_two_ranks_and_two_replicas_with_one_killed(small_task: SmallTask, ray_is_up: None, tmp_path: Path) -> None:
    """Ranks of the actor resharded into replicas that take turns with it on its pool."""
    two = ["placement.n_gpus_per_node=2", "rollout.mode=hybrid"]
    with set_up(small_task.ppo(tmp_path, *SHARED, *ON_RAY, *two)) as trainer:
        assert len(trainer.run.sampler.replicas.addresses) == 2  # type: ignore[attr-defined]
        before = children()
        assert len(before) == 2
        trainer.train_step()
        os.kill(before[0].pid, signal.SIGKILL)
        trainer.train_step()
        assert trainer.metrics["rollout/weight_version"] == 2
        assert trainer.metrics["rollout/logprob_gap_max"] < 1e-4
        assert len(children()) == 2
        generations = [address.generation for address in trainer.run.sampler.replicas.addresses]  # type: ignore[attr-defined]
        assert sorted(generations) == [0, 1]


def change_actor(trainer: PpoTrainer) -> None:
    engine = trainer.run.actor.group.workers[0].handle.workers[trainer.run.actor.group.role].actor.engine
    with torch.no_grad():
        for _, parameter in engine.get_per_tensor_param():
            parameter.mul_(1.5)


def test_the_canary_notices_stale_weights(
    small_task: SmallTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with set_up(small_task.ppo(tmp_path, *SHARED)) as trainer:
        assert trainer.run.sampler._check_canary() < 1e-4  # type: ignore[attr-defined]
        change_actor(trainer)
        with pytest.raises(WeightSyncError, match=r"replica 0 .*rollout.canary.tolerance=0.05"):
            trainer.run.sampler._check_canary()  # type: ignore[attr-defined]
        monkeypatch.setattr(trainer.run.sampler, "_send", lambda *_: {})  # the weights stay where they are
        with pytest.raises(WeightSyncError, match="canary"):
            trainer.run.sync_weights()
        monkeypatch.undo()
        assert trainer.run.sync_weights()["sync/canary_gap"] < 1e-4


@pytest.mark.exhaustive
def test_a_replica_that_was_killed_comes_back_with_the_present_weights(small_task: SmallTask, tmp_path: Path) -> None:
    with set_up(small_task.ppo(tmp_path, *SHARED)) as trainer:
        change_actor(trainer)
        trainer.run.sync_weights()
        (child,) = children()
        os.kill(child.pid, signal.SIGKILL)
        trainer.train_step()
        assert trainer.metrics["rollout/logprob_gap_max"] < 1e-4


@pytest.mark.exhaustive
def test_sft_validates_with_replicas(small_task: SmallTask, tmp_path: Path) -> None:
    from trainer_tools import launch as run

    run(small_task.sft(tmp_path, *SHARED))
    assert "val/accuracy" in read_metrics(tmp_path)[-1]


@pytest.mark.exhaustive
def test_replicas_in_bfloat16_are_sent_bfloat16(small_task: SmallTask, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_task.model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    with set_up(small_task.ppo(tmp_path / "run", *SHARED, f"model.path={folder}")) as trainer:
        actor = trainer.run.actor.group.workers[0].handle.workers[trainer.run.actor.group.role].actor
        named = list(actor.engine.get_per_tensor_param())
        (outcome,) = trainer.run.actor.group.update_weights(7, list(trainer.run.sampler.replicas.addresses))  # type: ignore[attr-defined]
        assert {tensor.dtype for _, tensor in named} == {torch.float32}
        sent = sum(tensor.numel() * (2 if tensor.dim() > 1 else 4) for _, tensor in named)
        assert (outcome.metrics["sync/tensors"], outcome.metrics["sync/bytes"]) == (len(named), sent)
        trainer.train_step()
        assert 1e-5 < trainer.run.sync_weights()["sync/canary_gap"] < 0.2
