"""Seeds of sequences: from the request's seed, or counted, and restored."""

from __future__ import annotations

import pytest

from rollcast.contracts.rollout import RolloutRequest, SamplingParams
from rollcast.errors import CheckpointError
from rollcast_serving.engines.job import SequenceSeeds


def request(seed: int | None) -> RolloutRequest:
    return RolloutRequest("a", [1, 2], SamplingParams(), seed=seed)


def test_a_request_with_a_seed_gets_the_same_seeds_from_any_counter() -> None:
    first, second = SequenceSeeds("x", 1), SequenceSeeds("x", 2)
    second.choose(request(None), 0)
    seeds = [first.choose(request(7), number) for number in range(3)]
    assert len(set(seeds)) == 3
    assert seeds == [second.choose(request(7), number) for number in range(3)]


def test_a_request_without_a_seed_counts_and_goes_on_from_its_state() -> None:
    seeds = SequenceSeeds("x", 1)
    seeds.choose(request(None), 0)
    restored = SequenceSeeds("x", 1)
    restored.load_state_dict(seeds.state_dict())
    assert seeds.state_dict() == {"sequences": 1}
    following = seeds.choose(request(None), 0)
    assert restored.choose(request(None), 5) == following
    assert following != SequenceSeeds("x", 1).choose(request(None), 0)


@pytest.mark.parametrize("state", [{}, {"sequences": None}, {"sequences": "many"}])
def test_a_state_of_something_else_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="not a state of the Some Engine rollout"):
        SequenceSeeds("Some Engine", 1).load_state_dict(state)
