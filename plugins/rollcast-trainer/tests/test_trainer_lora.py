"""Runs that train an adapter: the reference is the base model, and only the adapter travels and is kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_tools import SmallTask, launch, read_metrics, roll_out, set_up, without_times, worker_of

from rollcast.contracts.config import config
from rollcast.contracts.engine import BaseEngine, EngineCapabilities, ModelConfig
from rollcast.contracts.rollout import BaseRollout, RolloutCapabilities, RolloutMode
from rollcast.errors import CapabilityError, ConfigError
from rollcast_fsdp.engine import FsdpEngine
from rollcast_serving.adapters import adapter_rank, take_adapters
from rollcast_serving.negotiation import Choice, check_choice
from rollcast_testing.tiny import padded_batch, plain_log_probs, plain_model

pytestmark = pytest.mark.long

LORA = ["model.lora_rank=4", "model.lora_alpha=16", "actor.optim.lr=3e-2"]
REPLICA = ["rollout.mode=colocated", "rollout.weight_sync=shared_memory", "rollout.replica.env={OMP_NUM_THREADS: '1'}"]

#: Metrics of the engines' load, which only replicas tell.
LOAD = ("rollout/running_max", "rollout/waiting_max", "rollout/window", "rollout/kv_cache_usage", "rollout/preemptions")


@pytest.fixture(autouse=True)
def needs_peft() -> None:
    pytest.importorskip("peft")


def of_the_run(row: dict[str, Any]) -> dict[str, float]:
    """What depends neither on how the weights travelled nor on the load of an engine."""
    others = ("sync/", "rollout/logprob_gap", *LOAD)
    return {key: value for key, value in row.items() if not key.startswith(others)}


@pytest.mark.exhaustive
def test_a_replica_with_only_the_adapter_sent_is_the_same_run(
    small_task: SmallTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(small_task.ppo(tmp_path / "in_process", *LORA, "trainer.total_steps=3", "actor.log_prob_check_rows=-1"))
    gather, gathered = FsdpEngine.get_per_tensor_param, []

    def count(self: FsdpEngine) -> Any:
        gathered.append(self.schedule_step)
        return gather(self)

    monkeypatch.setattr(FsdpEngine, "get_per_tensor_param", count)
    launch(small_task.ppo(tmp_path / "replica", *LORA, *REPLICA, "trainer.total_steps=3"))
    assert gathered == [0], "the base model travels once, before the first step"
    expected = without_times(read_metrics(tmp_path / "in_process"))
    rows = without_times(read_metrics(tmp_path / "replica"))
    for row, other in zip(rows, expected, strict=True):
        assert of_the_run(row) == pytest.approx(of_the_run(other), rel=1e-3, abs=1e-5)
    trained = [row for row in rows if "reward/mean" in row]
    assert [row["sync/tensors"] for row in trained] == [2 * 2 * 7] * 3  # A and B of seven matrices in two layers
    assert all(row["rollout/logprob_gap_max"] < 1e-4 for row in trained)
    assert trained[-1]["actor/grad_norm"] > 0


def test_the_reference_is_the_actor_without_its_adapter(small_task: SmallTask, tmp_path: Path) -> None:
    changes = [*LORA, "actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"]
    with set_up(small_task.ppo(tmp_path, *changes)) as trainer:
        assert worker_of(trainer).ref is None
        trainer.train_step()
        trainer.train_step()
        batch = padded_batch(roll_out(trainer)[0])
        mask = batch["response_mask"]
        base = plain_log_probs(plain_model(small_task.model), batch)[0].detach()
        torch.testing.assert_close(batch["ref_log_prob"], base, rtol=1e-5, atol=2e-5)
        assert float((batch["old_log_probs"] - base).mul(mask).abs().max()) > 1e-3
        assert trainer.metrics["actor/kl_loss"] > 1e-5


def test_the_exact_kl_needs_no_second_model_either(small_task: SmallTask, tmp_path: Path) -> None:
    changes = [*LORA, "actor.use_kl_loss=true", "actor.kl_loss_type=full", "actor.kl_loss_coef=0.1"]
    launch(small_task.ppo(tmp_path, *changes, "trainer.total_steps=2"))
    rows = [row for row in read_metrics(tmp_path) if "actor/kl_loss" in row]
    assert len(rows) == 2
    assert rows[1]["actor/kl_loss"] > 1e-5


def test_a_stopped_run_goes_on_and_its_critic_trains_whole(small_task: SmallTask, tmp_path: Path) -> None:
    changes = [*LORA, "algorithm=gae", "trainer.export=true"]
    launch(small_task.ppo(tmp_path / "whole", *changes))
    launch(small_task.ppo(tmp_path / "parts", *changes, "trainer.total_steps=2"))
    launch(small_task.ppo(tmp_path / "parts", *changes))
    rows, expected = (without_times(read_metrics(tmp_path / name)) for name in ("parts", "whole"))
    assert rows == expected
    folder = tmp_path / "whole" / "checkpoints" / "step_4"
    kept = {part: json.loads((folder / part / "engine.json").read_text()) for part in ("actor", "critic")}
    assert all("lora_" in name for name in kept["actor"]["parameters"])
    assert kept["critic"]["adapter"] is None
    exported = plain_model(tmp_path / "whole" / "export")
    base = plain_model(small_task.model)
    assert not torch.allclose(exported.lm_head.weight @ torch.ones(32), torch.zeros(1))
    changed = {
        name for name, weight in exported.named_parameters() if not torch.equal(weight, base.get_parameter(name))
    }
    assert changed == {
        f"model.layers.{layer}.{part}.weight"
        for layer in (0, 1)
        for part in (
            *(f"self_attn.{name}_proj" for name in "qkvo"),
            *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        )
    }
    assert (tmp_path / "whole" / "export" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("engine", "rollout", "words"),
    [
        ({}, {"lora": True}, r"engine 'e' cannot train adapters \(model\.lora_rank"),
        ({"lora": True}, {}, r"rollout 'r' does not support adapters .*no installed alternative works"),
        (
            {"lora": True, "in_process_module": True},
            {"in_process": True},
            r"rollout 'r' does not support adapters .*this would work: .*mode=hybrid, rollout\.weight_sync=in_process",
        ),
    ],
)
def test_parts_without_adapters_are_refused(engine: dict[str, Any], rollout: dict[str, Any], words: str) -> None:
    engine_class = type("E", (BaseEngine,), {"capabilities": EngineCapabilities(**engine)})
    capabilities = RolloutCapabilities(modes=frozenset(RolloutMode), **rollout)
    rollout_class = type("R", (BaseRollout,), {"capabilities": capabilities})
    choice = Choice("e", "r", "colocated", "shared_memory", trains_adapter=True)
    with pytest.raises(CapabilityError, match=words):
        check_choice(choice, engine_class, rollout_class)
    plain = dataclasses.replace(choice, trains_adapter=False)
    check_choice(plain, engine_class, rollout_class)


@config
class Engine:
    enable_lora: bool = False
    max_lora_rank: int = 16


@pytest.mark.parametrize(("rank", "before", "after"), [(4, 16, 16), (20, 16, 32), (64, 8, 64)])
def test_a_rollout_that_has_to_be_told_is_told(rank: int, before: int, after: int) -> None:
    rollout = Engine(max_lora_rank=before)
    assert take_adapters(rollout, ModelConfig(path="x")) is rollout
    told = take_adapters(rollout, ModelConfig(path="x", lora_rank=rank))
    assert (told.enable_lora, told.max_lora_rank) == (True, after)
    assert not rollout.enable_lora


def test_the_rank_of_an_adapters_folder(tmp_path: Path) -> None:
    model = ModelConfig(path="x", lora_adapter_path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"lora_adapter_path: .*adapter_config\.json cannot be read"):
        adapter_rank(model)
    (tmp_path / "adapter_config.json").write_text('{"r": 24}')
    assert adapter_rank(model) == 24
