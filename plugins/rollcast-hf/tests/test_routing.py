"""Experts are recorded only on request; the conformance suite checks which."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hf_tools import run_all

from rollcast.contracts.rollout import SamplingParams
from rollcast_hf.rollout import HfRollout
from rollcast_testing.tiny import tiny_model_folder


def test_nothing_is_recorded_unless_asked(make_rollout: Callable[..., HfRollout], tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "mixture", hidden=32, experts=4)
    (output,) = run_all(make_rollout(path=folder), [[5, 6]], SamplingParams(max_tokens=2))
    assert output.sequences[0].routed_experts is None
