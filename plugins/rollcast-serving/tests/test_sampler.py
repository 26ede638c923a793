"""A weight sync over several replicas, some of which die or are interrupted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, RolloutSequence, SamplingParams
from rollcast.contracts.sections import CanaryConfig
from rollcast.contracts.worker import WorkerContext
from rollcast.errors import RolloutError, WeightSyncError
from rollcast.protocol import DataProto, Jagged
from rollcast_serving.client import ReplicaGoneError
from rollcast_serving.contracts.weight_sync import SyncInterruptedError, SyncOutcome, weight_syncs
from rollcast_serving.generation import GenerationContractError
from rollcast_serving.launcher import ReplicaAddress, served_by
from rollcast_serving.sampler import Canary, ReplicaSampler

METRICS = {"sync/seconds": 1.0, "sync/bytes": 8.0, "sync/tensors": 2.0, "sync/load_seconds": 0.5}


class ScriptedActor:
    """An actor whose sync fails for some replicas, by script: one mapping a call."""

    def __init__(self, script: Sequence[Mapping[int, RolloutError]]) -> None:
        self.script = list(script)
        self.calls: list[tuple[int, list[tuple[int, int]], bool]] = []

    def update_weights(self, version: int, replicas: Sequence[ReplicaAddress], whole: bool) -> list[SyncOutcome]:
        self.calls.append((version, [(each.index, each.generation) for each in replicas], whole))
        failed = self.script.pop(0) if self.script else {}
        served = frozenset(each.index for each in replicas)
        return [SyncOutcome(METRICS if len(failed) < len(replicas) else {}, failed, served), SyncOutcome()]


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


def test_a_replica_that_no_rank_serves_is_told() -> None:
    class Elsewhere(ScriptedActor):
        def update_weights(self, version: int, replicas: Sequence[ReplicaAddress], whole: bool) -> list[SyncOutcome]:
            return [SyncOutcome(METRICS, served=frozenset({0})), SyncOutcome(METRICS, served=frozenset({2}))]

    canary = Canary([5], SamplingParams(), CanaryConfig(enable=False))
    sampler = ReplicaSampler(Elsewhere([]), FewReplicas(), canary, takes_turns=False)  # type: ignore[arg-type]
    with pytest.raises(WeightSyncError, match="replica 1 on node n gets no weights"):
        sampler.sync(4)


@pytest.mark.parametrize(
    ("sync", "served"),
    [
        ("cuda_ipc", {0: [0], 2: [1], 4: [2], 6: [3]}),
        ("shared_memory", {0: [0, 1], 4: [2, 3]}),
        ("collective", {0: [0, 1, 2, 3]}),
    ],
)
def test_each_replica_is_served_by_a_rank_that_reaches_it(sync: str, served: Mapping[int, list[int]]) -> None:
    # Two nodes of four devices; replicas of two.
    replicas = [
        ReplicaAddress(index, f"n{index // 2}", "h", 1, 2, "t", device=str(index % 2 * 2)) for index in range(4)
    ]
    for rank in range(8):
        local = rank % 4
        place = WorkerContext(rank, 8, local, 4, node=f"n{rank // 4}", device_id=str(local))
        found = served_by(place, weight_syncs.get(sync).capabilities, replicas)
        assert [replica.index for replica in found] == served.get(rank, [])


def test_a_death_that_interrupts_nobody_costs_one_restart() -> None:
    sampler, actor = make([{2: ReplicaGoneError("gone")}])
    sampler.sync(7)
    assert [addresses for _, addresses, _ in actor.calls] == [[(0, 0), (1, 0), (2, 0)], [(2, 1)]]


def test_a_replica_that_dies_again_as_it_comes_up_has_failed_to_restart() -> None:
    sampler, _ = make([{2: ReplicaGoneError("gone")}, {2: ReplicaGoneError("gone again")}])
    with pytest.raises(ReplicaGoneError, match="gone again"):  # the manager tries again; see its tests
        sampler.sync(7)


# -- the canary -------------------------------------------------------------------------------


class EchoingReplicas(FewReplicas):
    """Replicas that continue the canary by one token, whose log-prob differs from the actor's by ``gap``."""

    def __init__(self, gap: float) -> None:
        super().__init__()
        self.gap = gap

    def generate_on_each(self, request: RolloutRequest) -> list[RolloutOutput]:
        sequence = RolloutSequence([4], [-1.0 - self.gap], "length", [1])
        return [RolloutOutput("canary", [sequence], request.sampling) for _ in self.addresses]


class CertainActor(ScriptedActor):
    """An actor for which every token has the log-prob -1."""

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        responses = Jagged.of(batch["responses"])
        return DataProto.from_dict(
            {"old_log_probs": responses.with_values(-torch.ones(len(responses.values))).column()}
        )


def check(gap: float, canary: Canary) -> float:
    return ReplicaSampler(CertainActor([]), EchoingReplicas(gap), canary, takes_turns=False)._check_canary()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tolerance", "actor", "rollout", "limit"),
    [
        (None, "float32", "float32", 0.05),
        (None, "float32", "float16", 0.05),
        (None, "float32", "bfloat16", 0.2),
        (None, "bfloat16", "float32", 0.2),
        (None, "float32", None, 0.2),
        (None, None, "float32", 0.2),
        (None, "float32", "float8_e4m3fn", 0.2),
        (0.4, "float32", "float32", 0.4),
        (0.01, "bfloat16", "bfloat16", 0.01),
    ],
)
def test_the_canary_is_held_to_the_coarser_dtype(
    tolerance: float | None, actor: str | None, rollout: str | None, limit: float
) -> None:
    config = CanaryConfig(tolerance=tolerance)
    canary = Canary([5], SamplingParams(max_tokens=1), config, actor, rollout)
    assert check(limit * 0.9, canary) == pytest.approx(limit * 0.9, rel=1e-4)
    with pytest.raises(WeightSyncError, match=rf"a difference above rollout\.canary\.tolerance={limit:g}") as caught:
        check(limit * 1.1, canary)
    assert ("the default for an actor in" in str(caught.value)) == (tolerance is None)


def test_a_log_prob_that_is_no_number_is_noticed() -> None:
    with pytest.raises(GenerationContractError, match="not finite"):
        check(float("nan"), Canary([5], SamplingParams(max_tokens=1), CanaryConfig(tolerance=100.0)))
