"""Tensor, pipeline, data and sequence parallelism against plain transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_plain
import megatron_scenarios as scenarios
import pytest
import torch
from megatron_ranks import MegatronRanks

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE_RECOMPUTE = {"recompute_granularity": "selective"}


def assert_same(plain: dict[str, Any], results: list[dict[str, Any]], copies: int = 1) -> None:
    """The ranks did what plain transformers do, in log-probs, gradient norms, losses and weights."""
    answers = {place[0]: result for result in results for place in [result["place"]] if place[1]}
    assert sorted(answers) == list(range(copies))
    for name, expected in plain["before"].items():
        given = torch.cat([answers[rank]["before"][name] for rank in sorted(answers)])
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    for result in results:
        for (norm, loss), step in zip(plain["history"], result["history"], strict=True):
            assert step.grad_norm == pytest.approx(norm, rel=1e-5)
            assert step.metrics["nll"] == pytest.approx(loss, rel=1e-5)
            assert not step.skipped
        assert result["weights"].keys() == plain["weights"].keys()
        for name, tensor in plain["weights"].items():
            torch.testing.assert_close(
                result["weights"][name], tensor, rtol=1e-5, atol=5e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize(
    ("family", "tied", "keys"),
    [
        pytest.param("qwen2", True, TP2, id="tp2-qwen2-tied"),
        pytest.param("llama", False, TP2, id="tp2-llama"),
        pytest.param("qwen3", False, {**SP2, **FULL_RECOMPUTE}, id="sp2-qwen3-recompute"),
        pytest.param("qwen2", True, {**SP2, **SELECTIVE_RECOMPUTE, "head_chunk_size": 3}, id="sp2-qwen2-tied-chunks"),
        pytest.param("qwen2", True, PP2, id="pp2-qwen2-tied"),
        pytest.param("qwen3", True, {**PP2, **FULL_RECOMPUTE}, id="pp2-qwen3-tied-recompute"),
        pytest.param("llama", False, PP2, id="pp2-llama"),
    ],
)
def test_two_ranks_of_one_copy(
    two_ranks: MegatronRanks, model_of: Callable[..., Path], family: str, tied: bool, keys: dict[str, Any]
) -> None:
    folder = model_of(family, tied)
    assert_same(megatron_plain.train(folder), two_ranks.run(scenarios.train, folder=folder, **keys))


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed-optimizer", "plain-optimizer"])
@pytest.mark.parametrize("splits", [[4, 4], [0, 8]], ids=str)
def test_two_copies(
    two_ranks: MegatronRanks, model_of: Callable[..., Path], splits: list[int], distributed: bool
) -> None:
    folder = model_of("qwen2", True)
    options = {"folder": folder, "splits": splits, "use_distributed_optimizer": distributed}
    assert_same(megatron_plain.train(folder), two_ranks.run(scenarios.train, **options), copies=2)


def test_four_ranks(four_ranks: MegatronRanks, model_of: Callable[..., Path]) -> None:
    folder = model_of("qwen2", True)
    plain = megatron_plain.train(folder)
    assert_same(plain, four_ranks.run(scenarios.train, folder=folder, **SP2, **PP2))
    assert_same(plain, four_ranks.run(scenarios.train, folder=folder, **PP2), copies=2)
