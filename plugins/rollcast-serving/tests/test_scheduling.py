"""The sliding window: pure decisions, and its makespan on simulated engines."""

from __future__ import annotations

import numpy as np
import pytest

from rollcast.contracts.rollout import EngineLoad
from rollcast_serving.load_figures import LoadFigures
from rollcast_serving.scheduling import AdaptiveCap, SlidingWindow
from rollcast_serving.simulation import ideal_makespan, simulate_window


def window_of(*limits: int, continuous: bool = True) -> SlidingWindow[str]:
    window: SlidingWindow[str] = SlidingWindow(len(limits), continuous)
    for place, limit in enumerate(limits):
        window.open(place, EngineLoad(limit))
    return window


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("sigma", [0.6, 1.0, 1.4])
def test_makespan_of_4096_sequences_on_8_replicas(group: int, sigma: float) -> None:
    lengths = np.clip(np.random.default_rng(7).lognormal(np.log(512), sigma, 4096), 1, 32_768).tolist()
    ideal = ideal_makespan(lengths, 8 * 256)
    found = simulate_window(lengths, replicas=8, limit=256, group=group, latency=2.0)
    assert found <= 1.05 * ideal
    assert found >= max(lengths)  # else the simulation loses sequences


def test_a_finished_sequence_is_replaced_at_once() -> None:
    window = window_of(2, 2)
    window.submit([(name, 1) for name in "abcdefg"])
    assert window.assign() == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]
    assert window.assign() == []
    window.finish(1, 1)
    assert window.assign() == [(1, "e")]
    assert window.in_flight == [2, 2]


def test_a_group_stays_together_and_is_not_held_up_by_its_size() -> None:
    window = window_of(4, 4)
    window.submit([("ten", 10), ("two", 2), ("three", 3), ("one", 1)])
    assert window.assign() == [(0, "ten"), (1, "two"), (1, "three")]
    assert window.in_flight == [10, 5]
    window.finish(1, 2)
    assert window.assign() == [(1, "one")]


def test_what_a_closed_replica_had_goes_first_and_elsewhere() -> None:
    window = window_of(1, 1)
    window.submit([(name, 1) for name in "abcd"])
    window.assign()
    window.close(0)
    window.finish(0, 1)
    window.put_back("a", 1)
    window.finish(1, 1)
    assert window.assign() == [(1, "a")]
    window.open(0, EngineLoad(2))
    assert window.assign() == [(0, "c"), (0, "d")]


def test_requests_past_the_queue_count() -> None:
    window = window_of(3)
    window.occupy(0, 2)
    window.submit([("a", 1), ("b", 1)])
    assert window.assign() == [(0, "a")]
    assert window.withdraw(lambda entry: entry == "b") == ["b"]
    assert window.waiting == 0


def test_engines_without_continuous_batching_get_even_shares_when_idle() -> None:
    window = window_of(8, 8, continuous=False)
    window.submit([(str(number), 1) for number in range(6)])
    assert [place for place, _ in window.assign()] == [0, 1, 0, 1, 0, 1]
    window.submit([("late", 1)])
    window.finish(0, 2)
    assert window.assign() == []  # it would wait for the rest of the batch
    window.finish(0, 1)
    assert window.assign() == [(0, "late")]


def test_the_cap_follows_cache_and_preemptions() -> None:
    cap = AdaptiveCap(EngineLoad(limit=256, preemptions=5))
    cap.update(EngineLoad(limit=256, running=200, kv_cache_usage=0.97, preemptions=5))
    assert cap.value == 256  # full, and nothing suffers
    cap.update(EngineLoad(limit=256, running=200, waiting=56, kv_cache_usage=0.97, preemptions=9))
    assert cap.value == 170  # below those that ran
    cap.update(EngineLoad(limit=256, running=170, kv_cache_usage=0.9, preemptions=9))
    assert cap.value == 170
    for expected in (186, 202, 218, 234, 250, 256, 256):
        cap.update(EngineLoad(limit=256, running=150, kv_cache_usage=0.5, preemptions=9))
        assert cap.value == expected
    for preemptions in range(10, 60):
        cap.update(EngineLoad(limit=256, running=3, kv_cache_usage=1.0, preemptions=preemptions))
    assert cap.value == 16  # never nothing


def test_figures_are_peaks_and_new_preemptions() -> None:
    figures = LoadFigures()
    assert figures.take([]) == {}
    figures.add(0, EngineLoad(8, 3, 1, 0.5, 7))
    figures.add(1, EngineLoad(8, 4, 0, 0.7, 0))
    figures.add(0, EngineLoad(8, 1, 0, 0.2, 9))
    assert figures.take([8, 6]) == {
        "rollout/running_max": 7.0,
        "rollout/waiting_max": 1.0,
        "rollout/kv_cache_usage_max": 0.7,
        "rollout/preemptions": 2.0,
        "rollout/window": 14.0,
    }
    assert figures.take([8, 6]) == {"rollout/window": 14.0}  # nothing was told since
    figures.add(0, EngineLoad(8, 0, 0, 0.0, 3))  # another engine counts anew
    assert figures.take([8])["rollout/preemptions"] == 3.0
