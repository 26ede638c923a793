"""Trajectories to batches: every sampled token is trained once, with its own log-prob and reward."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast_agents.assembly import assemble_trajectories
from rollcast_agents.contracts.trajectory import Segment, Trajectory, VersionRun


def given_tokens(ids, turn=0):
    return Segment(np.asarray(ids, np.int32), False, turn)


def sampled(ids, turn=0, version=0):
    ids = np.asarray(ids, np.int32)
    return Segment(ids, True, turn, -ids.astype(np.float32), (VersionRun(version, len(ids)),))


def row(batch, name, index):
    return batch[name].unbind()[index].tolist()


def test_turns_gaps_versions_and_rewards():
    trajectory = Trajectory(
        (
            given_tokens([1, 2]),
            sampled([3, 4], 0, 5),
            given_tokens([5], 1),
            sampled([6, 7], 1, 6),
            given_tokens([8], 2),
        ),
        "g",
        "r",
        "done",
        reward=1.0,
        turn_rewards={0: 0.25},
    )
    batch = assemble_trajectories([trajectory])
    assert row(batch, "prompts", 0) == [1, 2]
    assert row(batch, "responses", 0) == [3, 4, 5, 6, 7, 8]
    assert row(batch, "response_mask", 0) == [True, True, False, True, True, False]
    assert row(batch, "rollout_log_probs", 0) == [-3, -4, 0, -6, -7, 0]
    assert row(batch, "turn_ids", 0) == [0, 0, 1, 1, 1, 2]
    assert row(batch, "environment_scores", 0) == [0, 0.25, 0, 0, 0.75, 0]
    assert (batch["rollout_weight_version"].item(), batch["rollout_weight_version_min"].item()) == (6, 5)
    assert batch["is_scored"].tolist() == [True]


def test_rows_of_one_rollout_share_its_reward_once():
    first = Trajectory(
        (given_tokens([1]), sampled([2], 0)), "g", "r", "done", reward=2.0, turn_rewards={0: 0.5, 1: 0.5}
    )
    second = Trajectory(
        (given_tokens([1, 9]), sampled([3], 1)), "g", "r", "done", reward=2.0, turn_rewards={0: 0.5, 1: 0.5}
    )
    other = Trajectory((given_tokens([1]), sampled([4], 0)), "g", "s", "length")
    batch = assemble_trajectories([first, other, second])
    assert batch["rollout_index"].tolist() == [0, 1, 0]
    assert [row(batch, "environment_scores", i) for i in range(3)] == [[0.5], [0.0], [1.5]]
    assert batch["finished"].tolist() == [True, False, True]
    assert batch["is_scored"].tolist() == [True, False, True]


def test_a_rollout_that_sampled_nothing_is_an_empty_row():
    batch = assemble_trajectories(
        [Trajectory((), "g", "r", "error"), Trajectory((given_tokens([1]),), "g", "s", "length")]
    )
    assert [row(batch, "responses", i) for i in range(2)] == [[], []]
    assert row(batch, "prompts", 1) == [1]
    assert batch["rollout_weight_version"].tolist() == [-1, -1]
    assert len(assemble_trajectories([])) == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 99), max_size=4)), min_size=1, max_size=6), max_size=5
    )
)
def test_nothing_is_lost_and_nothing_is_added(shapes):
    trajectories = [
        Trajectory(
            tuple((sampled if is_sampled else given_tokens)(ids, turn) for turn, (is_sampled, ids) in enumerate(shape)),
            "g",
            str(i),
            "done",
        )
        for i, shape in enumerate(shapes)
    ]
    batch = assemble_trajectories(trajectories)
    for index, trajectory in enumerate(trajectories):
        ids = row(batch, "prompts", index) + row(batch, "responses", index)
        assert ids == trajectory.token_ids.tolist()
        mask = torch.tensor(row(batch, "response_mask", index), dtype=torch.bool)
        chosen = trajectory.token_ids[trajectory.sampled_mask].tolist()
        assert torch.tensor(row(batch, "responses", index))[mask].tolist() == chosen
        log_probs = torch.tensor(row(batch, "rollout_log_probs", index))
        assert log_probs[mask].tolist() == [-float(each) for each in chosen]
        assert not log_probs[~mask].any()
