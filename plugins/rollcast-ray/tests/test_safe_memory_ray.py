"""On Ray: writes in place reach nobody else without an error, calls chain before they end, coroutines run together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safe_workers import WAYS, Asynchronous, Careless, OneByOne, Stage

from rollcast import ClassWithInitArgs, DataProto, ResourcePool, WorkerGroup
from rollcast.errors import DataProtoError, WorkerError
from rollcast_ray.runtime import RayRuntime

ROWS = 2000


@pytest.fixture(scope="module")
def runtime() -> Iterator[RayRuntime]:
    with RayRuntime(num_cpus=8) as started:
        yield started


def usable(group: WorkerGroup) -> WorkerGroup:
    """On a slow machine a failure may have left the other rank in the middle of its call."""
    if group.poisoned:
        group.restart()
    return group


@pytest.fixture
def pair(started_pair: WorkerGroup) -> WorkerGroup:
    return usable(started_pair)


@pytest.fixture
def stages(started_stages: list[WorkerGroup]) -> list[WorkerGroup]:
    return [usable(group) for group in started_stages]


@pytest.fixture(scope="module")
def started_pair(runtime: RayRuntime) -> WorkerGroup:
    """Two ranks that share what they get."""
    return WorkerGroup(ResourcePool([2]), ClassWithInitArgs(Careless), runtime=runtime, name="pair")


@pytest.fixture(scope="module")
def started_stages(runtime: RayRuntime) -> list[WorkerGroup]:
    return [
        WorkerGroup(ResourcePool([size]), ClassWithInitArgs(Stage), runtime=runtime, name=f"stage{size}")
        for size in (1, 2)
    ]


def batch() -> DataProto:
    return DataProto({"x": torch.arange(float(ROWS * 20)).view(ROWS, 20)})


def ended(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("way", WAYS)
def test_a_write_to_shared_rows_is_an_error(pair, way: str) -> None:
    with pytest.raises(WorkerError, match=r"pair\.worker\.write failed.*wrote in place to column 'x'"):
        pair.write(batch(), way)
    assert pair.read(batch()) == [batch()["x"].flatten().tolist()] * 2


def test_a_declared_write_is_private_to_each_rank(pair) -> None:
    handle = pair.keep.remote(batch())
    expected = (batch()["x"] + 1).flatten().tolist()
    for data in (batch(), handle, handle):
        assert pair.write_own(data, "add_") == [expected, expected]
    assert pair.read(handle) == [batch()["x"].flatten().tolist()] * 2


@pytest.mark.exhaustive
def test_damaged_rows_cannot_be_read_by_anybody(pair, stages) -> None:
    kept = stages[0].plus.remote(DataProto({"y": torch.zeros(ROWS, 20)}))
    with pytest.raises(WorkerError, match="wrote in place to column 'z'"):
        pair.write(kept, "add_", "z")
    with pytest.raises(DataProtoError, match="damaged and cannot be read"):
        kept.get()
    with pytest.raises(WorkerError, match="damaged and cannot be read"):
        pair.write_own(kept.select("z").rename({"z": "x"}), "add_")


def test_what_the_driver_writes_is_its_own(pair, stages) -> None:
    kept = stages[0].plus.remote(DataProto({"y": torch.zeros(ROWS, 20)})).select("z").rename({"z": "x"})
    kept["x"].add_(5)
    kept.local()["x"].add_(5)
    assert pair.read(kept) == [[1.0] * ROWS * 20] * 2


def test_what_ranks_share_is_stored_once_in_containers_too(pair, runtime, monkeypatch) -> None:
    stored: list[Any] = []
    put = runtime.put
    monkeypatch.setattr(runtime, "put", lambda value: stored.append(value) or put(value))
    handle = pair.keep.remote(batch())
    weights, blob = {"w": torch.ones(1000)}, b"x" * 5000
    total = 1000.0 + 5000 + float(batch()["x"].sum())
    assert pair.share(weights, blob, handle) == pytest.approx([total, total])
    assert [type(value).__name__ for value in stored] == ["dict", "bytes", "DataProto"]


def test_handles_inside_containers_are_read(pair) -> None:
    handle = pair.keep.remote(batch())
    assert pair.count({"batches": [handle]}) == [[ROWS, int(batch()["x"].sum())]] * 2


def test_calls_chain_before_the_first_has_ended(stages, tmp_path: Path) -> None:
    one, two = stages
    first = two.after.remote(batch(), str(tmp_path))
    second = one.plus.remote(first.select(["y"]))
    third = two.plus.remote(second.select("z").rename({"z": "y"}).slice(0, 10))
    assert (len(first), len(second), len(third)) == (ROWS, ROWS, 10)
    assert not (first.done() or second.done() or third.done())
    (tmp_path / "go").touch()
    assert torch.equal(third.get()["z"], batch()["x"][:10] * 2 + 2)
    assert torch.equal(second.select("z")["z"], batch()["x"] * 2 + 1)
    with pytest.raises(DataProtoError, match=r"no column 'nothing'"):
        first.select("nothing").local()


def test_stages_of_two_pools_run_at_one_time(stages, tmp_path: Path) -> None:
    # Each ends only if the other has started; one after the other they would never end.
    one, two = stages
    left = one.meet.remote(batch(), str(tmp_path), "left", "right")
    right = two.meet.remote(batch(), str(tmp_path), "right", "left")
    both = left.select("left").joined(right.select("right"))
    assert len(both) == ROWS
    assert sorted(both.local(timeout=60).keys()) == ["left", "right"]


def test_an_error_of_the_first_call_is_that_of_the_chain(stages) -> None:
    one, two = stages
    broken = two.fail.remote(batch())
    after = one.plus.remote(broken)
    with pytest.raises(WorkerError, match="this stage breaks"):
        after.get(timeout=60)


def test_results_come_as_ranks_end(stages, tmp_path: Path) -> None:
    results = stages[1].ranked.remote(str(tmp_path)).as_completed()
    assert next(results) == (1, 1)
    (tmp_path / "second").touch()
    assert list(results) == [(0, 0)]


def test_coroutines_run_beside_other_calls(runtime: RayRuntime) -> None:
    group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(Asynchronous), runtime=runtime, name="beside")
    waiting = [group.wait.remote() for _ in range(3)]
    assert ended(lambda: group.plain()[0].count("wait") == 3)
    assert not any(handle.done() for handle in waiting)
    group.release()
    assert [handle.get(timeout=60) for handle in waiting] == [["released"]] * 3
    group.shutdown()


def test_coroutines_can_be_kept_in_the_thread_of_all_calls(runtime: RayRuntime) -> None:
    group = WorkerGroup(ResourcePool([1]), ClassWithInitArgs(OneByOne), runtime=runtime, name="one_by_one")
    handles = [group.step.remote() for _ in range(4)]
    assert [handle.get(timeout=60) for handle in handles] == [[(1, "MainThread")]] * 4
    group.shutdown()
