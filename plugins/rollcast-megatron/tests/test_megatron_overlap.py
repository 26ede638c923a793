"""Exchange of gradients and weights during computation: it changes no number, and weights are complete when read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_lora_scenarios as lora
import megatron_scenarios as scenarios
import pytest
import torch

from rollcast.errors import ConfigError
from rollcast_megatron.schemas import MegatronConfig
from rollcast_testing.cuda import needs_devices
from rollcast_testing.ranks import Ranks

GRADIENTS = {"overlap_grad_reduce": True}
BOTH = {**GRADIENTS, "overlap_param_gather": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}


def assert_alike(plain: dict[str, Any], overlapped: dict[str, Any]) -> None:
    limit = 1e-5
    for expected, step in zip(plain["history"], overlapped["history"], strict=True):
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=limit)
        assert step.metrics == pytest.approx(expected.metrics, rel=limit)
    assert overlapped["total"] == pytest.approx(plain["total"], rel=limit)
    torch.testing.assert_close(overlapped["log_probs"], plain["log_probs"], rtol=limit, atol=limit)
    for when, tensors in plain["weights"].items():
        for name, tensor in tensors.items():
            found = overlapped["weights"][when][name]
            torch.testing.assert_close(found, tensor, rtol=limit, atol=limit / 2, msg=f"{when}: {name}")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("family", "tied", "keys"),
    [
        pytest.param("qwen2", True, GRADIENTS, id="gradients-tied"),
        pytest.param("qwen2", True, {**GRADIENTS, "use_distributed_optimizer": False}, id="all-reduced-tied"),
        pytest.param("llama", False, BOTH, id="weights"),
        pytest.param("qwen2", True, {**BOTH, **FULL, "head_chunk_size": 3}, id="weights-recompute-tied"),
        pytest.param("qwen3", False, {**BOTH, "context_parallel_size": 2}, id="context"),
        pytest.param("qwen3_moe", False, BOTH, id="experts"),
    ],
)
def test_two_ranks_train_as_without_overlap(
    two_ranks: Ranks, model_of: Callable[..., Path], tmp_path: Path, family: str, tied: bool, keys: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"folder": model_of(family, tied), "checkpoint": tmp_path / "checkpoint"}
    plain = two_ranks.run(scenarios.overlap, **options, **{key: each for key, each in keys.items() if key not in BOTH})
    for expected, result in zip(plain, two_ranks.run(scenarios.overlap, **options, **keys), strict=True):
        assert_alike(expected, result)
        assert expected["groups"] == 1
        assert set(expected["early"]) == {0.0}
        assert expected["stale"] == 0
        assert result["groups"] > 3
        # The first batch shows which gradients to expect; the last but one is two batches.
        assert result["early"] == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0]
        assert (result["stale"] > 0) is ("overlap_param_gather" in keys)


@pytest.mark.exhaustive
def test_bfloat16_weights_are_the_same_bits(two_ranks: Ranks, model_of: Callable[..., Path], tmp_path: Path) -> None:
    """One bucket: with others, the norm's sum differs in its last bit, which decides how some weights are rounded."""
    options: dict[str, Any] = {
        "folder": model_of("llama", False),
        "checkpoint": tmp_path / "checkpoint",
        "bucket": None,
        "dtype": "bfloat16",
    }
    plain, overlapped = (two_ranks.run(scenarios.overlap, **options, **keys)[0] for keys in ({}, BOTH))
    assert overlapped["history"] == plain["history"]
    assert overlapped["stale"] > 0
    for when, tensors in plain["weights"].items():
        for name, tensor in tensors.items():
            assert torch.equal(overlapped["weights"][when][name], tensor), f"{when}: {name}"


@pytest.mark.exhaustive
@pytest.mark.long
def test_chunks_of_stages_overlap_too(two_ranks: Ranks, model_of: Callable[..., Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": model_of("qwen2", True), "checkpoint": tmp_path / "checkpoint"}
    plain = two_ranks.run(scenarios.overlap, world_size=4, **options, **INTERLEAVED)
    overlapped = two_ranks.run(scenarios.overlap, world_size=4, **options, **INTERLEAVED, **BOTH)
    for expected, result in zip(plain, overlapped, strict=True):
        assert_alike(expected, result)
        assert result["early"] == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0]
        assert result["stale"] > 0


@pytest.mark.exhaustive
def test_a_rank_without_rows_exchanges_too(two_ranks: Ranks, model_of: Callable[..., Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "folder": model_of("qwen3_moe", False),
        "checkpoint": tmp_path / "checkpoint",
        "splits": [8, 0],
    }
    plain, overlapped = (two_ranks.run(scenarios.overlap, **options, **keys)[0] for keys in ({}, BOTH))
    assert_alike(plain, overlapped)


def test_adapters_are_gathered_after_the_step(two_ranks: Ranks, model_of: Callable[..., Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": model_of(), "checkpoint": tmp_path / "checkpoint", "lora": lora.LORA}
    plain, overlapped = (two_ranks.run(scenarios.overlap, **options, **keys)[0] for keys in ({}, BOTH))
    assert_alike(plain, overlapped)
    assert overlapped["early"][1:5] == [1.0] * 4
    assert overlapped["stale"] == 0


def test_one_rank_has_nothing_to_exchange(model_of: Callable[..., Path], tmp_path: Path) -> None:
    result = scenarios.overlap(scenarios.ALONE, model_of(), tmp_path / "checkpoint", **BOTH)
    assert set(result["early"]) == {0.0}
    assert result["stale"] == 0


@pytest.mark.parametrize("key", ["use_distributed_optimizer", "overlap_grad_reduce"])
def test_gathering_needs_the_other_keys(key: str) -> None:
    message = rf"critic\.engine\.overlap_param_gather is true, but critic\.engine\.{key} is false"
    with pytest.raises(ConfigError, match=message):
        MegatronConfig(**{**BOTH, key: False}).check(2, "critic.engine")


class TestOnDevices:
    """NCCL's exchanges run on streams of their own, so that a missing wait shows in the numbers."""

    pytestmark = needs_devices(2)

    def test_gradients_and_weights(self, two_ranks: Ranks, model_of: Callable[..., Path], tmp_path: Path) -> None:
        options: dict[str, Any] = {"folder": model_of("llama", False), "checkpoint": tmp_path / "checkpoint"}
        plain, overlapped = (two_ranks.run(scenarios.overlap, **options, **keys)[0] for keys in ({}, BOTH))
        assert overlapped["early"][1:5] == [1.0] * 4
        assert overlapped["stale"] > 0
        assert_near(plain["history"], overlapped["history"])
        torch.testing.assert_close(overlapped["log_probs"], plain["log_probs"], rtol=1e-3, atol=1e-3)
        for when, tensors in plain["weights"].items():
            for name, tensor in tensors.items():
                found = overlapped["weights"][when][name]
                torch.testing.assert_close(found, tensor, rtol=1e-3, atol=1e-3, msg=f"{when}: {name}")

    def test_interleaved_stages(self, two_ranks: Ranks, model_of: Callable[..., Path]) -> None:
        folder, pipeline = model_of("llama", False), {"pipeline_model_parallel_size": 2}
        plain, chunks = (two_ranks.run(scenarios.train, folder=folder, **keys) for keys in (pipeline, INTERLEAVED))
        for expected, result in zip(plain, chunks, strict=True):
            assert_near(expected["history"], result["history"])
            for name, tensor in expected["weights"].items():
                torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-3, atol=1e-3, msg=name)


def assert_near(expected: list[Any], found: list[Any]) -> None:
    """Check losses and norms up to the order in which a device adds."""
    for one, other in zip(expected, found, strict=True):
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)
        assert other.metrics == pytest.approx(one.metrics, rel=1e-3)
