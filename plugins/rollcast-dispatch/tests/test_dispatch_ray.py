"""The modes on Ray workers, four of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from dispatch_functions import numbered
from dispatch_mesh_workers import Sharded
from dispatch_mode_workers import Modes

from rollcast import (
    ClassWithInitArgs,
    DataProto,
    DataProtoFuture,
    Dispatch,
    ResourcePool,
    WorkerGroup,
    register_dispatch_mode,
)
from rollcast.contracts.dispatch import dispatch_modes
from rollcast_ray.runtime import RayRuntime


@pytest.fixture(scope="module")
def runtime() -> Iterator[RayRuntime]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        with RayRuntime(num_cpus=4, object_store_memory=100 << 20) as started:
            yield started


@pytest.fixture(scope="module")
def roles(runtime: RayRuntime) -> Iterator[dict[str, WorkerGroup]]:
    classes = {"modes": ClassWithInitArgs(Modes), "sharded": ClassWithInitArgs(Sharded)}
    made = WorkerGroup(ResourcePool([4]), classes, runtime=runtime)
    yield made.spawn()
    made.shutdown()


@pytest.fixture
def group(roles: dict[str, WorkerGroup]) -> WorkerGroup:
    return roles["modes"]


@pytest.fixture
def stored(runtime: RayRuntime, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of what the driver has put into the store."""
    lengths: list[int] = []
    put = runtime.put
    monkeypatch.setattr(runtime, "put", lambda value: lengths.append(len(value)) or put(value))
    return lengths


def test_lists_functions_and_metrics(group) -> None:
    assert group.own_value(["a", "b", "c", "d"]) == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert group.metric(numbered(8)) == [{"rank": rank, "sum": 4 * rank + 1} for rank in range(4)]
    shift = torch.tensor(100)
    out = group.with_function(lambda worker, data: worker.marked(data.with_columns(x=data["x"] + shift)), numbered(5))
    assert out["x"].tolist() == [100, 101, 102, 103, 104]
    assert out["rank"].tolist() == [0, 0, 1, 1, 2]


def test_megatron(group, stored) -> None:
    out = group.by_dp(numbered(5))
    assert out["x"].tolist() == [0, 1, 2, 3, 4]
    assert out["rank"].tolist() == [1, 1, 1, 3, 3]
    assert stored == [3, 3]
    assert group.by_stage(numbered(5))["rank"].tolist() == [0, 0, 1, 1, 2]
    assert group.names() == ["layers of rank 0", "layers of rank 1"]
    assert len(group.by_dp(numbered(0))) == 0


def test_direct_calls(group) -> None:
    assert group.ask("who?") == ["who? 0", "who? 2"]


def test_token_balanced(group, stored) -> None:
    batch = DataProto.from_dict(
        {"x": torch.arange(6), "length": torch.tensor([9, 9, 9, 1, 1, 1])}, {"id": list("aabbcc")}
    )
    out = group.balanced(batch)
    assert out.drop(["rank", "rows"]).equal(batch)
    assert out["rank"].tolist() == [1, 1, 3, 3, 3, 3]
    assert sorted(stored) == [4, 4]
    lengths = torch.tensor([8, 7, 2, 1])
    masked = DataProto.from_dict({"x": torch.arange(4), "attention_mask": torch.arange(8) < lengths.unsqueeze(1)})
    assert group.balanced_by_mask(masked)["rank"].tolist() == [0, 1, 2, 3]


def test_a_handle_goes_through_modes_of_every_kind(group) -> None:
    """From one mode's ranks to another's; the driver has handles only."""
    batch = numbered(7).with_columns(length=torch.tensor([5, 5, 5, 1, 1, 1, 1]))
    first = group.proto.remote(batch)
    second = group.balanced.remote(first)
    third = group.by_stage.remote(second.select().rename({"rank": "balanced_on"}))
    assert all(isinstance(handle, DataProtoFuture) for handle in (first, second, third))
    out = third.get()
    assert out.select(["x", "id", "length"]).equal(batch.select(["x", "id", "length"]))
    assert out["rank"].tolist() == [0, 0, 1, 1, 2, 2, 3]
    loads = torch.zeros(4, dtype=torch.int64).index_add(0, out["balanced_on"], out["length"])
    # The lighter shard repeats a row of one token to have four rows; in runs the heavier one would have 16.
    assert sorted(loads.tolist()) == [0, 0, 7, 12]


def test_modes_by_name_in_the_workers(group) -> None:
    """Installed ones, and one that the driver registers while the group runs."""
    register_dispatch_mode("halves_by_hand", lambda group, data: ((data.chunk(4),), {}), lambda group, outputs: outputs)
    try:
        here = {name: type(getattr(Dispatch, name)).__name__ for name in Dispatch}
        assert here["HALVES_BY_HAND"] == "FunctionMode"
        assert here["MEGATRON_PP_ONLY"] == "MegatronPpOnly"
        assert group.modes() == [here] * 4
    finally:
        dispatch_modes.unregister("halves_by_hand")


def test_a_mesh(roles, stored) -> None:
    group = roles["sharded"]
    out = group.where(numbered(5))
    assert out["x"].tolist() == [0, 1, 2, 3, 4]
    assert out["rank"].tolist() == [1, 1, 1, 3, 3]
    assert out["rows"].tolist() == [3] * 5
    assert list(out["id"]) == ["r0", "r1", "r2", "r3", "r4"]
    assert stored == [3, 3]
    assert len(group.where(numbered(0))) == 0
