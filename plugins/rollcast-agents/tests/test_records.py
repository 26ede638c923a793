"""Trajectories in files: exact, complete or not at all, and refused by name where they are broken."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollcast.errors import DataError
from rollcast_agents.assembly import assemble_trajectories
from rollcast_agents.contracts.trajectory import Failure, Segment, Trajectory, VersionRun
from rollcast_agents.records import (
    Record,
    load_records,
    load_trajectories,
    record_path,
    save_records,
    save_trajectories,
)


def make(number: int, **fields: object) -> Trajectory:
    random = np.random.default_rng(number)
    ids = random.integers(0, 2**31 - 1, 40, dtype=np.int32)
    return Trajectory(
        (
            Segment(ids[:10], False, 0),
            Segment(ids[10:20], True, 0, random.standard_normal(10, np.float32), (VersionRun(3, 4), VersionRun(4, 6))),
            Segment(ids[20:25], False, 1, routed_experts=random.integers(0, 9, (5, 3, 2), dtype=np.int16)),
            Segment(ids[25:], True, 1, random.standard_normal(15, np.float32), (VersionRun(4, 15),)),
        ),
        "g0",
        f"r{number}",
        **{"end": "done", **fields},
    )


def test_a_loaded_file_gives_the_same_batch(tmp_path):
    saved = [
        make(0, reward=0.5, turn_rewards={0: 0.25}, reward_components={"call": 0.25}, metrics={"turns": 2.0}),
        make(1, end="error", failure=Failure("tool", "it\nbroke"), messages=[{"role": "user", "content": "é\u2028"}]),
        Trajectory((), "g1", "r2", "timeout", failure=Failure("environment", "gone")),
    ]
    path = record_path(tmp_path, 12)
    save_trajectories(path, saved)
    loaded = load_trajectories(path)
    for name in ("group_id", "rollout_id", "end", "reward", "turn_rewards", "reward_components", "metrics", "failure"):
        assert [getattr(each, name) for each in loaded] == [getattr(each, name) for each in saved]
    assert loaded[1].messages == saved[1].messages
    first, second = assemble_trajectories(saved), assemble_trajectories(loaded)
    assert set(first.keys()) == set(second.keys())
    for name in set(first.keys()):
        values, again = first[name], second[name]
        if not isinstance(values, torch.Tensor):
            assert list(values) == list(again), name
        elif values.layout == torch.jagged:
            assert torch.equal(values.values(), again.values()), name
            assert torch.equal(values.offsets(), again.offsets()), name
        else:
            assert torch.equal(values, again), name


def test_tasks_scores_and_texts_stand_beside_a_trajectory(tmp_path):
    task = {"ground_truth": np.int64(42), "data_source": "sums", "extra_info": {"rows": np.arange(2)}}
    save_records(tmp_path / "a.jsonl", [Record(make(0), task, 1.5, ["a", "b", "c", "d"]), Record(make(1))])
    first, second = load_records(tmp_path / "a.jsonl")
    assert first.task == {"ground_truth": 42, "data_source": "sums", "extra_info": {"rows": [0, 1]}}
    assert (first.score, first.texts) == (1.5, ["a", "b", "c", "d"])
    assert (second.task, second.score, second.texts) == ({}, None, ())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda line: line[:-20], "is not a saved trajectory"),
        (lambda line: line.replace('"version":1', '"version":9'), "version 9"),
        (lambda line: line.replace('"log_probs":"', '"log_probs":"AAAA'), "is not a saved trajectory"),
        (lambda line: "[]", "is not a saved trajectory"),
    ],
)
def test_a_broken_line_is_refused_by_its_number(tmp_path, change, said):
    path = tmp_path / "a.jsonl"
    save_trajectories(path, [make(0), make(1)])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], change(lines[1])]))
    with pytest.raises(DataError, match=f"{path}:2 .*{said}"):
        load_trajectories(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.jsonl cannot be read"):
        load_trajectories(tmp_path / "absent.jsonl")


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.jsonl"
    save_trajectories(path, [make(0)])

    def broken():
        yield make(1)
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError):
        save_records(path, (Record(each) for each in broken()))
    assert [each.rollout_id for each in load_trajectories(path)] == ["r0"]
