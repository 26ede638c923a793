"""One optimizer step of the real model on every engine: the same loss, gradient, log-probs and exported weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long

FSDP = ["actor.engine.share_prompts=false"]
TWO = ["placement.n_gpus_per_node=2"]
STEPS = {
    "padded": FSDP,
    "packed": [*FSDP, "actor.engine.use_remove_padding=true"],
    "fused head": [*FSDP, "actor.engine.use_fused_kernels=true"],
    "two ranks": [*FSDP, *TWO],
    "two ranks, one copy each": [*FSDP, *TWO, "actor.engine.fsdp_size=1"],
    "Megatron": ["engine=megatron"],
    # The model has nine attention heads.
    "Megatron, TP 3": ["engine=megatron", "placement.n_gpus_per_node=3", "actor.engine.tensor_model_parallel_size=3"],
    "Megatron, PP 2": ["engine=megatron", *TWO, "actor.engine.pipeline_model_parallel_size=2"],
}
#: Those that an adapter takes too.
ADAPTER_STEPS = ("packed", "two ranks", "Megatron", "Megatron, PP 2")

Step = Callable[..., dict[str, float]]


@pytest.fixture(scope="module")
def step(one_step: Step, tmp_path_factory: pytest.TempPathFactory) -> Step:
    """Metrics of one step, by the overrides that it is made with."""

    @cache
    def run(*changes: str) -> dict[str, float]:
        return one_step(tmp_path_factory.mktemp("run"), *changes)

    return run


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """PEFT's folder of an adapter whose matrices are both random, as the override that names it."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    config = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
        with torch.no_grad():
            for name, weight in module.named_parameters():
                if "lora_B" in name:
                    weight.mul_(0.05)  # so that the model still answers
    module.save_pretrained(folder)
    return f"model.lora_adapter_path={folder}"


def check_equal(found: dict[str, float], expected: dict[str, float]) -> None:
    assert expected["reward/mean"] > 0
    assert found["reward/mean"] == expected["reward/mean"]  # the samples are the same
    for metric in ("actor/grad_norm", "actor/pg_loss", "actor/entropy"):
        assert found[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-6), metric
    assert found["rollout/logprob_gap_max"] <= 1e-4


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_that_of_one_rank(step: Step, name: str) -> None:
    check_equal(step(*STEPS[name]), step())


@pytest.mark.parametrize("name", ADAPTER_STEPS)
def test_a_step_of_an_adapter_is_that_of_one_rank(step: Step, adapter: str, name: str) -> None:
    expected = step(adapter)
    assert expected["actor/grad_norm"] != step()["actor/grad_norm"]
    check_equal(step(*STEPS[name], adapter), expected)


def test_every_engine_exports_the_same_model(one_step: Step, model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    def export(name: str, *changes: str) -> dict[str, torch.Tensor]:
        one_step(tmp_path / name, "trainer.export=true", *changes)
        return load_file(tmp_path / name / "export" / "model.safetensors")

    start = load_file(model / "model.safetensors")
    expected = export("fsdp")
    found = export("megatron", *STEPS["Megatron, PP 2"])
    assert found.keys() == expected.keys() == start.keys()
    moved = {name: weight - start[name] for name, weight in expected.items()}
    for name, weight in found.items():
        # Adam's first step is the sign of the gradient, so that rounding turns some of the least gradients round.
        error = (weight - expected[name]).norm() / moved[name].norm()
        assert error < 0.1, (name, float(error))
