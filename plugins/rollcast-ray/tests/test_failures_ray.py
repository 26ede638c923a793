"""What happens on Ray when a rank dies, raises or hangs in the middle of a call, or between calls."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from failure_workers import Patient

from rollcast import ClassWithInitArgs, ResourcePool, WorkerGroup
from rollcast.errors import WorkerError, WorkerTimeoutError
from rollcast_ray import liveness
from rollcast_ray.control import ask
from rollcast_ray.liveness import LivenessWatch
from rollcast_ray.runtime import RayRuntime

pytestmark = pytest.mark.long

LONG_S = 60.0


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


@pytest.mark.cases(1)
@pytest.mark.parametrize("method", ["raise_or_wait", "raise_or_wait_in_a_loop"])
def test_an_error_of_one_rank_interrupts_the_others_and_poisons_the_group(
    group: WorkerGroup, tmp_path: Path, method: str
) -> None:
    view = group.with_timeout(LONG_S)
    before = group.pid()
    with pytest.raises(WorkerError, match=rf"{method} failed on rank 2 .*ValueError: no more"):
        getattr(group, method)(2)
    assert soon(lambda: ended(tmp_path) == {"ended-0", "ended-1"})
    assert group.lost_ranks == []
    with pytest.raises(
        WorkerError, match=rf"^g\.worker\.pid is refused: worker\.{method} failed on rank 2 while"
    ) as caught:
        view.pid()
    assert "while ranks 0, 1 were in the middle of it" in str(caught.value)
    assert "until restart()" in str(caught.value)
    group.restart()
    assert len({*before, *view.pid()}) == 6
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in before)


@pytest.mark.exhaustive
def test_an_error_that_every_rank_raises_poisons_nothing(group: WorkerGroup) -> None:
    group.pid()  # the first call of a process may take long
    with pytest.raises(WorkerError, match="ValueError: all of us"):
        group.raise_on_all()
    assert group.poisoned == ""
    assert len(set(group.with_timeout(LONG_S).pid())) == 3


def test_a_deadline_shows_where_the_late_rank_is_and_interrupts_it(group: WorkerGroup, tmp_path: Path) -> None:
    with pytest.raises(WorkerTimeoutError, match=r"no answer within 1 s from 1 of 3") as caught:
        group.with_timeout(1.0).wait_on(1)
    message = str(caught.value)
    assert "rank 1 is at:" in message
    assert "in wait_on" in message
    assert "time.sleep(600)" in message
    assert "site-packages/ray" not in message.partition("rank 1 is at:")[2]
    assert soon(lambda: ended(tmp_path) == {"ended-1"})
    with pytest.raises(WorkerError, match=r"pid is refused: worker\.wait_on passed its deadline while rank 1 was in"):
        group.pid()


@pytest.mark.exhaustive
def test_calls_that_wait_behind_a_failed_one_do_not_run(group: WorkerGroup, tmp_path: Path) -> None:
    failing = group.raise_on_all.remote()
    behind = group.mark.remote("behind")
    with pytest.raises(
        WorkerError, match=r"mark was not run on this rank, because before it worker\.raise_on_all failed"
    ):
        behind.get(timeout=LONG_S)
    with pytest.raises(WorkerError, match="ValueError: all of us"):
        failing.get(timeout=LONG_S)
    assert not list(tmp_path.glob("behind-*"))
    assert group.mark("after") == [0, 1, 2]
    assert len(list(tmp_path.glob("after-*"))) == 3


@pytest.mark.exhaustive
def test_a_rank_that_cannot_be_interrupted_is_named(group: WorkerGroup, tmp_path: Path, caplog) -> None:
    handle = group.wait_on.remote(1)
    assert soon(lambda: (tmp_path / "started-1").exists())
    os.kill(group.workers[1].info.pid, signal.SIGSTOP)  # answers nothing, like a node that is cut off
    assert handle.cancel() is True
    node = group.workers[1].info.node
    assert f"g.worker.wait_on: could not be interrupted and may still run the call: rank 1 (node {node})" in caplog.text
    with pytest.raises(WorkerError, match=r"pid is refused: worker\.wait_on was cancelled while rank 1 was in"):
        group.pid()
    group.restart()
    assert len(set(group.with_timeout(LONG_S).pid())) == 3


def test_the_watch_survives_an_error_and_says_when_it_stops(runtime: RayRuntime, monkeypatch, caplog) -> None:
    watch = LivenessWatch(lambda host, error: "", look_s=0.01)
    looks: list[bool] = []

    def look() -> None:
        looks.append(True)
        if len(looks) < 3:
            raise ValueError("a hiccup")

    monkeypatch.setattr(watch, "_look", look)
    watch.watch("g", [])
    assert soon(lambda: len(looks) > 5)
    assert caplog.text.count("the watch for dead workers failed and goes on") == 1
    assert "a hiccup" in caplog.text
    thread = watch._thread
    monkeypatch.setattr(liveness.ray, "is_initialized", lambda: False)
    looks.clear()
    assert thread is not None
    assert soon(lambda: not thread.is_alive())
    assert "the watch for dead workers stops" in caplog.text
    watch.stop()


def test_waiting_never_cancels_and_cancel_does(group: WorkerGroup, tmp_path: Path) -> None:
    handle = group.wait_for_file.remote(str(tmp_path / "go"))
    for _ in range(2):
        with pytest.raises(WorkerTimeoutError, match=r"no answer within 0\.1 s from 3 of 3 .*The call goes on"):
            handle.get(timeout=0.1)
    assert not handle.done()
    (tmp_path / "go").touch()
    assert handle.get(timeout=LONG_S) == [0, 1, 2]
    assert handle.cancel() is False
    assert ended(tmp_path) == set()
    handle = group.wait_on.remote(1)
    assert soon(lambda: (tmp_path / "started-1").exists())
    assert handle.cancel() is True
    assert soon(lambda: ended(tmp_path) == {"ended-1"})
    assert handle.done()
    with pytest.raises(WorkerError, match="this call was cancelled"):
        handle.get()
    with pytest.raises(WorkerError, match=r"pid is refused: worker\.wait_on was cancelled while rank 1 was in"):
        group.pid()


@pytest.mark.exhaustive
def test_a_call_that_has_not_started_is_cancelled_without_harm(group: WorkerGroup, tmp_path: Path) -> None:
    first = group.wait_for_file.remote(str(tmp_path / "go"))
    waiting = group.wait_on.remote(1)
    assert waiting.cancel() is True
    assert group.poisoned == ""
    (tmp_path / "go").touch()
    assert first.get(timeout=LONG_S) == [0, 1, 2]
    assert len(group.with_timeout(LONG_S).pid()) == 3


def test_a_group_that_lost_a_rank_is_restarted(group: WorkerGroup) -> None:
    view = group.spawn()["worker"]
    before = group.pid()
    os.kill(before[1], signal.SIGKILL)
    assert soon(lambda: group.lost_ranks == [1])
    with pytest.raises(WorkerError, match=r"pid failed on rank 1 .*process died(.|\n)*after restart\(\)"):
        view.pid()
    group.restart()
    assert group.lost_ranks == []
    assert not {*before} & {*view.with_timeout(LONG_S).pid()}
    assert [context.rank for context in view.contexts] == [0, 1, 2]


@pytest.mark.exhaustive
def test_a_call_of_before_a_restart_does_not_poison_the_group(group: WorkerGroup) -> None:
    old = group.wait_on.remote(1)
    group.restart()
    with pytest.raises(WorkerError, match="process died"):
        old.get(timeout=LONG_S)
    assert group.poisoned == ""
    assert len(group.pid()) == 3


@pytest.mark.exhaustive
def test_a_death_between_calls_is_noticed_and_told(group: WorkerGroup, caplog) -> None:
    os.kill(group.workers[0].info.pid, signal.SIGKILL)
    assert soon(lambda: group.lost_ranks == [0])
    assert "g has lost rank 0" in caplog.text
    with pytest.raises(WorkerError, match=r"g\.worker\.pid failed on rank 0 .*process died") as caught:
        group.pid()
    assert caught.value.node == group.workers[0].info.node


@pytest.mark.exhaustive
def test_only_the_controller_is_answered(group: WorkerGroup) -> None:
    address = group.workers[0].info.control
    assert address is not None
    assert ask(address, {"ask": "interrupt", "token": "of no call"}) == "ended"
    with pytest.raises(OSError, match="refused"):
        ask(address._replace(key=b"x" * 32), {"ask": "stack"})
    assert str(address.key) not in repr(group.workers[0])
