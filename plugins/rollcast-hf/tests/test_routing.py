"""What hf records of a mixture in addition to the conformance suite's laws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hf_tools import run_all

from rollcast.contracts.rollout import SamplingParams
from rollcast.errors import CapabilityError
from rollcast_hf.rollout import HfRollout
from rollcast_testing.tiny import tiny_model_folder


def test_the_last_token_is_not_read(make_rollout: Callable[..., HfRollout], tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "mixture", hidden=32, experts=4)
    rollout = make_rollout(path=folder, enable_rollout_routing_replay=True)
    # Rows end one by one, so that the batch shrinks.
    sampling = [SamplingParams(max_tokens=size, n=2, ignore_eos=True) for size in (1, 3, 9, 4)]
    for output in run_all(rollout, [[5, 6], [7], [5, 6, 8], [5, 6]], sampling):
        for sequence in output.sequences:
            assert sequence.routed_experts is not None
            assert (sequence.routed_experts[-1] == -1).all()
            assert (sequence.routed_experts[:-1] >= 0).all()


def test_nothing_is_recorded_unless_asked(make_rollout: Callable[..., HfRollout], tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "mixture", hidden=32, experts=4)
    (output,) = run_all(make_rollout(path=folder), [[5, 6]], SamplingParams(max_tokens=2))
    assert output.sequences[0].routed_experts is None


def test_a_dense_model_has_no_routers(make_rollout: Callable[..., HfRollout]) -> None:
    rollout = make_rollout(enable_rollout_routing_replay=True)
    with pytest.raises(CapabilityError, match="has no routers"):
        run_all(rollout, [[5, 6]], SamplingParams(max_tokens=2))
