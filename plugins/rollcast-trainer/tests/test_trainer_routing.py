"""Runs that replay the experts of a mixture, whose routers are so nearly tied that rounding chooses among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_tools import SmallTask, launch, read_metrics, set_up

from rollcast.errors import ConfigError, WorkerError
from rollcast_testing.tiny import tiny_model_folder

pytestmark = pytest.mark.long

R2 = ["actor.router_replay.mode=R2"]
R3 = ["actor.router_replay.mode=R3", "rollout.enable_rollout_routing_replay=true"]
#: One row at a time for the old log-probs, and all at once for the update, so that sums are rounded otherwise.
ONE_BY_ONE = ["actor.log_prob_micro_batch_size_per_gpu=1", "actor.ppo_mini_batch_size=4"]
STEPS = ["trainer.total_steps=2", "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.val_before_train=false"]


@pytest.fixture(scope="module")
def tied_task(tmp_path_factory: pytest.TempPathFactory) -> SmallTask:
    folder = tiny_model_folder(tmp_path_factory.mktemp("model") / "mixture", hidden=32, experts=4)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(8)
    for name, tensor in weights.items():
        tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
        if name.endswith("mlp.gate.weight"):
            noise = torch.randn(tensor.shape, generator=generator) * 1e-8
            weights[name] = (tensor[:1].expand_as(tensor) + noise).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return SmallTask.make(tmp_path_factory.mktemp("task"), folder)


def gaps(task: SmallTask, folder: Path, *changes: str) -> list[float]:
    """The largest gap between log-probs of rollout and actor in each step."""
    launch(task.ppo(folder, *STEPS, "actor.log_prob_check_rows=-1", *changes))
    return [row["rollout/logprob_gap_max"] for row in read_metrics(folder) if "rollout/logprob_gap_max" in row]


def test_the_rollout_s_experts_close_the_gap(tied_task: SmallTask, tmp_path: Path) -> None:
    assert max(gaps(tied_task, tmp_path / "free")) > 1e-3
    replayed = gaps(tied_task, tmp_path / "replayed", *R3)
    assert len(replayed) == 2
    assert max(replayed) <= 1e-5


@pytest.mark.exhaustive
def test_replicas_send_their_experts(tied_task: SmallTask, tmp_path: Path) -> None:
    replica = ["rollout.mode=colocated", "rollout.weight_sync=shared_memory", "rollout.canary.enable=false"]
    environment = "rollout.replica.env={OMP_NUM_THREADS: '1'}"
    assert max(gaps(tied_task, tmp_path, *R3, *replica, environment)) <= 1e-5


def first_kl(task: SmallTask, folder: Path, *changes: str) -> float:
    """The KL between the policy of an update and itself, which is not 0 if the update visits other experts."""
    launch(task.ppo(folder, *STEPS, "trainer.total_steps=1", *ONE_BY_ONE, "actor.log_prob_check_rows=-1", *changes))
    return next(abs(row["actor/kl"]) for row in read_metrics(folder) if "actor/kl" in row)


def test_the_update_visits_the_experts_of_the_old_log_probs(tied_task: SmallTask, tmp_path: Path) -> None:
    assert first_kl(tied_task, tmp_path / "free") > 1e-5
    assert first_kl(tied_task, tmp_path / "replayed", *R2) < 1e-6
    assert first_kl(tied_task, tmp_path / "rollout", *R3) < 1e-6


def test_keys_that_do_not_fit(small_task: SmallTask, tied_task: SmallTask, tmp_path: Path) -> None:
    for changes, message in (
        (R3[:1], r"enable_rollout_routing_replay is false"),
        ([*R2, "algorithm.rollout_correction.bypass_mode=true"], r"mode is R2.*bypass_mode"),
    ):
        with pytest.raises(ConfigError, match=message), set_up(tied_task.ppo(tmp_path, *changes)):
            pass
    with (
        set_up(small_task.ppo(tmp_path, *R2)) as trainer,
        pytest.raises(WorkerError, match=r"mode=R2\) needs a mixture of experts"),
    ):
        trainer.train_step()
