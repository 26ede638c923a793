"""Lengths from the directory of a run: recorded rollouts, conversations, means, and files that are damaged."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollcast.errors import DataError
from rollcast.protocol import DataProto, Jagged
from rollcast_automap.costs.length_curve import LengthCurve
from rollcast_automap.costs.run_lengths import read_run_lengths

LONGEST = (8, 16)


def jagged(lengths: list[int]) -> torch.Tensor:
    return Jagged.from_lengths(torch.zeros(sum(lengths), dtype=torch.int32), torch.tensor(lengths)).column()


def record(folder: Path, step: int, prompts: list[int], responses: list[int]) -> None:
    (folder / "rollouts").mkdir(exist_ok=True)
    batch = DataProto.from_dict({"prompts": jagged(prompts), "responses": jagged(responses)})
    batch.save(folder / "rollouts" / f"step_{step}.batch")


def segment(sampled: bool, tokens: int) -> dict[str, Any]:
    packed = base64.b64encode(np.zeros(tokens, "<i4").tobytes()).decode()
    return {"sampled": sampled, "token_ids": packed}


def write_lines(file: Path, lines: list[Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_recorded_rollouts_have_every_length(tmp_path: Path) -> None:
    record(tmp_path, 1, [2, 2], [1, 3])
    record(tmp_path, 2, [4, 40], [5, 30])
    (tmp_path / "rollouts" / "index.json").write_text("{}")
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "rollout/response_length_mean": 2.0}])
    found = read_run_lengths(tmp_path, LONGEST)
    assert found.prompt == LengthCurve.from_samples([2.0, 2.0, 4.0, 8.0]).statistics(8)
    assert found.response == LengthCurve.from_samples([1.0, 3.0, 5.0, 16.0]).statistics(16)
    assert found.source == f"4 rows of {tmp_path / 'rollouts'}"


def test_a_conversation_is_its_first_prompt_and_what_follows(tmp_path: Path) -> None:
    told = [
        {"segments": [segment(False, 3), segment(True, 4), segment(False, 2), segment(True, 1)]},
        {"segments": [segment(False, 3), segment(False, 2), segment(True, 9)]},
        {"segments": [segment(False, 3)]},
    ]
    write_lines(tmp_path / "trajectories" / "step_000001.jsonl", told)
    with (tmp_path / "trajectories" / "step_000001.jsonl").open("a") as file:
        file.write('{"segments": [{"sam')  # the run was killed here
    found = read_run_lengths(tmp_path, LONGEST)
    assert found.prompt == LengthCurve.from_samples([3.0, 5.0]).statistics(8)
    assert found.response == LengthCurve.from_samples([7.0, 9.0]).statistics(16)


def test_metrics_have_means(tmp_path: Path) -> None:
    steps = [
        {"step": 0, "val/reward": 0.0},
        # 8 rows of 4 tokens behind prompts of 5, then of 6.
        {"step": 1, "rollout/response_length_mean": 4.0, "rollout/tokens": 32.0, "perf/total_num_tokens": 72.0},
        {"step": 2, "rollout/response_length_mean": 6.0, "rollout/tokens": 48.0, "perf/total_num_tokens": 96.0},
    ]
    write_lines(tmp_path / "metrics.jsonl", steps)
    found = read_run_lengths(tmp_path, LONGEST)
    assert found.prompt is not None
    assert found.response is not None
    assert (found.prompt.mean, found.response.mean) == (5.5, 5.0)
    assert (found.prompt.maximum, found.response.maximum) == LONGEST
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "rollout/response_length_mean": 4.0}])
    assert read_run_lengths(tmp_path, LONGEST).prompt is None


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no lengths: .*metrics\.jsonl cannot be read"):
        read_run_lengths(tmp_path, LONGEST)
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "sft/loss": 1.0}])
    with pytest.raises(DataError, match=r"metrics\.jsonl has no rollout/response_length_mean"):
        read_run_lengths(tmp_path, LONGEST)
    write_lines(tmp_path / "trajectories" / "step_000001.jsonl", [{"segments": 3}, {"segments": []}])
    with pytest.raises(DataError, match=r"step_000001\.jsonl, line 1 is no trajectory"):
        read_run_lengths(tmp_path, LONGEST)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_1.batch").write_bytes(b"none")
    with pytest.raises(DataError, match=r"step_1\.batch cannot be read"):
        read_run_lengths(tmp_path, LONGEST)
