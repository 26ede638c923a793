"""What ``rollcast plan`` says of a run that trains an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_plan import make_plan
from trainer_tools import SmallTask, set_up, worker_of

from rollcast.contracts.engine import ModelConfig
from rollcast.errors import ConfigError
from rollcast_automap.memory.memory_model import count_adapter

KL = ["actor.use_kl_loss=true"]
LORA = ["model.lora_rank=4", *KL]


def items_of(plan: Any) -> dict[str, int]:
    found = plan.as_dict()["memory"]["pools"]["global_pool"]["items"]
    return {str(name): int(size) for name, size in found.items()}


@pytest.mark.parametrize("targets", ["all-linear", "[q_proj,down_proj]", "'.*mlp.*_proj'"])
def test_the_adapter_is_counted_as_peft_makes_it(small_task: SmallTask, tmp_path: Path, targets: str) -> None:
    pytest.importorskip("peft")
    with set_up(small_task.ppo(tmp_path, "model.lora_rank=4", f"model.target_modules={targets}")) as trainer:
        engine = worker_of(trainer).actor.engine
        numbers = sum(tensor.numel() for tensor in engine.get_adapter().tensors.values())
        assert count_adapter(trainer.run.settings.model) == numbers > 0


def test_an_adapter_takes_the_place_of_optimizer_state_and_reference(small_task: SmallTask, tmp_path: Path) -> None:
    whole = items_of(make_plan(small_task.ppo(tmp_path, *KL)))
    plan = make_plan(small_task.ppo(tmp_path, *LORA))
    items = items_of(plan)
    adapter = count_adapter(ModelConfig(path=str(small_task.model), lora_rank=4))
    names = ("actor: adapter", "actor: gradients", "actor: optimizer state")
    assert [items[name] for name in names] == [4 * adapter, 4 * adapter, 8 * adapter]
    assert items["actor: parameters"] == whole["actor: parameters"] == whole["reference: parameters"]
    assert "reference: parameters" not in items
    memory = plan.as_dict()["memory"]
    assert (memory["adapter_parameters"], memory["checkpoint_bytes"]) == (adapter, 12 * adapter)


def test_targets_that_are_no_layers_are_named(small_task: SmallTask, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target_modules=\['no_such'\] names no linear layer"):
        make_plan(small_task.ppo(tmp_path, *LORA, "model.target_modules=[no_such]"))
