"""Which combinations of engine, rollout, sync and mode are refused, why, and what is offered instead."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rollcast import WorkerHost
from rollcast.contracts.engine import BaseEngine, EngineCapabilities
from rollcast.contracts.rollout import BaseRollout, RolloutCapabilities, RolloutMode
from rollcast.contracts.runtime import WorkerRaised
from rollcast.contracts.worker import ClassWithInitArgs, WorkerContext
from rollcast.errors import CapabilityError, ConfigError, PluginNotFoundError
from rollcast_serving.contracts.weight_sync import weight_syncs
from rollcast_serving.launcher import ReplicaSpec
from rollcast_serving.negotiation import Choice, check_choice, check_places, check_world_sizes
from rollcast_serving.shapes import ReplicaShape, check_spans, split_nodes
from rollcast_serving.worker import ReplicaWorker

CHOICE = Choice("e", "r", "hybrid", "in_process")


def parts(engine: dict[str, Any], rollout: dict[str, Any]) -> tuple[type[BaseEngine], type[BaseRollout]]:
    engine_class = type("E", (BaseEngine,), {"capabilities": EngineCapabilities(**engine)})
    rollout_class = type("R", (BaseRollout,), {"capabilities": RolloutCapabilities(**rollout)})
    return engine_class, rollout_class


EVERYWHERE = {"modes": frozenset(RolloutMode)}


@pytest.mark.parametrize(
    ("changes", "engine", "rollout", "words"),
    [
        (
            {"mode": "colocated"},
            {"in_process_module": True},
            {**EVERYWHERE, "in_process": True},
            r"sync 'in_process' supports the modes hybrid; this would work: .*mode=colocated, .*sync=shared_memory",
        ),
        (
            {"mode": "standalone", "weight_sync": "shared_memory"},
            {},
            {"modes": frozenset({RolloutMode.HYBRID})},
            r"rollout 'r' supports the modes hybrid; this would work: .*mode=hybrid, .*sync=shared_memory",
        ),
        ({}, {"in_process_module": True}, EVERYWHERE, r"with which rollout 'r' cannot generate; .*sync=shared_memory"),
        ({}, {}, {**EVERYWHERE, "in_process": True}, r"engine 'e' has none that can generate; .*shared_memory"),
        (
            {"shape": ReplicaShape(2), "weight_sync": "disk"},
            {},
            EVERYWHERE,
            r"no tensor parallelism \(rollout.tensor_model_parallel_size\); this would work: .*sync=disk",
        ),
        (
            {"shape": ReplicaShape(2, pipeline=2), "weight_sync": "disk"},
            {},
            {**EVERYWHERE, "tensor_parallel": True},
            r"no pipeline parallelism \(rollout.pipeline_model_parallel_size\); this would work: .*sync=disk",
        ),
        (
            {"shape": ReplicaShape(data=2)},
            {"in_process_module": True},
            {**EVERYWHERE, "in_process": True},
            r"process has no rollout.data_parallel_size of its own; this would work: .*sync=in_process",
        ),
        (
            {"mode": "colocated", "weight_sync": "shared_memory", "update_in_flight": "interrupt"},
            {},
            EVERYWHERE,
            r"rollout 'r' cannot abort requests, which rollout.update_in_flight=interrupt needs",
        ),
        (
            {"update_in_flight": "finish"},
            {"in_process_module": True},
            {**EVERYWHERE, "in_process": True},
            r"rollout.update_in_flight=finish needs replicas, .*this would work: .*sync=shared_memory",
        ),
        ({}, {}, {}, r"supports the modes none; no installed alternative works"),
    ],
)
def test_refused_with_the_nearest(
    changes: dict[str, Any], engine: dict[str, Any], rollout: dict[str, Any], words: str
) -> None:
    with pytest.raises(CapabilityError, match=words):
        check_choice(dataclasses.replace(CHOICE, **changes), *parts(engine, rollout))


def test_what_is_offered_works() -> None:
    """Over every combination: either it passes, or nothing that passes was near it."""
    for in_process_module in (True, False):
        for in_process in (True, False):
            both = parts({"in_process_module": in_process_module}, {**EVERYWHERE, "in_process": in_process})
            passed = []
            for mode in RolloutMode:
                for sync in weight_syncs.names():
                    choice = Choice("e", "r", mode.value, sync)
                    try:
                        check_choice(choice, *both)
                        passed.append(choice)
                    except CapabilityError as error:
                        assert "this would work" in str(error)
            alone = {(choice.mode, choice.weight_sync) for choice in passed}
            assert (("hybrid", "in_process") in alone) == (in_process and in_process_module)
            assert {("colocated", "shared_memory"), ("standalone", "collective"), ("hybrid", "disk")} <= alone


def test_what_is_no_combination() -> None:
    with pytest.raises(ConfigError, match=r"rollout.mode is 'remote'; modes: hybrid, colocated, standalone"):
        check_choice(dataclasses.replace(CHOICE, mode="remote"), *parts({}, EVERYWHERE))
    with pytest.raises(PluginNotFoundError, match="teleport"):
        check_choice(dataclasses.replace(CHOICE, weight_sync="teleport"), *parts({}, EVERYWHERE))


@pytest.mark.parametrize(
    ("mode", "same_process", "own_pool", "processes", "size", "words"),
    [
        ("hybrid", True, True, [2], 1, "runs in the actor's processes"),
        ("standalone", False, False, [2], 1, "needs a pool of its own"),
        ("colocated", False, True, [2], 1, "rollout.mode=standalone, not colocated"),
        ("colocated", False, False, [3], 2, "does not divide the 3 processes"),
    ],
)
def test_places(mode: str, same_process: bool, own_pool: bool, processes: list[int], size: int, words: str) -> None:
    choice = Choice("e", "r", mode, "shared_memory", ReplicaShape(size))
    with pytest.raises(ConfigError, match=words):
        check_places(choice, same_process, own_pool, processes)


@pytest.mark.parametrize(
    ("shape", "processes", "multi_node", "error", "words"),
    [
        (ReplicaShape(16), [8, 8], False, CapabilityError, r"\[8, 8\] processes .* span.* one node.* fit: 1, 2, 4, 8$"),
        (ReplicaShape(4), [3, 5], True, ConfigError, r"size is 4, but .* with 3 and 1 of .* fit: 1, 2$"),
        (ReplicaShape(2), [3, 3], True, None, ""),
        (ReplicaShape(4, 2), [8, 4, 4], True, None, ""),
        (ReplicaShape(4, 3), [8, 8, 8], True, ConfigError, r"pipeline_model_parallel_size=3 is 12 .* 8 and 4 of its"),
        (ReplicaShape(4, 3), [6, 6], True, ConfigError, r"pipeline_model_parallel_size is 3, .* spans 2 nodes"),
        (ReplicaShape(4, data=2), [4, 4], True, None, ""),
        (ReplicaShape(4, 3, data=2), [12, 12], True, None, ""),
        (ReplicaShape(8, data=2), [4] * 4, True, ConfigError, r"data_parallel_size is 2, .* 4 nodes, .* multiple of 4"),
        (ReplicaShape(8, 2), [4] * 8, True, None, ""),
        (
            ReplicaShape(3, 2),
            [4],
            True,
            ConfigError,
            r"size=3 x pipeline.*=2 is 6 devices, which does not divide the 4",
        ),
    ],
)
def test_replicas_that_span_nodes(
    shape: ReplicaShape, processes: list[int], multi_node: bool, error: type[Exception] | None, words: str
) -> None:
    if error is None:
        check_spans(shape, processes, multi_node, "r")
        return
    with pytest.raises(error, match=words):
        check_spans(shape, processes, multi_node, "r")


def test_the_nodes_of_each_replica() -> None:
    assert split_nodes(4, [8, 2, 2]) == [(4,), (4,), (2, 2)]
    assert split_nodes(16, [8, 8, 8, 8]) == [(8, 8), (8, 8)]
    assert split_nodes(6, [4, 4, 4]) == [(4, 2), (2, 4)]
    assert not check_spans(ReplicaShape(2), [4, 2], False, "r")
    assert check_spans(ReplicaShape(8), [4, 4], True, "r")


def test_weights_for_a_replica_that_spans_nodes() -> None:
    spanning = Choice("e", "r", "colocated", "cuda_ipc", ReplicaShape(4))
    with pytest.raises(CapabilityError, match=r"spans nodes, .*weight_sync=cuda_ipc.*; choose .*=shared_memory"):
        check_places(spanning, False, False, [2, 2], True, True)
    adapted = dataclasses.replace(spanning, weight_sync="disk", trains_adapter=True)
    with pytest.raises(CapabilityError, match=r"spans nodes, .*model.lora_rank"):
        check_places(adapted, False, False, [2, 2], True, True)


def test_experts_are_spread_over_all_devices_of_a_stage() -> None:
    both = parts({}, {**EVERYWHERE, "tensor_parallel": True, "data_parallel": True, "expert_parallel": True})
    choice = Choice("e", "r", "hybrid", "disk", ReplicaShape(2, data=2, expert=2))
    with pytest.raises(ConfigError, match=r"rollout.expert_parallel_size is 2; valid: 1, .* which is 4"):
        check_choice(choice, *both)
    check_choice(dataclasses.replace(choice, shape=ReplicaShape(2, data=2, expert=4)), *both)


@pytest.mark.parametrize(
    ("rank", "local_rank", "on_node", "fits"), [(2, 2, 3, False), (2, 0, 3, True), (3, 0, 1, True)]
)
def test_a_replica_whose_ranks_were_placed_on_two_nodes_is_refused(
    rank: int, local_rank: int, on_node: int, fits: bool
) -> None:
    place = WorkerContext(rank=rank, world_size=6, local_rank=local_rank, local_world_size=on_node, node="10.0.0.7")
    worker = ClassWithInitArgs(ReplicaWorker, ReplicaSpec({}, "model", 0, 0, 1), 2)
    if fits:
        WorkerHost().build(place, {"rollout": worker})
    else:
        with pytest.raises(WorkerRaised, match=r"replica of ranks 2 to 3 would span nodes: .* 10\.0\.0\.7 has 1 of"):
            WorkerHost().build(place, {"rollout": worker})


def test_memory_of_a_device_is_handed_over_on_one_device_only() -> None:
    words = r"rollout\.weight_sync=cuda_ipc shares memory of a GPU, but this run computes on CPUs"
    with pytest.raises(CapabilityError, match=words):
        check_places(Choice("e", "r", "colocated", "cuda_ipc"), False, False, [1], on_accelerators=False)
    check_places(Choice("e", "r", "colocated", "cuda_ipc"), False, False, [1], on_accelerators=True)
    assert weight_syncs.get("cuda_ipc").capabilities.modes == {RolloutMode.HYBRID, RolloutMode.COLOCATED}


@pytest.mark.parametrize("mode", ["hybrid", "colocated"])
def test_a_collective_between_two_ranks_of_one_device_is_refused(mode: str) -> None:
    choice = Choice("e", "r", mode, "collective")
    words = f"NCCL, which refuses two ranks on one device, and with rollout.mode={mode} .* choose .*=shared_memory"
    with pytest.raises(CapabilityError, match=words):
        check_places(choice, False, False, [2], on_accelerators=True)
    check_places(choice, False, False, [2], on_accelerators=False)
    check_places(dataclasses.replace(choice, weight_sync="shared_memory"), False, False, [2], on_accelerators=True)
    check_places(dataclasses.replace(choice, mode="standalone"), False, True, [2], on_accelerators=True)


def test_places_that_fit() -> None:
    check_places(Choice("e", "r", "standalone", "disk", ReplicaShape(2)), False, True, [4, 2])
    check_places(Choice("e", "r", "colocated", "disk"), False, False, [3, 1])
    check_places(CHOICE, True, False, [1])


@pytest.mark.parametrize(
    ("engine", "rollout", "words"),
    [
        (1, None, r"actor.engine.name=e runs on at most 1 rank \(.*\), but the pool of role actor has 4"),
        (None, 2, r"rollout.name=r runs on at most 2 ranks \(.*\), but the pool of role rollout has 3; .* a pool of 2"),
    ],
)
def test_an_engine_or_a_rollout_of_few_ranks(engine: int | None, rollout: int | None, words: str) -> None:
    limits = EngineCapabilities(max_world_size=engine), RolloutCapabilities(max_world_size=rollout)
    with pytest.raises(CapabilityError, match=words):
        check_world_sizes(CHOICE, *limits, 4, 3)
    check_world_sizes(CHOICE, *limits, 1, 2)
