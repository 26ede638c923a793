"""Work that grows with the number of ranks, and not with its square; no Ray is started here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rollcast.contracts.pools import ResourcePool
from rollcast.contracts.runtime import CallFailed, HostInfo, LaunchSpec
from rollcast_ray import actors
from rollcast_ray.pools import Slot
from rollcast_ray.runtime import RayRuntime

RANKS = 1024


class Counted(str):
    """A node's id, or a reference, that counts how often it is looked at."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        Counted.looks += 1
        return str.__hash__(self)


@pytest.fixture(autouse=True)
def start_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "looks", 0)


def test_places_of_ranks_are_counted_in_one_pass() -> None:
    nodes = [Counted(f"node{rank // 8}") for rank in range(RANKS)]
    infos = [HostInfo("here", rank, 1) for rank in range(RANKS)]
    contexts = actors._build_contexts(nodes, LaunchSpec("g", {}), infos)
    assert [(context.local_rank, context.local_world_size) for context in contexts[7:10]] == [(7, 8), (0, 8), (1, 8)]
    assert Counted.looks <= 20 * RANKS


def test_late_ranks_are_found_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    refs = [Counted(f"ref{rank}") for rank in range(RANKS)]

    def no_answer(*_: Any, **__: Any) -> Any:
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", no_answer)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs[::2], refs[1::2]))
    with pytest.raises(CallFailed) as caught:
        RayRuntime().gather(refs, 1.0)
    assert caught.value.late == tuple(range(1, RANKS, 2))
    assert Counted.looks <= 20 * RANKS


def test_parts_of_a_pool_count_its_nodes_once() -> None:
    class Nodes(tuple[int, ...]):
        passes = 0

        def __iter__(self) -> Any:
            Nodes.passes += 1
            return super().__iter__()

    pool = ResourcePool([8] * (RANKS // 8))
    pool.process_on_nodes = Nodes(pool.process_on_nodes)
    whole = pool.split([RANKS])[0]
    assert whole.process_on_nodes == (8,) * (RANKS // 8)
    assert Nodes.passes < 10


def test_the_class_of_the_actors_is_exported_once_for_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    exported: list[type] = []

    class Exported:
        def __init__(self, cls: type) -> None:
            exported.append(cls)

        def options(self, **_: Any) -> Exported:
            return self

        def remote(self, *_: Any) -> object:
            return object()

    monkeypatch.setattr(ray, "remote", Exported)
    group = SimpleNamespace(id=SimpleNamespace(hex=lambda: "00"))
    slots = [Slot(group, rank, "here", "node") for rank in range(8)]
    assert len(actors.start_actors(ResourcePool([8]), slots, LaunchSpec("g", {}))) == 8
    assert exported == [actors.HostActor]
