"""Two gloo ranks against one unsharded: same gradients, weights, outputs; no rank waits in vain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_scenarios as scenarios
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollcast.contracts.engine import ForwardSettings, ModelConfig
from rollcast.errors import CapabilityError, ConfigError
from rollcast_fsdp.engine import FsdpEngine
from rollcast_testing.tiny import tiny_model_folder


def assert_same_training(alone: dict[str, Any], sharded: list[dict[str, Any]]) -> None:
    for result in sharded:
        for expected, step in zip(alone["history"], result["history"], strict=True):
            assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
            assert step.lr == expected.lr
            assert not step.skipped
            assert step.metrics == pytest.approx(expected.metrics, rel=1e-5)
        assert result["weights"].keys() == alone["weights"].keys()
        for name, tensor in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-5, atol=2e-6, msg=name)
    assert sharded[0]["history"] == sharded[1]["history"]
    for name, whole in alone["output"].items():
        parts = torch.cat([result["output"][name] for result in sharded])
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("splits", [[3, 5], [0, 4]])
def test_training_is_that_of_one_rank(ranks: Any, model_folder: Path, splits: list[int]) -> None:
    alone = scenarios.train(scenarios.ALONE, model_folder, splits)
    assert_same_training(alone, ranks.run(scenarios.train, folder=model_folder, splits=splits))


@pytest.mark.parametrize(
    "keys", [{"reshard_after_forward": False}, {"enable_gradient_checkpointing": True}, {"offload_policy": True}]
)
def test_keys_that_trade_memory_change_no_number(ranks: Any, untied_folder: Path, keys: dict[str, bool]) -> None:
    settings = ForwardSettings(max_token_len_per_gpu=30, temperature=0.7, calculate_entropy=True)
    options: dict[str, Any] = {"folder": untied_folder, "splits": [2, 4], "settings": settings, "steps": 2}
    alone = scenarios.train(scenarios.ALONE, **options)
    assert_same_training(alone, ranks.run(scenarios.train, **options, **keys))


@pytest.mark.parametrize("keys", [{}, {"enable_gradient_checkpointing": True, "use_remove_padding": True}])
def test_the_balance_loss_is_that_of_one_rank(ranks: Any, tmp_path: Path, keys: dict[str, bool]) -> None:
    folder = tiny_model_folder(tmp_path / "mixture", hidden=32, experts=4)
    options: dict[str, Any] = {"folder": folder, "splits": [3, 5], "steps": 2, "router_aux_loss_coef": 0.5}
    alone = scenarios.train(scenarios.ALONE, **options)
    assert alone["history"][0].metrics["actor/router/aux_loss"] > 0.9
    assert_same_training(alone, ranks.run(scenarios.train, **options, **keys))


def test_a_balance_loss_needs_routers(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor\.engine\.router_aux_loss_coef is 0\.5, but the model has no routers"):
        scenarios.build(scenarios.ALONE, model_folder, router_aux_loss_coef=0.5)


def test_random_weights_are_the_same_on_all_ranks(ranks: Any, model_folder: Path) -> None:
    options: dict[str, Any] = {"folder": model_folder, "splits": [2, 2], "random_init": True, "steps": 1}
    assert_same_training(scenarios.train(scenarios.ALONE, **options), ranks.run(scenarios.train, **options))


def test_bf16_compute_keeps_fp32_weights(ranks: Any, model_folder: Path) -> None:
    options: dict[str, Any] = {"folder": model_folder, "splits": [2, 2], "steps": 2}
    exact = scenarios.train(scenarios.ALONE, **options)
    for result in ranks.run(scenarios.train, **options, param_dtype="bf16"):
        assert {tensor.dtype for tensor in result["weights"].values()} == {torch.float32}
        norm, expected = result["history"][0].grad_norm, exact["history"][0].grad_norm
        assert norm == pytest.approx(expected, rel=0.03)
        assert norm != pytest.approx(expected, rel=1e-6)


def test_checkpoint_resumes_bitwise_and_on_one_rank(ranks: Any, model_folder: Path, tmp_path: Path) -> None:
    options = {"folder": model_folder, "checkpoint": tmp_path / "checkpoint"}
    before, after = ranks.run(scenarios.save_and_go_on, **options), ranks.run(scenarios.load_and_go_on, **options)
    for expected, result in zip(before, after, strict=True):
        assert torch.equal(result["noise"], expected["noise"])
        assert torch.equal(result["numpy"], expected["numpy"])
        assert result["lr"] == expected["lr"]
        for key in ("saved", "after"):
            for name, tensor in expected[key].items():
                assert torch.equal(result[key][name], tensor), name
    assert not torch.equal(before[0]["noise"], before[1]["noise"])
    alone = scenarios.load_and_go_on(scenarios.ALONE, **options)
    for name, tensor in before[0]["saved"].items():
        assert torch.equal(alone["saved"][name], tensor), name
        torch.testing.assert_close(alone["after"][name], before[0]["after"][name], rtol=1e-5, atol=2e-6)


def test_one_ranks_checkpoint_loads_on_two(ranks: Any, model_folder: Path, tmp_path: Path) -> None:
    options = {"folder": model_folder, "checkpoint": tmp_path / "checkpoint"}
    alone = scenarios.save_and_go_on(scenarios.ALONE, **options)
    first, second = ranks.run(scenarios.load_and_go_on, **options)
    assert not torch.equal(first["noise"], second["noise"])
    for name, tensor in alone["saved"].items():
        assert torch.equal(first["saved"][name], tensor), name
        torch.testing.assert_close(second["after"][name], alone["after"][name], rtol=1e-5, atol=2e-6)


def test_generation_needs_no_lock_step(ranks: Any, model_folder: Path) -> None:
    results = ranks.run(scenarios.generate, folder=model_folder)
    assert [result["tokens"].shape for result in results] == [(1, 8), (1, 15)]
    alone = scenarios.generate(scenarios.ALONE, model_folder)
    assert torch.equal(results[0]["tokens"], alone["tokens"])
    for name, tensor in alone["after"].items():
        torch.testing.assert_close(results[1]["after"][name], tensor, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("folder", ["model_folder", "untied_folder"])
def test_export_opens_in_transformers(ranks: Any, folder: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(folder)
    outputs = ranks.run(scenarios.export, folder=source, output=tmp_path / "hf", checkpoint=tmp_path / "checkpoint")
    FsdpEngine.export_checkpoint(tmp_path / "checkpoint", ModelConfig(str(source)), tmp_path / "from_checkpoint")
    live = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "from_checkpoint").state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in live.items())
    again = scenarios.build(scenarios.ALONE, tmp_path / "hf")
    data, _ = again.infer_batch(scenarios.share(scenarios.ALONE, [2, 2]), ForwardSettings())
    parts = torch.cat([output["log_probs"] for output in outputs])
    torch.testing.assert_close(parts, data["log_probs"], rtol=1e-5, atol=2e-5)


def test_offload_keys_change_no_number(ranks: Any, model_folder: Path) -> None:
    alone = scenarios.move(scenarios.ALONE, model_folder)
    for result in ranks.run(scenarios.move, folder=model_folder):
        for name, tensor in alone.items():
            torch.testing.assert_close(result[name], tensor, rtol=1e-5, atol=2e-6)


def test_an_exception_in_a_loss_leaves_the_engine_usable(ranks: Any, model_folder: Path) -> None:
    alone = scenarios.recover(scenarios.ALONE, model_folder)
    for result in ranks.run(scenarios.recover, folder=model_folder):
        assert result["caught"]
        for name, tensor in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("splits", "offload"), [([2, 2], False), ([0, 3], True)])
def test_the_exact_kl_is_that_of_one_rank(
    ranks: Any, model_folder: Path, untied_folder: Path, splits: list[int], offload: bool
) -> None:
    options: dict[str, Any] = {"folder": model_folder, "other": untied_folder, "splits": splits, "offload": offload}
    alone = scenarios.compare(scenarios.ALONE, **options)
    assert alone["history"][0].grad_norm > 1e-3
    assert bool((alone["output"]["vocabulary_kl"] > 0).any())
    assert_same_training(alone, ranks.run(scenarios.compare, **options))


def test_only_the_same_engine_is_a_reference(model_folder: Path) -> None:
    engine = scenarios.build(scenarios.ALONE, model_folder)
    with pytest.raises(CapabilityError, match="FsdpEngine on 1 ranks"):
        engine.set_reference(object())  # type: ignore[arg-type]


def test_one_rank_computes_in_bf16_too(ranks: Any, model_folder: Path) -> None:
    norm = ranks.run(scenarios.compute_in_bf16, world_size=1, folder=model_folder)[0]
    both = ranks.run(scenarios.compute_in_bf16, folder=model_folder)
    assert both[0] == both[1] == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize(("limit", "collectives"), [(1 << 20, 2), (1, 9), (130, 4)])
def test_small_tensors_are_gathered_together(ranks: Any, model_folder: Path, limit: int, collectives: int) -> None:
    """Whatever their shapes, they come whole and in order, with a collective for each ``limit`` bytes or dtype."""
    for count, same, names in ranks.run(scenarios.gather_many, folder=model_folder, limit=limit):
        assert all(same)
        assert len(names) == 12
        assert names[-4:] == ["bf16", "plain", "copied", "columns"]
        assert count == collectives
