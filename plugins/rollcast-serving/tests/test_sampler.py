"""A weight sync over several replicas, some of which die or are interrupted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rollcast.contracts.rollout import SamplingParams
from rollcast.contracts.sections import CanaryConfig
from rollcast.errors import RolloutError
from rollcast_serving.client import ReplicaGoneError
from rollcast_serving.launcher import ReplicaAddress
from rollcast_serving.sampler import Canary, ReplicaSampler
from rollcast_serving.weight_sync import SyncInterruptedError, SyncOutcome

METRICS = {"sync/seconds": 1.0, "sync/bytes": 8.0, "sync/tensors": 2.0, "sync/load_seconds": 0.5}


class ScriptedActor:
    """An actor whose sync fails for some replicas, by script: one mapping a call."""

    def __init__(self, script: Sequence[Mapping[int, RolloutError]]) -> None:
        self.script = list(script)
        self.calls: list[tuple[int, list[tuple[int, int]], bool]] = []

    def update_weights(self, version: int, replicas: Sequence[ReplicaAddress], whole: bool) -> list[SyncOutcome]:
        self.calls.append((version, [(each.index, each.generation) for each in replicas], whole))
        failed = self.script.pop(0) if self.script else {}
        return [SyncOutcome(METRICS if len(failed) < len(replicas) else {}, failed), SyncOutcome()]


class FewReplicas:
    """Three replicas; one that is replaced gets a new address and the weights."""

    def __init__(self) -> None:
        self.addresses = [ReplicaAddress(index, "n", "h", 1, 2, "t") for index in range(3)]
        self.resync: Any = None

    def check_health(self) -> None:
        return

    def replace_dead(self, deaths: Mapping[int, RolloutError]) -> None:
        for index in deaths:
            self.addresses[index] = ReplicaAddress(index, "n", "h", 1, 2, "t", 1)
            self.resync([self.addresses[index]])


def make(script: Sequence[Mapping[int, RolloutError]]) -> tuple[ReplicaSampler, ScriptedActor]:
    actor = ScriptedActor(script)
    canary = Canary([5], SamplingParams(), CanaryConfig(enable=False))
    return ReplicaSampler(actor, FewReplicas(), canary, takes_turns=False), actor  # type: ignore[arg-type]


def test_the_dead_one_is_replaced_and_the_interrupted_ones_are_sent_to_again() -> None:
    again = SyncInterruptedError("another one died")
    sampler, actor = make([{0: again, 1: ReplicaGoneError("gone"), 2: again}])
    metrics = sampler.sync(4)
    assert actor.calls == [
        (4, [(0, 0), (1, 0), (2, 0)], False),
        (4, [(1, 1)], False),  # as it came up
        (4, [(0, 0), (2, 0)], True),  # whole, whatever these had before
    ]
    assert metrics["rollout/weight_version"] == 4
    assert metrics["sync/GB_per_s"] == pytest.approx(8e-9)


def test_a_death_that_interrupts_nobody_costs_one_restart() -> None:
    sampler, actor = make([{2: ReplicaGoneError("gone")}])
    sampler.sync(7)
    assert [addresses for _, addresses, _ in actor.calls] == [[(0, 0), (1, 0), (2, 0)], [(2, 1)]]


def test_a_replica_that_dies_again_as_it_comes_up_has_failed_to_restart() -> None:
    sampler, _ = make([{2: ReplicaGoneError("gone")}, {2: ReplicaGoneError("gone again")}])
    with pytest.raises(ReplicaGoneError, match="gone again"):  # the manager tries again; see its tests
        sampler.sync(7)
