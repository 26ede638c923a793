"""Every manager with good and bad samples, and the time limits and processes behind them."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from rollcast.contracts.reward import (
    BaseReward,
    BaseRewardManager,
    RewardSample,
    RewardSettings,
    build_reward_manager,
)
from rollcast.errors import ConfigError, RewardError
from rollcast_rewards.alarm import Alarm, TimeUp
from rollcast_rewards.function import FunctionReward
from rollcast_rewards.managers import BatchRewardManager, NaiveRewardManager
from rollcast_rewards.processes import PrimeRewardManager
from rollcast_rewards.trl import TrlReward
from rollcast_testing.misbehaviour import CASES, misbehave
from rollcast_testing.reward import RewardManagerSuite


class TestNaive(RewardManagerSuite):
    name = "naive"


class TestBatch(RewardManagerSuite):
    name = "batch"
    options = {"batch_size": 7}  # noqa: RUF012
    ends_hangs = False  # the whole call is bad


class TestPrime(RewardManagerSuite):
    name = "prime"
    options = {"num_processes": 2}  # noqa: RUF012
    survives_exits = True


class TestRemote(RewardManagerSuite):
    name = "remote"
    options = {"max_concurrent": 5}  # noqa: RUF012


class TestDapo(RewardManagerSuite):
    name = "dapo"


class TestDapoOverPrime(RewardManagerSuite):
    name = "dapo"
    options = {"inner": "prime", "inner_kwargs": {"num_processes": 1}}  # noqa: RUF012
    survives_exits = True


class Scripted(BaseReward):
    name = "scripted"

    def __init__(self, give: Callable[[RewardSample], Any]) -> None:
        self.give = give

    def score(self, sample: RewardSample) -> Any:
        return self.give(sample)


@pytest.fixture(autouse=True)
def by_value() -> Iterator[None]:
    """Nobody else can import a test module, so what stands in it travels whole."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def samples(count: int) -> list[RewardSample]:
    return [RewardSample(f"prompt {index}", f"response {index}", ground_truth=index) for index in range(count)]


@pytest.fixture
def prime() -> Iterator[Callable[..., BaseRewardManager]]:
    built: list[BaseRewardManager] = []

    def build(give: Callable[[RewardSample], Any], settings: RewardSettings | None = None, **options: Any) -> Any:
        built.append(PrimeRewardManager(Scripted(give), settings, **options))
        return built[-1]

    yield build
    for manager in built:
        manager.close()


def test_a_batch_of_512_with_a_hang_an_exception_a_nan_and_a_memory_eater(prime: Callable[..., Any]) -> None:
    def give(sample: RewardSample) -> float:
        while sample.ground_truth == 100:
            pass
        if sample.ground_truth == 200:
            raise KeyError("no such answer")
        if sample.ground_truth == 300:
            return float("nan")
        eaten = []
        while sample.ground_truth == 400:
            eaten.append(bytes(1 << 24))
        return float(sample.ground_truth)

    settings = RewardSettings("zero", timeout_s=4.0)
    results = prime(give, settings, num_processes=2, memory_limit_mb=256)(samples(512))
    errors = {index: result.error for index, result in enumerate(results) if result.error}
    assert list(errors) == [100, 200, 300, 400]
    assert "took longer than reward.timeout_s = 4 s" in errors[100]
    assert "KeyError: 'no such answer' (test_reward_isolation.py, line" in errors[200]
    assert "score = nan" in errors[300]
    assert "MemoryError" in errors[400]
    assert all(result.score == index for index, result in enumerate(results) if index not in errors)


def test_a_hang_that_catches_everything_is_ended() -> None:
    def give(sample: RewardSample) -> float:
        tries = 0
        while sample.ground_truth == 2 and tries < 5:
            try:
                time.sleep(3600)
            except BaseException:
                tries += 1
        return 1.0

    results = NaiveRewardManager(Scripted(give), RewardSettings("zero", 1.0, timeout_s=0.2))(samples(4))
    assert [result.score for result in results] == [1.0, 1.0, 1.0, 1.0]  # it gave up by itself at last
    results = NaiveRewardManager(Scripted(lambda sample: time.sleep(3600)), RewardSettings("zero", 1.0, timeout_s=0.2))(
        samples(1)
    )
    assert "took longer" in results[0].error


def test_somebody_elses_alarm_still_rings() -> None:
    rung = threading.Event()
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.set())
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with Alarm(0.1) as alarm, pytest.raises(TimeUp):
            alarm.call(time.sleep, 3600)
        assert not rung.is_set()
        assert rung.wait(10)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_in_another_thread_there_is_no_limit_and_no_error() -> None:
    found = []
    manager = NaiveRewardManager(Scripted(lambda sample: 1.0), RewardSettings(timeout_s=0.1))
    thread = threading.Thread(target=lambda: found.extend(manager(samples(3))))
    thread.start()
    thread.join()
    assert len(found) == 3


def test_a_batch_that_raises_is_divided_until_the_sample_is_found() -> None:
    calls: list[int] = []

    class Whole(BaseReward):
        name = "whole"

        def score(self, sample: RewardSample) -> float:
            raise NotImplementedError

        def score_batch(self, samples: Any) -> list[float]:
            calls.append(len(samples))
            return [1 / (sample.ground_truth - 5) for sample in samples]

    results = BatchRewardManager(Whole(), RewardSettings("zero"))(samples(16))
    assert [index for index, result in enumerate(results) if result.error] == [5]
    assert "ZeroDivisionError" in results[5].error
    assert calls == [16, 8, 4, 4, 2, 1, 1, 2, 8]
    calls.clear()
    results = BatchRewardManager(Whole(), RewardSettings("zero"), batch_size=4)(samples(16)[6:])
    assert calls == [4, 4, 2]
    with pytest.raises(ConfigError, match="batch_size is 0"):
        BatchRewardManager(Whole(), None, batch_size=0)


def test_a_batch_that_hangs_is_bad_as_a_whole() -> None:
    class Whole(BaseReward):
        def score(self, sample: RewardSample) -> float:
            raise NotImplementedError

        def score_batch(self, samples: Any) -> list[float]:
            if samples[0].ground_truth == 0:
                time.sleep(3600)
            return [1.0] * len(samples)

    results = BatchRewardManager(Whole(), RewardSettings("drop", 0.5, timeout_s=0.2), batch_size=3)(samples(6))
    assert [result.dropped for result in results] == [True] * 3 + [False] * 3
    assert "a batch of 3" in results[0].error


def test_the_first_of_several_bad_samples_is_shown_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    NaiveRewardManager(Scripted(lambda sample: 1.0 if sample.ground_truth % 4 else None), RewardSettings("drop", 0.5))(
        samples(8)
    )
    (record,) = caplog.records
    for part in ("2 of 8 samples got no score (value: 2) and are dropped", "sample 0 of 8", "prompt 0"):
        assert part in record.getMessage()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"on_error": "ignore"}, r"reward.on_error is 'ignore'; valid: stop, zero, drop"),
        ({"max_bad_share": 1.5}, r"reward.max_bad_share is 1.5"),
        ({"timeout_s": 0}, r"reward.timeout_s is 0"),
    ],
)
def test_settings_out_of_their_range(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RewardSettings(**values)


def test_options_that_a_manager_does_not_take() -> None:
    with pytest.raises(ConfigError, match=r"reward.reward_manager_kwargs do not fit the manager 'naive'.*workers"):
        build_reward_manager("naive", Scripted(float), None, {"workers": 2})
    with pytest.raises(ConfigError, match=r"num_processes is 0"):
        build_reward_manager("prime", Scripted(float), None, {"num_processes": 0})


# -- processes --------------------------------------------------------------------------------


def test_processes_are_kept_and_closed(prime: Callable[..., Any]) -> None:
    manager = prime(lambda sample: os.getpid(), num_processes=2)
    first = {int(result.score) for result in manager(samples(200))}
    assert {int(result.score) for result in manager(samples(200))} <= first | set(manager_pids(manager))
    assert os.getpid() not in first
    pids = manager_pids(manager)
    assert len(pids) == 2
    manager.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert [result.score for result in manager(samples(1))]  # it starts again


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def manager_pids(manager: Any) -> list[int]:
    return [process.child.pid for process in manager._processes]


def test_what_a_sample_started_is_ended_with_it(prime: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "pid"

    def give(sample: RewardSample) -> float:
        import subprocess

        child = subprocess.Popen(["sleep", "3600"])
        file.write_text(str(child.pid))
        child.wait()
        return 1.0

    results = prime(give, RewardSettings("zero", 1.0, timeout_s=1.0), num_processes=1)(samples(1))
    assert "took longer" in results[0].error
    pid = int(file.read_text())
    deadline = time.monotonic() + 30  # a kill takes effect a moment after it was sent
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} outlived its sample"
        time.sleep(0.01)


def test_each_way_to_misbehave_costs_one_sample(prime: Callable[..., Any]) -> None:
    cases = ["good", *CASES, "good"]
    batch = [RewardSample("", "", ground_truth=case) for case in cases]

    def score(sample: RewardSample) -> float:
        misbehave(sample.ground_truth)
        return 1.0

    settings = RewardSettings("zero", 1.0, timeout_s=1.0)
    results = prime(score, settings, num_processes=4, memory_limit_mb=256)(batch)
    assert [case for case, result in zip(cases, results, strict=True) if result.error] == list(CASES)
    assert [result.score for result in results] == [1.0, *[0.0] * len(CASES), 1.0]


@pytest.mark.parametrize("manager", ["naive", "batch", "remote"])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_exit_is_a_bad_sample_without_processes(manager: str, is_async: bool) -> None:
    class Exits(BaseReward):
        def score(self, sample: RewardSample) -> float:
            if sample.response == "1":
                sys.exit(3)
            return 1.0

    class ExitsLater(BaseReward):
        async def score(self, sample: RewardSample) -> float:  # type: ignore[override]
            return Exits().score(sample)

    built = build_reward_manager(manager, ExitsLater() if is_async else Exits(), RewardSettings("zero", 1.0))
    batch = [RewardSample("", str(number)) for number in range(3)]
    try:
        results = built(batch)
    finally:
        built.close()
    assert ["SystemExit: 3" in result.error for result in results] == [False, True, False]
    assert [result.score for result in results] == [1.0, 0.0, 1.0]


BATCH_FUNCTIONS = """
import asyncio, os, time

def sizes(completions, **kwargs):
    if "exit" in completions:
        os._exit(3)
    if "hang" in completions:
        time.sleep(60)
    if "raise" in completions:
        raise KeyError(completions)
    return [float(len(completions))] * len(completions)

async def waits(data_sources, solution_strs, ground_truths, extra_infos):
    await asyncio.sleep(0)
    return sizes(solution_strs)
"""


@pytest.mark.parametrize("kind", ["trl", "function"])
def test_functions_of_batches_cannot_end_the_run(kind: str, tmp_path: Path) -> None:
    (tmp_path / "batches.py").write_text(BATCH_FUNCTIONS)
    path = f"{tmp_path / 'batches.py'}:{'sizes' if kind == 'trl' else 'waits'}"
    reward = TrlReward(path) if kind == "trl" else FunctionReward(path)

    def scores(*responses: str, **options: Any) -> list[float | str]:
        manager = PrimeRewardManager(reward, RewardSettings("zero", 1.0, timeout_s=1.0), **options)
        try:
            results = manager([RewardSample("", response) for response in responses])
        finally:
            manager.close()
        return [result.error or result.score for result in results]

    assert scores(*"abc") == [3.0] * 3
    assert scores(*"abc", batch_size=2) == [2.0, 2.0, 1.0]
    found = scores("a", "b", "c", "d", "e", "exit", "f", "g")
    assert "ended its process (exit status 3)" in str(found.pop(5))
    assert found == [4.0] * 4 + [1.0, 2.0, 2.0]
    first, second, third = scores("a", "raise", "b")
    assert (first, third) == (1.0, 1.0) and "KeyError" in str(second)
    assert all("(a batch of 2)" in str(found) for found in scores("a", "hang"))


def test_a_batch_with_too_few_scores_ends_the_run() -> None:
    class TooFew(BaseReward):
        def score(self, sample: RewardSample) -> float:
            return 0.0

        def score_batch(self, samples: Sequence[RewardSample]) -> list[float]:
            return [0.0]

    manager = PrimeRewardManager(TooFew(), RewardSettings("zero", 1.0))
    try:
        with pytest.raises(RewardError, match=r"2 samples were given, 1 scores came back"):
            manager(samples(2))
    finally:
        manager.close()


def test_a_function_of_ones_own_keeps_its_memory_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(
        "import itertools\ncount = itertools.count()\n\ndef score(sample):\n    return next(count)\n"
    )
    manager = PrimeRewardManager(FunctionReward(f"{tmp_path / 'counting.py'}:score"))
    try:
        assert [result.score for result in manager(samples(8))] == list(range(8))
        assert [result.score for result in manager(samples(8))] == list(range(8, 16))
    finally:
        manager.close()


def test_a_reward_that_cannot_travel_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be pickled for the processes of reward.reward_manager=prime"):
        PrimeRewardManager(Scripted(lambda sample: float(lock.locked())))


class Unloadable(BaseReward):
    def score(self, sample: RewardSample) -> float:
        return 1.0

    def __reduce__(self) -> Any:
        return int, ("not a number",)


class Deadly(BaseReward):
    def score(self, sample: RewardSample) -> float:
        return 1.0

    def __reduce__(self) -> Any:
        return os._exit, (7,)


def test_a_reward_that_does_not_arrive_stops_the_run_whatever_the_policy() -> None:
    for reward, says in (
        (Unloadable(), "cannot be loaded.*not a number"),
        (Deadly(), r"did not start \(exit status 7"),
    ):
        manager = PrimeRewardManager(reward, RewardSettings("zero", 1.0))
        with pytest.raises(RewardError, match=says):
            manager(samples(3))
        manager.close()


def test_large_samples_and_errors_travel(prime: Callable[..., Any]) -> None:
    def give(sample: RewardSample) -> float:
        if sample.ground_truth:
            raise ValueError("x" * 1_000_000)
        return float(len(sample.response))

    big = [RewardSample("p", "r" * 3_000_000, ground_truth=bad) for bad in (0, 1, 0)]
    results = prime(give, RewardSettings("zero", 1.0), num_processes=2)(big)
    assert [result.score for result in results] == [3_000_000.0, 0.0, 3_000_000.0]
    assert len(results[1].error) > 1_000_000


def test_results_keep_their_numbers_across_processes(prime: Callable[..., Any]) -> None:
    import numpy as np

    (result,) = prime(lambda sample: np.float32(0.5))(samples(1))
    assert (result.score, type(result.score)) == (0.5, float)
    assert pickle.loads(pickle.dumps(result)) == result


def test_samples_that_end_as_the_time_does() -> None:
    """Alarms that ring between two samples belong to neither, and never leave the manager."""

    def give(sample: RewardSample) -> float:
        end = time.perf_counter() + 0.002 + 1e-5 * (sample.ground_truth % 7 - 3)
        while time.perf_counter() < end:
            pass
        return 1.0

    results = NaiveRewardManager(Scripted(give), RewardSettings("zero", 1.0, timeout_s=0.002))(samples(500))
    assert {result.score for result in results} <= {0.0, 1.0}
    assert all(bool(result.error) == (result.score == 0.0) for result in results)
