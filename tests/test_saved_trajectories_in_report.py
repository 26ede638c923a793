"""The report reads the files that rollcast-agents writes, though it knows their format only."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rollcast_agents import records
from rollcast_agents.contracts.trajectory import Failure, Segment, Trajectory, VersionRun
from rollcast_report import trajectories


def test_files_of_agents_are_shown(tmp_path: Path) -> None:
    given = Segment(np.arange(3, dtype=np.int32), sampled=False, turn=0)
    log_probs = np.full(2, -0.5, np.float32)
    sampled = Segment(np.arange(2, dtype=np.int32), True, 0, log_probs, (VersionRun(7, 2),))
    trajectory = Trajectory(
        segments=(given, sampled),
        group_id="g",
        rollout_id="r",
        end="error",
        turn_rewards={0: 0.5},
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Ho."}],
        metrics={"turns": 1.0},
        failure=Failure("tool", "broke"),
    )
    record = records.Record(trajectory, {"ground_truth": "Ho"}, 0.5, ("<u>hi", "Ho.<e>"))
    records.save_records(records.record_path(tmp_path, 12), [record, records.Record(trajectory)])
    saved = trajectories.read_trajectories(tmp_path)
    assert saved.unreadable == {}
    first, second = saved.entries
    assert (first.step, first.reward, first.detail["truth"]) == (12, 0.5, "Ho")
    assert first.detail["messages"][1]["turn"] == 0 and first.detail["failure"] == ["tool", "broke"]
    expected = {"turn": 0, "sampled": True, "tokens": 2, "text": "Ho.<e>", "versions": [7], "logProb": -0.5}
    assert first.detail["segments"][1] == expected
    assert second.detail["segments"][1]["text"] is None and second.reward is None
