"""The sync ``delta``: what changed, to whom, and what it costs."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_tools import KeepingTarget

from rollcast.contracts.weights import AdapterWeights
from rollcast.errors import RolloutError, WeightSyncError
from rollcast_serving.casting import WeightCast
from rollcast_serving.contracts.weight_sync import SyncSettings, weight_syncs
from rollcast_serving.syncs import delta
from rollcast_serving.testing.weight_syncs import NamedTensors

Named = list[tuple[str, torch.Tensor]]


def make(engine: Any, targets: list[Any], **changes: Any) -> Any:
    return weight_syncs.get("delta")(engine, targets, SyncSettings(**{"timeout_s": 20.0, **changes}))


def send(sync: Any, version: int, **kwargs: Any) -> list[Any]:
    return asyncio.run(sync.sync(version, **kwargs))


def check(target: KeepingTarget, named: Named) -> None:
    assert list(target.held) == [name for name, _ in named]
    for name, tensor in named:
        assert target.held[name].dtype == tensor.dtype
        assert torch.equal(target.held[name].view(torch.uint8), tensor.view(torch.uint8))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 399), max_size=40), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_changes_arrive_bit_for_bit(steps: list[list[int]], dtype: torch.dtype) -> None:
    named: Named = [("a", torch.randn(20, 20).to(dtype)), ("b", torch.zeros(400).to(dtype))]
    engine, target = NamedTensors(named), KeepingTarget()
    sync = make(engine, [target])
    send(sync, 0)
    for version, places in enumerate(steps, 1):
        for _, tensor in named:
            # Also 0 to -0, and NaN: bits count, not numbers.
            tensor.view(-1)[places] = torch.tensor([-0.0, float("nan"), 3.0, 1e-8])[version % 4].to(dtype)
        (report,) = send(sync, version)
        assert (report.version, report.tensors) == (version, 2)
        check(target, named)
        assert sync.written_bytes <= min(2, len(places)) * 800 * dtype.itemsize
        assert sync.written_bytes <= 2 * len(set(places)) * (dtype.itemsize + 4)


def test_only_what_changed_is_written() -> None:
    weight = torch.randn(1000, 1000)
    engine, target = NamedTensors([("w", weight)]), KeepingTarget()
    sync = make(engine, [target])
    send(sync, 1)
    assert sync.written_bytes == 4_000_000
    weight[3, :5] += 1
    send(sync, 2)
    assert sync.written_bytes == 5 * 8
    send(sync, 3)
    assert sync.written_bytes == 0
    weight += 1  # positions and values would take more than the tensor itself
    send(sync, 4)
    assert sync.written_bytes == 4_000_000
    check(target, engine.named)


def test_most_bfloat16_weights_stay_in_a_small_step() -> None:
    weight = torch.randn(500, 500, generator=torch.Generator().manual_seed(0)) * 0.02
    engine, target = NamedTensors([("w", weight)]), KeepingTarget()
    sync = make(engine, [target], cast=WeightCast("bfloat16"))
    send(sync, 1)
    weight += 1e-6 * torch.randn(500, 500, generator=torch.Generator().manual_seed(1)).sign()  # a step of Adam
    send(sync, 2)
    assert 0 < sync.written_bytes < 0.2 * weight.numel() * 2
    check(target, [("w", weight.bfloat16())])


def test_a_replica_that_is_new_gets_everything_and_the_others_changes() -> None:
    weight = torch.randn(100, 100)
    engine, old, new = NamedTensors([("w", weight)]), KeepingTarget(), KeepingTarget()
    sync = make(engine, [old])
    send(sync, 1)
    sync.targets = [new, old]
    weight[0, 0] = 7
    send(sync, 2)
    assert sync.written_bytes == 40_000 + 8
    for target in (old, new):
        check(target, engine.named)
    sync.targets = [new]  # the other is gone, and comes back without what it held
    weight[0, 1] = 8
    send(sync, 3)
    assert sync.written_bytes == 8
    sync.targets = [old, new]
    send(sync, 4)
    assert sync.written_bytes == 40_000
    for target in (old, new):
        check(target, engine.named)


class Failing(KeepingTarget):
    error: Exception | None = None

    def receive_weights(self, sync: str, source: Any, version: int) -> Any:
        buckets = iter(weight_syncs.get(sync).open(source))
        if self.error is not None:
            next(buckets)
            raise self.error
        return super().receive_weights(sync, source, version)


@pytest.mark.parametrize("error", [RolloutError("dead"), WeightSyncError("no room")], ids=["dead", "refused"])
def test_after_a_failure_nothing_is_patched(error: Exception) -> None:
    named: Named = [("a", torch.randn(50)), ("b", torch.randn(50))]
    engine, failing, well = NamedTensors(named), Failing(), KeepingTarget()
    sync = make(engine, [failing, well], bucket_bytes=200)
    send(sync, 1)
    failing.error = error
    named[0][1][0] = 5
    if isinstance(error, WeightSyncError):
        with pytest.raises(WeightSyncError, match="no room"):
            send(sync, 2)
    else:
        assert send(sync, 2)[0] is error
    failing.error = None
    named[1][1][1] = 6
    send(sync, 3)
    for target in (failing, well):
        check(target, named)
    assert sync.written_bytes >= 400  # all, for the one that failed


def test_a_patch_for_weights_that_are_not_held_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(100)
    sync = make(NamedTensors([("w", weight)]), [KeepingTarget()])
    send(sync, 1)
    monkeypatch.setattr(delta, "_held", {})  # as in a replica that was started again under the same address
    weight[0] = 1
    with pytest.raises(WeightSyncError, match="'w' arrived as a patch, but this replica has no earlier value"):
        send(sync, 2)
    send(sync, 3)  # all of it


def test_weights_that_differ_from_the_senders_are_refused() -> None:
    weight = torch.randn(100)
    sync = make(NamedTensors([("w", weight)]), [KeepingTarget()])
    send(sync, 1)
    (held,) = [each for each in delta._held.values() if "w" in each and torch.equal(each["w"], weight)]
    held["w"][5] += 1
    weight[0] = 1
    with pytest.raises(WeightSyncError, match="'w' is corrupt"):
        send(sync, 2)


def test_an_adapter_leaves_the_base_known() -> None:
    weight = torch.randn(100)
    engine, target = NamedTensors([("w", weight)]), KeepingTarget()
    sync = make(engine, [target])
    send(sync, 1)
    engine.adapter = AdapterWeights({"r": 1}, {"w.lora_A": torch.ones(4)})
    engine.get_adapter = lambda: engine.adapter  # type: ignore[method-assign]
    send(sync, 2, only_adapter=True)
    assert list(target.held) == ["w", "w.lora_A"]
    assert sync.written_bytes == 16
    engine.get_adapter = lambda: None  # type: ignore[method-assign]
    weight[1] = 2
    send(sync, 3)
    assert sync.written_bytes == 8
    assert torch.equal(target.held["w"], weight)


def test_a_folder_may_be_a_url(tmp_path: Path) -> None:
    weight = torch.randn(10)
    for sync_name in ("disk", "delta"):
        for url in ("memory://weights", f"file://{tmp_path}/weights"):
            target = KeepingTarget()
            settings = SyncSettings(timeout_s=20.0, folder=url)
            sync = weight_syncs.get(sync_name)(NamedTensors([("w", weight)]), [target], settings)
            for version in (1, 2):
                weight[0] = version
                asyncio.run(sync.sync(version))
                check(target, [("w", weight)])
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nofs://x", "fsspec has no file system 'nofs'; it has .*s3, "),
        ("gone://x", r"Install gonefs to access Gone \(in the environments of the trainer and of the replicas\)$"),
        ("simplecache::gone://x", "Install gonefs to access Gone"),
        ("native://x", "no libnative; libnative and Java are needed for native"),
    ],
)
def test_a_file_system_that_is_missing_names_its_package(url: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As fsspec's own registry has them, with packages that nobody has."""

    class Native(MemoryFileSystem):
        def __init__(self, **_: Any) -> None:
            raise OSError("no libnative")

    gone = {"class": "gonefs.Files", "err": "Install gonefs to access Gone"}
    monkeypatch.setitem(known_implementations, "gone", gone)
    monkeypatch.setitem(
        known_implementations, "native", {"class": "", "err": "libnative and Java are needed for native"}
    )
    monkeypatch.setitem(import_module("fsspec.registry")._registry, "native", Native)
    with pytest.raises(WeightSyncError, match=rf"^rollout\.sync_folder={url}/weights-.* cannot be opened: {words}"):
        send(make(NamedTensors([("w", torch.randn(10))]), [KeepingTarget()], folder=url), 1)


def test_a_replica_keeps_one_copy_whatever_happens_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "_held", {})
    engine, survivor, failing = NamedTensors([("w", torch.randn(50))]), KeepingTarget(), Failing()
    sync = make(engine, [survivor, failing])
    send(sync, 0)
    for version in (1, 2, 3):
        sync.targets = [failing]  # as after its revival
        send(sync, version)
        sync.targets = [survivor, failing]
        send(sync, version)
        failing.error = WeightSyncError("no room")
        with pytest.raises(WeightSyncError, match="no room"):
            send(sync, version)
        failing.error = None
        send(sync, version)
        assert len(delta._held) == 2
    check(survivor, engine.named)
