"""Asynchronous rewards: how many are in flight, what a blocked event loop costs, and sums of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollcast.contracts.reward import (
    BaseReward,
    RewardResult,
    RewardSample,
    RewardSettings,
    build_reward,
    build_reward_manager,
    rewards,
)
from rollcast.errors import ConfigError, RewardError
from rollcast_rewards.function import FunctionReward
from rollcast_rewards.remote import TransientError
from rollcast_rewards.weighted_sum import WeightedSum


def samples(count: int) -> list[RewardSample]:
    return [RewardSample("p", "r", ground_truth=float(index), response_ids=[1, 2]) for index in range(count)]


class Counting(BaseReward):
    """Counts samples in flight, and remembers loops."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.loops: set[int] = set()

    async def score(self, sample: RewardSample) -> float:
        self.loops.add(id(asyncio.get_running_loop()))
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1
        return float(sample.ground_truth)


@pytest.mark.parametrize("manager", ["naive", "batch", "remote"])
def test_as_many_as_allowed_are_in_flight_on_one_loop(manager: str) -> None:
    reward = Counting()
    built = build_reward_manager(manager, reward, options={"max_concurrent": 5})
    for _ in range(2):
        assert [result.score for result in built(samples(23))] == [float(index) for index in range(23)]
    assert reward.most == 5
    assert len(reward.loops) == 1
    built.close()


@pytest.mark.parametrize("manager", ["naive", "batch"])
def test_nothing_in_flight_is_refused(manager: str) -> None:
    with pytest.raises(ConfigError, match=r"reward_manager_kwargs\.max_concurrent is 0"):
        build_reward_manager(manager, Counting(), options={"max_concurrent": 0})


@pytest.mark.parametrize("manager", ["naive", "remote"])
def test_a_sample_that_blocks_the_loop_costs_only_itself(manager: str) -> None:
    class Blocking(BaseReward):
        async def score(self, sample: RewardSample) -> float:
            await asyncio.sleep(0.01)
            if sample.ground_truth == 3:
                time.sleep(3)
            return float(sample.ground_truth)

    settings = RewardSettings(on_error="zero", max_bad_share=0.2, timeout_s=0.3)
    built = build_reward_manager(manager, Blocking(), settings, {"max_concurrent": 4})
    start = time.perf_counter()
    results = built(samples(12))
    assert time.perf_counter() - start < 2.8
    assert [index for index, result in enumerate(results) if result.error] == [3]
    assert "timeout_s = 0.3" in results[3].error
    assert [result.score for result in results] == [0.0 if index == 3 else float(index) for index in range(12)]
    built.close()


def test_a_bad_sample_stops_the_run_and_cancels_the_rest() -> None:
    ended: list[str] = []

    class Stopping(BaseReward):
        name = "stopping"

        async def score(self, sample: RewardSample) -> float:
            try:
                await asyncio.sleep(0.05 if sample.ground_truth == 1 else 60)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
            raise KeyError("first")

    built = build_reward_manager("naive", Stopping())
    with pytest.raises(RewardError, match="reward stopping failed: KeyError"):
        built(samples(4))
    deadline = time.monotonic() + 5
    while len(ended) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == ["cancelled"] * 3
    while reward_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not reward_threads()


def in_threads(built: Any, batches: list[list[RewardSample]]) -> list[Any]:
    """Score batches at the same time; return the results of each, or its error."""
    found: list[Any] = [None] * len(batches)

    def score(place: int) -> None:
        try:
            found[place] = built(batches[place])
        except RewardError as error:
            found[place] = error

    threads = [threading.Thread(target=score, args=(place,)) for place in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.parametrize("manager", ["naive", "batch", "remote", "dapo"])
def test_batches_of_several_threads_are_in_flight_together(manager: str) -> None:
    both_are_there = threading.Barrier(2, timeout=20)

    class Meeting(BaseReward):
        async def score(self, sample: RewardSample) -> float:
            await asyncio.to_thread(both_are_there.wait)
            return float(sample.ground_truth)

    built = build_reward_manager(manager, Meeting())
    assert built.is_concurrent
    found = in_threads(built, [samples(1), samples(2)[1:]])
    assert [[result.score for result in results] for results in found] == [[0.0], [1.0]]
    built.close()


def test_batches_share_the_limit_of_samples_in_flight() -> None:
    reward = Counting()
    built = build_reward_manager("naive", reward, options={"max_concurrent": 5})
    found = in_threads(built, [samples(20), samples(20), samples(20)])
    assert [[result.score for result in results] for results in found] == [[float(index) for index in range(20)]] * 3
    assert reward.most == 5
    built.close()


def test_a_batch_that_fails_or_blocks_costs_no_other_batch() -> None:
    is_failing = threading.Event()

    class Sharing(BaseReward):
        name = "sharing"

        async def score(self, sample: RewardSample) -> float:
            if sample.data_source == "fails":
                is_failing.set()
                raise KeyError("bad")
            await asyncio.to_thread(is_failing.wait, 20)
            if sample.data_source == "blocks":
                time.sleep(5)
            await asyncio.sleep(0.05)
            return float(sample.ground_truth)

    built = build_reward_manager("naive", Sharing(), RewardSettings(timeout_s=1.5))
    fails, blocks = (RewardSample("p", "r", data_source=source) for source in ("fails", "blocks"))
    failed, blocked, whole = in_threads(built, [[fails], [blocks], samples(6)])
    assert "KeyError" in str(failed)
    assert "timeout_s = 1.5" in str(blocked)
    assert [result.score for result in whole] == [float(index) for index in range(6)]
    built.close()


def test_closing_ends_the_batches_under_way() -> None:
    is_there = threading.Event()

    class Waiting(BaseReward):
        name = "waiting"

        async def score(self, sample: RewardSample) -> float:
            is_there.set()
            await asyncio.sleep(3600)
            return 0.0

    built = build_reward_manager("naive", Waiting(), RewardSettings(timeout_s=None))
    closer = threading.Thread(target=lambda: (is_there.wait(20), built.close()))
    closer.start()
    with pytest.raises(RewardError, match="reward waiting: closed with 2 samples unscored"):
        built(samples(2))
    closer.join(20)


def reward_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "rollcast-async-reward"]


def test_a_manager_scores_inside_a_running_loop() -> None:
    async def main() -> list[RewardResult]:
        return build_reward_manager("naive", Counting())(samples(3))

    assert [result.score for result in asyncio.run(main())] == [0.0, 1.0, 2.0]


def test_remote_tries_an_asynchronous_reward_again() -> None:
    tries: dict[float, int] = {}

    class Flaky(BaseReward):
        async def score(self, sample: RewardSample) -> float:
            tries[sample.ground_truth] = tries.get(sample.ground_truth, 0) + 1
            if tries[sample.ground_truth] < 3:
                raise TransientError("busy")
            return 1.0

    built = build_reward_manager("remote", Flaky(), options={"backoff_s": 0.001, "max_retries": 2})
    assert [result.score for result in built(samples(5))] == [1.0] * 5
    assert set(tries.values()) == {3}
    few = build_reward_manager("remote", Flaky(), options={"backoff_s": 0.001, "max_retries": 1})
    tries.clear()
    with pytest.raises(RewardError, match="TransientError: busy"):
        few(samples(1))


async def half(sample: RewardSample) -> RewardResult:
    await asyncio.sleep(0.001)
    return RewardResult.per_token([0.25, 0.25], extra={"n": 1.0})


def whole(sample: RewardSample) -> float:
    return 1.0


@pytest.fixture
def registered() -> Iterator[None]:
    for name, part in {"test_half": half, "test_whole": whole}.items():
        rewards.register(name, part)
    yield
    for name in ("test_half", "test_whole"):
        rewards.unregister(name)


def test_a_sum_awaits_its_parts_and_adds_their_token_scores(registered: None) -> None:
    entries: list[dict[str, Any]] = [{"name": "test_half", "weight": 2.0}, {"name": "test_whole", "weight": 0.5}]
    total = WeightedSum(entries)
    assert total.is_async
    assert not WeightedSum(entries[1:]).is_async
    (result,) = build_reward_manager("naive", total)(samples(1))
    assert result.score == 1.5
    assert result.token_scores == (0.5, 0.5)
    assert result.extra == {"test_half": 0.5, "test_half/n": 1.0, "test_whole": 1.0}


def test_a_function_may_be_asynchronous(registered: None, tmp_path: Path) -> None:
    assert build_reward("test_half").is_async
    assert not build_reward("test_whole").is_async
    (tmp_path / "mine.py").write_text(
        "import asyncio\n\n"
        "async def verl(data_source, solution_str, ground_truth):\n"
        "    await asyncio.sleep(0.001)\n"
        "    return {'score': ground_truth, 'acc': True}\n"
    )
    reward = FunctionReward(f"{tmp_path / 'mine.py'}:verl")
    assert reward.is_async
    for manager in ("naive", "prime"):
        built = build_reward_manager(manager, reward)
        assert built(samples(3)) == [RewardResult(float(index), True) for index in range(3)]
        built.close()


def test_scores_of_a_result_sum_up() -> None:
    assert RewardResult.per_turn([1.0, 0.5], correct=True) == RewardResult(1.5, True, turn_scores=[1.0, 0.5])
    assert RewardResult.per_token([0.5, 0.25]).score == 0.75
