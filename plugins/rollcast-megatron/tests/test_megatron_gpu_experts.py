"""Experts on CUDA, where Transformer Engine computes those of a rank in one grouped product."""

from __future__ import annotations

from pathlib import Path

import megatron_plain
import megatron_scenarios as scenarios
import pytest
import torch
from megatron_models import family_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_experts_are_one_grouped_product(tmp_path: Path) -> None:
    pytest.importorskip("transformer_engine")
    folder = family_folder(tmp_path / "model", "qwen3_moe", False, head_dim=16, moe_intermediate_size=32)
    engine = scenarios.build(scenarios.ALONE, folder, dtype="bfloat16")
    names = [name for name, _ in engine.stage.named_parameters()]
    assert any(name.endswith("mlp.experts.linear_fc1.weight3") for name in names)
    expected = megatron_plain.train(folder, steps=0)
    found = scenarios.infer(engine)["log_probs"]
    torch.testing.assert_close(found, expected["before"]["log_probs"], rtol=0, atol=0.1)
    step = scenarios.step(engine, 0)
    assert not step.skipped
    assert {name for name, _ in engine.get_per_tensor_param()} == set(expected["weights"])
