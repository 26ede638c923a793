"""Every weight sync: what is sent arrives, in bounded parts, and what does not is told."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import gc
import inspect
import json
import os
import threading
import types
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_tools import KeepingTarget, many_tensors
from torch.multiprocessing import reductions

from rollcast.contracts.rendezvous import serve_store
from rollcast.contracts.weights import AdapterWeights, WeightBucket, WeightReport
from rollcast.errors import RolloutError, WeightSyncError
from rollcast_serving.casting import CastRoom, WeightCast, loaded_dtype
from rollcast_serving.contracts.weight_sync import SyncInterruptedError, SyncSettings, weight_syncs
from rollcast_serving.polling import wait_readable
from rollcast_serving.receiving import BucketsForReaders, WeightTally
from rollcast_serving.server import IncomingWeights
from rollcast_serving.syncs import collective, cuda_ipc, sending, shared_memory
from rollcast_serving.testing.weight_syncs import NamedTensors
from rollcast_testing.cuda import needs_devices, on_cuda

SYNCS = ["shared_memory", "cuda_ipc", "collective", "disk", "delta"]


def make(name: str, engine: Any, targets: list[Any], **changes: Any) -> Any:
    return weight_syncs.get(name)(engine, targets, SyncSettings(**{"timeout_s": 20.0, **changes}))


@pytest.fixture(params=SYNCS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda_ipc":
        put_on_the_cpu(monkeypatch)
    return str(request.param)


def put_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have ``cuda_ipc`` share memory of this process; return the list of what it does with the device."""
    done: list[str] = []
    shared: list[torch.Tensor] = []

    def describe(flat: torch.Tensor) -> dict[str, Any]:
        shared.append(flat)
        done.append("describe")
        return {"place": len(shared) - 1}

    monkeypatch.setattr(cuda_ipc, "allocate", lambda size: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(cuda_ipc, "settle", lambda: done.append("settle"))
    monkeypatch.setattr(cuda_ipc, "collect", lambda: done.append("collect"))
    monkeypatch.setattr(cuda_ipc, "describe_tensor", describe)
    monkeypatch.setattr(cuda_ipc, "open_tensor", lambda described: shared[described["place"]])
    return done


@pytest.mark.parametrize("bucket_bytes", [1, 5000, 1 << 30])
def test_what_is_sent_arrives(name: str, bucket_bytes: int) -> None:
    targets = [KeepingTarget(), KeepingTarget()]
    engine = NamedTensors(many_tensors())
    sync = make(name, engine, targets, bucket_bytes=bucket_bytes)
    for version in (1, 2, 3):
        engine.named = many_tensors(version)
        reports = asyncio.run(sync.sync(version))
        assert [report.version for report in reports] == [version, version]
        for report, target in zip(reports, targets, strict=True):
            assert list(target.held) == [each for each, _ in engine.named]
            for each, tensor in engine.named:
                assert target.held[each].dtype == tensor.dtype
                assert torch.equal(target.held[each], tensor)
            assert report.tensors == len(engine.named)
            assert report.bytes == sum(tensor.numel() * tensor.element_size() for _, tensor in engine.named)
            assert target.largest <= max(bucket_bytes, 1000 * 33 * 4)
    sync.close()


class GatheredTensors(NamedTensors):
    """An engine whose tensors exist only while they are sent, as sharded ones do."""

    def __init__(self, count: int) -> None:
        super().__init__([])
        self.count = count
        self.most = 0

    def get_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        for number in range(self.count):
            tensor = torch.full((100,), float(number))
            alive.add(tensor)
            self.most = max(self.most, len(alive))
            yield f"w{number}", tensor


def test_a_bucket_is_gone_when_the_next_is_gathered(name: str) -> None:
    engine, target = GatheredTensors(12), KeepingTarget()
    sync = make(name, engine, [target], bucket_bytes=4 * 400)
    asyncio.run(sync.sync(1))
    assert len(target.held) == 12
    assert engine.most == 5  # a bucket, and the tensor that did not fit into it
    sync.close()


def test_views_and_gradients_are_sent_as_values(name: str) -> None:
    weight = torch.randn(8, 6).T.requires_grad_()
    target = KeepingTarget()
    asyncio.run(make(name, NamedTensors([("w", weight)]), [target]).sync(1))
    assert torch.equal(target.held["w"], weight)


def test_a_rank_without_targets_takes_part(name: str) -> None:
    engine = NamedTensors(many_tensors())
    assert asyncio.run(make(name, engine, []).sync(1)) == []
    assert engine.gathered == len(engine.named)


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 100))
def test_buckets_keep_order_and_size(sizes: list[int], limit: int) -> None:
    named = [(str(index), torch.zeros(size, dtype=torch.uint8)) for index, size in enumerate(sizes)]
    buckets = list(sending.pack_buckets(named, limit))
    assert [(each.name, each.tensor) for bucket in buckets for each in bucket] == named
    for bucket in buckets:
        assert len(bucket) == 1 or sum(len(each.tensor) for each in bucket) <= limit


# -- what goes wrong --------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, how: str) -> None:
    """Change what is on its way: layer 4 is corrupted, left out, or the one of the update before."""
    module, attribute = {
        "shared_memory": ("rollcast_serving.syncs.shared_memory", "read_bucket"),
        "cuda_ipc": ("rollcast_serving.syncs.shared_memory", "read_bucket"),
        "collective": ("rollcast_serving.syncs.collective", "read_bucket"),
        "disk": ("rollcast_serving.syncs.disk", "WeightBucket"),
        "delta": ("rollcast_serving.syncs.delta", "WeightBucket"),
    }[name]
    import importlib

    found = importlib.import_module(module)
    original = getattr(found, attribute)

    def spoiled(*args: Any) -> WeightBucket:
        bucket = original(*args)
        named = []
        for each, tensor in bucket:
            if each != "layer.4.weight":
                named.append((each, tensor))
            elif how == "corrupted":
                changed = tensor.clone()
                changed.view(torch.uint8)[17, 3] ^= 4
                named.append((each, changed))
            elif how == "stale":
                named.append((each, dict(many_tensors(1))[each]))
        return WeightBucket(named, bucket.expected)

    monkeypatch.setattr(found, attribute, spoiled)


@pytest.mark.parametrize("how", ["corrupted", "missing", "stale"])
def test_a_wrong_tensor_is_named(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NamedTensors(many_tensors(1))
    sync = make(name, engine, [KeepingTarget(), KeepingTarget()], bucket_bytes=5000)
    asyncio.run(sync.sync(1))
    engine.named, engine.gathered = many_tensors(2), 0
    with monkeypatch.context() as patch:
        spoil(patch, name, how)
        with pytest.raises(WeightSyncError, match=r"layer\.4\.weight") as caught:
            asyncio.run(sync.sync(2))
    assert caught.value.tensor == "layer.4.weight"
    assert engine.gathered == len(engine.named)  # the other ranks of the engine are not left waiting
    assert asyncio.run(sync.sync(3))[0].version == 3


def test_a_report_of_something_else_is_refused(name: str) -> None:
    class Liar(KeepingTarget):
        lie: Any = None

        def receive_weights(self, *args: Any) -> Any:
            from dataclasses import replace

            return replace(super().receive_weights(*args), **self.lie)

    target = Liar()
    sync = make(name, NamedTensors(many_tensors()), [target])
    for lie, words in (
        ({"version": 8}, "version 8"),
        ({"tensors": 6}, "6 tensors"),
        ({"bytes": 3}, "3 bytes"),
        ({"checksums": {"0": "00000000"}}, "checksum 00000000 for bucket 0"),
        ({"checksums": {}}, "checksum None for bucket 0"),
    ):
        target.lie = lie
        with pytest.raises(WeightSyncError, match=words):
            asyncio.run(sync.sync(1))


class Dying(KeepingTarget):
    """A replica that dies after some buckets.

    Args:
        after: buckets that it takes.
        silently: True if its connections stay open, as those of a process do that hangs.
    """

    def __init__(self, after: int, silently: bool) -> None:
        super().__init__()
        self.after, self.silently = after, silently
        self.open: Any = None

    def receive_weights(self, sync: str, source: Any, version: int) -> Any:
        self.open = iter(weight_syncs.get(sync).open(source))
        for _ in range(self.after):
            next(self.open)
        if not self.silently:
            self.open.close()
        raise RolloutError(f"the engine has died, version {version}")


@pytest.mark.parametrize(("after", "silently"), [(0, False), (1, False), (1, True)])
def test_a_replica_that_dies_costs_no_other_its_weights(name: str, after: int, silently: bool) -> None:
    living = [KeepingTarget(), KeepingTarget()]
    dying = Dying(after, silently)
    engine = NamedTensors(many_tensors())
    # Nothing may wait for this long.
    sync = make(name, engine, [living[0], dying, living[1]], timeout_s=600.0, bucket_bytes=200)
    first, error, second = asyncio.run(sync.sync(5))
    assert type(error) is RolloutError
    assert "the engine has died, version 5" in str(error)
    assert engine.gathered == len(engine.named)  # the other ranks of the engine are not left waiting
    if name == "collective":  # they shared a group with the dead one
        assert all(isinstance(each, SyncInterruptedError) for each in (first, second))
        assert "the engine has died" in str(first)
        dying.open.close()  # as its process is killed; what waits for it in the group ends
        sync.targets = living
        first, second = asyncio.run(sync.sync(5))
    assert first.version == second.version == 5
    for target in living:
        assert all(torch.equal(target.held[each], tensor) for each, tensor in engine.named)
    sync.close()


def test_all_targets_dead(name: str) -> None:
    engine = NamedTensors(many_tensors())
    sync = make(name, engine, [Dying(0, False), Dying(0, False)], timeout_s=600.0)
    assert [type(each) for each in asyncio.run(sync.sync(1))] == [RolloutError, RolloutError]
    assert engine.gathered == len(engine.named)


@pytest.mark.parametrize("name", ["shared_memory"])
def test_a_target_that_hangs_is_told(name: str) -> None:
    released = threading.Event()

    class Hanging(KeepingTarget):
        def receive_weights(self, sync: str, source: Any, version: int) -> Any:
            buckets: Iterator[Any] = iter(weight_syncs.get(sync).open(source))
            next(buckets)
            released.wait()
            raise RolloutError("too late")

    hanging, living = Hanging(), KeepingTarget()
    sync = make(name, NamedTensors(many_tensors()), [hanging, living], timeout_s=1.0, bucket_bytes=1)
    error, report = asyncio.run(sync.sync(5))
    released.set()
    assert "did not take a bucket within 1 s" in str(error)
    assert report.version == 5


def test_a_descriptor_above_1023_can_be_waited_for() -> None:
    reading, writing = os.pipe()
    high = fcntl.fcntl(reading, fcntl.F_DUPFD, 1100)
    try:
        assert not wait_readable(high, 0.0)
        os.write(writing, b"x")
        assert wait_readable(high, 10.0)
    finally:
        for each in (reading, writing, high):
            os.close(each)


def test_shared_memory_keeps_two_buffers_and_leaves_nothing() -> None:
    def descriptors() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    engine = NamedTensors(many_tensors())
    before = descriptors()
    sync = make("shared_memory", engine, [KeepingTarget()], bucket_bytes=200)
    counts = []
    for version in range(4):
        asyncio.run(sync.sync(version))
        counts.append(descriptors())
    assert len(set(counts[1:])) == 1
    assert sum(buffer.size for buffer in sync._buffers) <= 2 * (1000 * 33 * 4 + 64)
    sync.close()
    assert descriptors() == before


def test_a_collective_group_is_kept_while_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []
    original = collective._join

    def join(store: Any, rank: int, *args: Any) -> Any:
        joined.append(rank)
        return original(store, rank, *args)

    monkeypatch.setattr(collective, "_join", join)

    def groups() -> list[int]:
        ranks = sorted(joined)
        joined.clear()
        return ranks

    engine, first, second = NamedTensors(many_tensors()), KeepingTarget(), KeepingTarget()
    sync = make("collective", engine, [first, second], bucket_bytes=3000)
    for version in range(4):
        engine.named = many_tensors(version)
        asyncio.run(sync.sync(version))
        assert all(
            torch.equal(target.held[each], tensor) for target in (first, second) for each, tensor in engine.named
        )
    assert groups() == [0, 1, 2]
    sync.targets = [first]
    asyncio.run(sync.sync(4))
    assert groups() == [0, 1]
    sync.targets = [first, Dying(1, silently=False)]
    deliveries = asyncio.run(sync.sync(5))
    assert not any(isinstance(each, WeightReport) for each in deliveries)
    groups()
    sync.targets = [first]
    for version in (6, 7):
        assert asyncio.run(sync.sync(version))[0].version == version
    assert groups() == [0, 1]
    monkeypatch.setattr(collective, "_members", {})  # as in a replica that was started again under the same address
    with pytest.raises(WeightSyncError, match="has left the group"):
        asyncio.run(sync.sync(8))
    asyncio.run(sync.sync(9))
    sync.close()


def test_a_collective_group_ends_with_a_report_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar(KeepingTarget):
        lies = False

        def receive_weights(self, *args: Any) -> Any:
            report = super().receive_weights(*args)
            return dataclasses.replace(report, bytes=1) if self.lies else report

    liar, numbers = Liar(), []
    sync = make("collective", NamedTensors(many_tensors()), [liar])
    original = collective._receive
    monkeypatch.setattr(collective, "_receive", lambda source: numbers.append(source["number"]) or original(source))
    asyncio.run(sync.sync(1))
    liar.lies = True
    with pytest.raises(WeightSyncError, match="1 bytes"):
        asyncio.run(sync.sync(2))
    liar.lies = False
    for version in (3, 4):
        asyncio.run(sync.sync(version))
    assert numbers == [1, 2, 1, 2]  # syncs of each group
    sync.close()


def test_a_replica_leaves_the_groups_of_senders_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "_members", {})
    engine, target = NamedTensors(many_tensors()), KeepingTarget()
    syncs = [make("collective", engine, [target]) for _ in range(3)]
    for sync in syncs[:2]:
        asyncio.run(sync.sync(1))
    assert len(collective._members) == 2
    syncs[0].close()  # as when its trainer was killed: its store is gone
    asyncio.run(syncs[2].sync(1))
    assert {name for name, *_ in collective._members} == {sync._name for sync in syncs[1:]}
    asyncio.run(syncs[1].sync(2))  # a sender that lives keeps its group
    for sync in syncs[1:]:
        sync.close()


class _Aborting:
    """A group whose member says when it is aborted, as has to be asked for with NCCL."""

    def __init__(self, group: Any, aborted: list[int], rank: int) -> None:
        self.group, self.aborted, self.rank = group, aborted, rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def abort(self) -> None:
        self.aborted.append(self.rank)
        self.group.abort()


def test_both_ends_abort_the_groups_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[int] = []
    original = collective._enter_group

    def enter(store: Any, rank: int, *args: Any) -> Any:
        inner = original(store, rank, *args)._group
        return collective._Group(_Aborting(inner, aborted, rank), aborts=True)

    monkeypatch.setattr(collective, "_members", {})
    monkeypatch.setattr(collective, "_enter_group", enter)
    engine, first, second = NamedTensors(many_tensors()), KeepingTarget(), KeepingTarget()
    sync = make("collective", engine, [first, second], bucket_bytes=3000)
    asyncio.run(sync.sync(1))
    assert aborted == []
    sync.targets = [first]
    asyncio.run(sync.sync(2))
    assert sorted(aborted) == [0, 1, 2]
    sync.targets = [first, Dying(1, silently=True)]
    deliveries = asyncio.run(sync.sync(3))
    assert not any(isinstance(each, WeightReport) for each in deliveries)
    assert aborted.count(0) == 3
    assert aborted.count(1) == 3  # the old group, and the one that broke
    sync.targets = [first, second]
    assert all(isinstance(each, WeightReport) for each in asyncio.run(sync.sync(4)))
    sync.close()
    assert aborted.count(0) == 4


class _Silent:
    """A group in which nothing arrives."""

    is_aborted = False

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return types.SimpleNamespace(is_completed=lambda: False)

    def abort(self) -> None:
        self.is_aborted = True


def test_a_member_whose_device_waits_in_vain_hears_that_the_sender_broke_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "_CHECK_S", 0.01)
    store = serve_store("127.0.0.1", 0, timedelta(seconds=10))
    store.set("1/bucket/0", json.dumps({"size": 8, "tensors": []}))
    silent = _Silent()
    meeting = ("127.0.0.1", store.port)
    group = collective._Group(silent, aborts=True)
    member = collective._Member(store, group, torch.device("cpu"), meeting)
    threading.Timer(0.1, store.set, ("1/bucket/0", json.dumps({"broken": True}))).start()
    with pytest.raises(WeightSyncError, match="broke off"):
        member.receive(8, "1/bucket/0")
    group.leave()
    assert silent.is_aborted


def test_nccl_that_differs_between_the_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"version": "2.28.9", "NCCL_CUMEM_ENABLE": "-2"}
    monkeypatch.setattr(collective, "_nccl", lambda: ours)
    collective._check_nccl(0, dict(ours))
    for other in ({"version": "2.27.3"}, {"NCCL_CUMEM_ENABLE": "0"}):
        with pytest.raises(WeightSyncError, match=f"target 1 has .*{next(iter(other.values()))}"):
            collective._check_nccl(1, {**ours, **other})


def test_disk_leaves_nothing(tmp_path: Path) -> None:
    asyncio.run(make("disk", NamedTensors(many_tensors()), [KeepingTarget()], folder=str(tmp_path / "w")).sync(1))
    assert list((tmp_path / "w").iterdir()) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(["float32", "bfloat16", "int8"])), min_size=1, max_size=9)
)
def test_any_tensors_by_shared_memory(shapes: list[tuple[int, str]]) -> None:
    named = [(str(index), torch.arange(size).to(getattr(torch, dtype))) for index, (size, dtype) in enumerate(shapes)]
    target = KeepingTarget()
    asyncio.run(make("shared_memory", NamedTensors(named), [target], bucket_bytes=4000).sync(1))
    assert all(torch.equal(target.held[each], tensor) for each, tensor in named)
    assert shared_memory.SharedMemorySync.capabilities.same_node


def test_every_process_of_an_engine_gets_all(name: str) -> None:
    class TwoProcesses(KeepingTarget):
        """As an engine with tensor parallelism reads: here two threads."""

        def receive_weights(self, sync: str, source: Any, version: int) -> Any:
            incoming = IncomingWeights(sync, source)
            assert isinstance(incoming, BucketsForReaders)

            def read(index: int) -> tuple[Any, dict[str, torch.Tensor]]:
                tally, held = WeightTally(incoming.for_reader(index, 2)), {}
                for bucket in tally:
                    held |= {each: tensor.clone() for each, tensor in bucket}
                return tally.report(version), held

            with ThreadPoolExecutor(2) as pool:
                (report, self.held), (_, self.other) = pool.map(read, range(2))
            return report

    targets: list[Any] = [TwoProcesses(), KeepingTarget(), TwoProcesses()]
    engine = NamedTensors(many_tensors())
    asyncio.run(make(name, engine, targets, bucket_bytes=3000).sync(4))
    held = [targets[0].held, targets[0].other, targets[1].held, targets[2].held, targets[2].other]
    for each, tensor in engine.named:
        assert all(torch.equal(one[each], tensor) for one in held)


def test_only_the_adapter_travels_once_the_base_is_there(name: str) -> None:
    class Remembering(KeepingTarget):
        def receive_weights(self, sync: str, source: Any, version: int) -> Any:
            self.held = {}
            self.configs = [*getattr(self, "configs", []), source.get("adapter")]
            return super().receive_weights(sync, source, version)

    lora = [("q.lora_A.weight", torch.randn(4, 8)), ("q.lora_B.weight", torch.randn(8, 4))]
    engine, target = NamedTensors(many_tensors()), Remembering()
    engine.adapter = AdapterWeights({"r": 4, "lora_alpha": 8}, dict(lora))
    sync = make(name, engine, [target])
    (report,) = asyncio.run(sync.sync(1))
    assert target.configs == [None, {"r": 4, "lora_alpha": 8}]
    (report,) = asyncio.run(sync.sync(2, only_adapter=True))
    assert target.configs[2:] == [{"r": 4, "lora_alpha": 8}]
    assert (report.tensors, report.bytes) == (2, 2 * 4 * 8 * 4)
    assert all(torch.equal(target.held[each], tensor) for each, tensor in lora)
    engine.adapter = None  # an engine that trains the model itself sends all of it whatever it is asked
    asyncio.run(sync.sync(3, only_adapter=True))
    assert list(target.held) == [each for each, _ in engine.named]


# -- the rollout's dtype ----------------------------------------------------------------------


def test_a_narrower_rollout_is_sent_its_own_dtype(name: str) -> None:
    named = many_tensors()
    engine, target = NamedTensors(named), KeepingTarget()
    sync = make(name, engine, [target, KeepingTarget()], bucket_bytes=5000, cast=WeightCast("bfloat16"))
    for report in asyncio.run(sync.sync(1)):  # attested: the checksums are of what arrived
        assert report.bytes == sum(tensor.numel() * tensor.element_size() for tensor in target.held.values())
    for each, tensor in named:
        wide = tensor.dtype == torch.float32 and tensor.dim() > 1
        expected = tensor.to(torch.bfloat16) if wide else tensor
        assert target.held[each].dtype == expected.dtype
        assert torch.equal(target.held[each], expected)
    assert target.held["layer.4.weight"].dtype == torch.bfloat16
    sync.close()


@pytest.mark.parametrize("spoiled", ["corrupted", "missing"])
def test_a_cast_tensor_that_arrives_wrong_is_named(name: str, spoiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = make(name, NamedTensors(many_tensors()), [KeepingTarget()], cast=WeightCast("bfloat16"))
    spoil(monkeypatch, name, spoiled)
    with pytest.raises(WeightSyncError) as caught:
        asyncio.run(sync.sync(1))
    assert caught.value.tensor == "layer.4.weight"
    sync.close()


Named = list[tuple[str, torch.Tensor]]
FLOATS = ["float64", "float32", "bfloat16", "float16"]
SHAPES = [(7, 5), (6,), (), (0, 3), (3, 4, 2)]


@given(
    st.sampled_from(FLOATS[1:]),
    st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from([*FLOATS, "int64", "uint8", "bool"])), max_size=6),
    st.integers(0, 2**32),
    st.sampled_from([1, 60, 150, 10_000]),
)
def test_a_cast_is_the_conversion_that_the_engine_would_make(
    target: str, tensors: list[tuple[tuple[int, ...], str]], seed: int, limit: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, target)
    named = [
        (
            f"h.{place}.weight",
            (torch.randn(shape, generator=generator, dtype=torch.float64) * 50).to(getattr(torch, kind)),
        )
        for place, (shape, kind) in enumerate(tensors)
    ]
    room = CastRoom()
    seen = 0
    for packed in sending.pack_buckets(named, limit, WeightCast(target)):
        bucket = list(room.cast(packed))
        assert len(bucket) == 1 or sum(tensor.numel() * tensor.element_size() for _, tensor in bucket) <= limit
        check_cast(bucket, named[seen : seen + len(bucket)], dtype)
        seen += len(bucket)
    assert seen == len(named)


def check_cast(bucket: Named, named: Named, dtype: torch.dtype) -> None:
    for (cast_name, cast), (name, tensor) in zip(bucket, named, strict=True):
        assert cast_name == name
        assert torch.equal(cast.to(dtype), tensor.to(dtype))  # whatever the engine then holds the tensor in
        narrowed = tensor.is_floating_point() and tensor.element_size() > dtype.itemsize and tensor.dim() > 1
        assert cast.dtype == (dtype if narrowed else tensor.dtype)
        if not narrowed:
            assert cast.data_ptr() == tensor.data_ptr()


def test_what_the_model_holds_in_float32_is_sent_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    transformers.Ernie4_5_MoeConfig().save_pretrained(folder)
    cast = WeightCast.of_model("bfloat16", str(folder))
    assert {"gate.weight", "moe_statics"} <= cast.kept
    gate, expert, other = (
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.experts.0.up_proj.weight",
        "a.some_gate.weight",
    )
    dtypes = {each: cast.dtype_of(each, torch.ones(2, 2)) for each in (gate, expert, other)}
    assert dtypes == {gate: torch.float32, expert: torch.bfloat16, other: torch.bfloat16}


def test_adapters_are_sent_as_they_are(name: str) -> None:
    lora = {"q.lora_A.weight": torch.randn(4, 8), "q.lora_B.weight": torch.randn(8, 4)}
    engine, target = NamedTensors(many_tensors()), KeepingTarget()
    engine.adapter = AdapterWeights({"r": 4, "lora_alpha": 8}, lora)
    sync = make(name, engine, [target], cast=WeightCast("bfloat16"))
    asyncio.run(sync.sync(1))
    assert target.held["layer.0.weight"].dtype == torch.bfloat16
    for each, tensor in lora.items():
        assert target.held[each].dtype == torch.float32
        assert torch.equal(target.held[each], tensor)
    sync.close()


@pytest.mark.parametrize(
    ("dtype", "on_cpu", "loaded"),
    [("auto", True, "float32"), ("auto", False, None), ("half", True, "float16"), ("bfloat16", False, "bfloat16")],
)
def test_the_dtype_that_a_key_stands_for(dtype: str, on_cpu: bool, loaded: str | None) -> None:
    assert loaded_dtype(dtype, on_cpu) == loaded


# -- memory of a device -----------------------------------------------------------------------


def test_a_device_s_memory_is_described_once_and_settled_before_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    done = put_on_the_cpu(monkeypatch)
    sync = make("cuda_ipc", NamedTensors(many_tensors()), [KeepingTarget()], bucket_bytes=1 << 30)
    asyncio.run(sync.sync(1))
    once = ["settle", "describe", "settle", "collect"]  # written, told, read, and freed
    assert done == once
    asyncio.run(sync.sync(2))
    assert done == [*once, *once]
    sync.close()


def test_the_installed_torch_opens_memory_as_it_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``describe_tensor`` says reaches torch's own function, whole and on the receiver's number of the device."""
    values = {
        **dict.fromkeys(cuda_ipc._PARAMETERS, 0),
        **{name: name.encode() for name in cuda_ipc._HANDLES},
        **{name: 5 + place for place, name in enumerate(cuda_ipc._NUMBERS)},
        "tensor_offset": 3,
        "event_sync_required": True,
    }
    flat = torch.zeros(10, dtype=torch.uint8)
    monkeypatch.setattr(cuda_ipc, "_uuid", lambda index: f"GPU-{8 if index is None else index + 7}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    rebuild = reductions.rebuild_cuda_tensor
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (rebuild, tuple(values.values())))
    described = json.loads(json.dumps(cuda_ipc.describe_tensor(flat)))
    given: dict[str, Any] = {}
    names = inspect.signature(rebuild).parameters
    monkeypatch.setattr(
        reductions, "rebuild_cuda_tensor", lambda *passed: given.update(zip(names, passed, strict=True)) or flat
    )
    assert cuda_ipc.open_tensor(described) is flat
    assert (given["storage_device"], given["tensor_size"], given["tensor_offset"]) == (1, torch.Size([10]), 3)
    assert all(given[name] == values[name] for name in (*cuda_ipc._HANDLES, *cuda_ipc._NUMBERS))
    assert given["event_sync_required"] is True  # torch takes no integer for it
    described["device"] = "GPU-1"
    with pytest.raises(WeightSyncError, match="on device GPU-1, but this process sees GPU-7, GPU-8"):
        cuda_ipc.open_tensor(described)
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (lambda tensor_cls, other: None, (1, 2)))
    with pytest.raises(
        WeightSyncError, match=r"does not support how torch .* \(tensor_cls, other\); choose shared_memory"
    ):
        cuda_ipc.describe_tensor(flat)


def read_elsewhere(source: Any, results: Any) -> None:
    tally = WeightTally(weight_syncs.get("cuda_ipc").open(source))
    for bucket in tally:
        assert all(tensor.is_cuda for _, tensor in bucket)
    results.put(tally.report(1))


@on_cuda
def test_another_process_reads_the_device_s_memory() -> None:
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()

    class Elsewhere(KeepingTarget):
        def receive_weights(self, sync: str, source: Any, version: int) -> Any:
            process = context.Process(target=read_elsewhere, args=(source, results))
            process.start()
            process.join(300)
            assert process.exitcode == 0
            return results.get()

    engine = NamedTensors([(name, tensor.cuda()) for name, tensor in many_tensors()])
    before = torch.cuda.memory_allocated()
    sync = make("cuda_ipc", engine, [Elsewhere()], timeout_s=300.0)
    (report,) = asyncio.run(sync.sync(1))  # the sync holds its checksums against what was sent
    assert report.tensors == len(engine.named)
    assert torch.cuda.memory_allocated() - before <= 2 * (
        sum(t.numel() * t.element_size() for _, t in engine.named) + 64
    )
    sync.close()


def receive_elsewhere(source: Any, results: Any, visible: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible  # read when CUDA starts, which it has not in this process
    tally = WeightTally(weight_syncs.get("collective").open(source))
    for _ in tally:
        pass
    results.put(tally.report(1))


@pytest.mark.parametrize(
    ("device", "visible"), [("cpu", ""), pytest.param("cuda", "1", marks=needs_devices(2))], ids=["gloo", "nccl"]
)
def test_a_collective_reaches_another_process(device: str, visible: str) -> None:
    """Over NCCL the receiver has a device of its own, because NCCL refuses two ranks on one."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()

    class Elsewhere(KeepingTarget):
        def receive_weights(self, sync: str, source: Any, version: int) -> Any:
            process = context.Process(target=receive_elsewhere, args=(source, results, visible))
            process.start()
            report = results.get(timeout=120)
            process.join(60)
            return report

    engine = NamedTensors([(name, tensor.to(device)) for name, tensor in many_tensors()])
    sync = make("collective", engine, [Elsewhere()], timeout_s=120.0)
    (report,) = asyncio.run(sync.sync(1))  # the sync holds its checksums against what was sent
    assert report.tensors == len(engine.named)
    sync.close()
