"""What happens on Ray when a rank dies, raises or hangs in the middle of a call, or between calls."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from failure_workers import Patient

from rollcast import ClassWithInitArgs, ResourcePool, WorkerGroup
from rollcast.errors import WorkerError, WorkerTimeoutError
from rollcast_ray.control import ask
from rollcast_ray.runtime import RayRuntime

LONG_S = 30.0


@pytest.fixture(scope="module")
def runtime() -> Iterator[RayRuntime]:
    with RayRuntime(num_cpus=3) as made:
        yield made


@pytest.fixture
def group(runtime: RayRuntime, tmp_path: Path) -> Iterator[WorkerGroup]:
    made = WorkerGroup(ResourcePool([3]), ClassWithInitArgs(Patient, str(tmp_path)), runtime=runtime, name="g")
    yield made
    made.shutdown()


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LONG_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def ended(folder: Path) -> set[str]:
    return {file.name for file in folder.glob("ended-*")}


def test_a_rank_that_is_killed_in_a_call_ends_it_for_all(group: WorkerGroup, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"^g\.worker\.die_or_wait failed on rank 1 \(node .*process died") as caught:
        group.with_timeout(LONG_S).die_or_wait(1)
    assert (caught.value.rank, caught.value.cause_type) == (1, "ProcessDied")
    assert soon(lambda: ended(tmp_path) == {"ended-0", "ended-2"})
    assert group.lost_ranks == [1]
    with pytest.raises(WorkerError, match=r"g\.worker\.pid failed on rank 1 .*process died"):
        group.pid()


@pytest.mark.parametrize("method", ["raise_or_wait", "raise_or_wait_in_a_loop"])
def test_an_error_of_one_rank_interrupts_the_others(group: WorkerGroup, tmp_path: Path, method: str) -> None:
    for _ in range(2):
        with pytest.raises(WorkerError, match=rf"{method} failed on rank 2 .*ValueError: no more"):
            getattr(group, method)(2)
        assert soon(lambda: ended(tmp_path) == {"ended-0", "ended-1"})
        assert len(set(group.with_timeout(LONG_S).pid())) == 3
    assert group.lost_ranks == []


def test_a_deadline_shows_where_the_late_rank_is_and_interrupts_it(group: WorkerGroup, tmp_path: Path) -> None:
    with pytest.raises(WorkerTimeoutError, match=r"no answer within 1 s from 1 of 3") as caught:
        group.with_timeout(1.0).wait_on(1)
    message = str(caught.value)
    assert "rank 1 is at:" in message
    assert "in wait_on" in message
    assert "time.sleep(600)" in message
    assert "site-packages/ray" not in message.partition("rank 1 is at:")[2]
    assert soon(lambda: ended(tmp_path) == {"ended-1"})
    assert len(group.with_timeout(LONG_S).pid()) == 3


def test_a_death_between_calls_is_noticed_and_told(group: WorkerGroup, caplog) -> None:
    os.kill(group.workers[0].info.pid, signal.SIGKILL)
    assert soon(lambda: group.lost_ranks == [0])
    assert "g has lost rank 0" in caplog.text
    with pytest.raises(WorkerError, match=r"g\.worker\.pid failed on rank 0 .*process died") as caught:
        group.pid()
    assert caught.value.node == group.workers[0].info.node


def test_only_the_controller_is_answered(group: WorkerGroup) -> None:
    address = group.workers[0].info.control
    assert address is not None
    assert ask(address, {"ask": "interrupt", "token": "of no call"}) == "False"
    with pytest.raises(OSError, match="refused"):
        ask(address._replace(key=b"x" * 32), {"ask": "stack"})
    assert str(address.key) not in repr(group.workers[0])
