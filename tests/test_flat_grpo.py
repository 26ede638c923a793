"""contrib/flat-grpo: GRPO without the trainer runs, and its parts compute what they say."""

from __future__ import annotations

import importlib.util
import math
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from code_blocks import blocks

from rollcast.contracts.algorithm import Denominators
from rollcast.contracts.engine import LossInputs
from rollcast.protocol import DataProto, Jagged

FILE = Path(__file__).parents[1] / "contrib" / "flat-grpo" / "flat_grpo.py"


@pytest.fixture(scope="module")
def flat() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flat_grpo", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["flat_grpo"] = module
    spec.loader.exec_module(module)
    return module


def test_two_steps_train(flat: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lengths(batch: DataProto, answers: Any, tokenizer: Any) -> torch.Tensor:
        # After two supervised steps no answer is right, and equal rewards have no gradient.
        return Jagged.of(batch["responses"]).lengths.float()

    monkeypatch.setattr(flat, "score", lengths)
    first, second = flat.run(tmp_path, warm_up_steps=2, steps=2)
    assert (first["step"], second["step"]) == (1, 2)
    for metrics in (first, second):
        assert 0 < metrics["reward"] <= flat.MAX_TOKENS
        assert math.isfinite(metrics["loss"])
        assert metrics["grad_norm"] > 0


def test_advantages_compare_the_samples_of_a_prompt(flat: ModuleType) -> None:
    mask = Jagged.from_lengths(torch.ones(24, dtype=torch.bool), torch.tensor([1, 2] * 8))
    rewards = torch.tensor([0.0] * 7 + [1.0] + [1.0] * 8)
    batch = flat.with_advantages(DataProto.from_dict({"response_mask": mask.column()}), rewards)
    rows = Jagged.of(batch["advantages"]).values.split(mask.lengths.tolist())
    assert rows[7].tolist() == pytest.approx([7 / 8 / math.sqrt(1 / 8)] * 2, rel=1e-4)
    assert rows[0].tolist() == pytest.approx([-1 / 8 / math.sqrt(1 / 8)], rel=1e-4)
    assert all(row.abs().max() == 0 for row in rows[8:])


def test_the_loss_is_clipped(flat: ModuleType) -> None:
    ratio = torch.tensor([[2.0, 1.0, 0.5]]).log().requires_grad_()
    columns = {"advantages": torch.tensor([[1.0, 1.0, -1.0]]), "rollout_log_probs": torch.zeros(1, 3)}
    counts = Denominators(tokens=3.0, sequences=1.0, max_tokens=3.0)
    output = flat.grpo_loss(LossInputs(ratio, None, None, torch.ones(1, 3), columns, counts))
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx((-1.28 - 1.0 + 0.8) / 3)
    assert float(output.metrics["clipped"]) == pytest.approx(2 / 3)
    assert ratio.grad[0].tolist() == pytest.approx([0.0, -1 / 3, 0.0])


def test_the_readme_shows_the_file() -> None:
    shown = [block.text for block in blocks("README.md") if block.title == FILE.name]
    assert len(shown) == 3
    for text in shown:
        assert text in FILE.read_text() or textwrap.indent(text, "    ") in FILE.read_text()
