"""The conformance suite of weight syncs, a class of pytest tests to inherit; it needs rollcast-serving.

Example, in a plugin's tests::

    from rollcast_serving.testing import WeightSyncSuite

    class TestPipe(WeightSyncSuite):
        name = "pipe"
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from rollcast.contracts.rollout import RolloutMode
from rollcast.contracts.weights import AdapterWeights, WeightBucket, WeightReport
from rollcast.errors import CapabilityError, RolloutError, WeightSyncError
from rollcast.protocol import tensor_checksum
from rollcast_serving.contracts.weight_sync import (
    BaseWeightSync,
    Delivery,
    SyncInterruptedError,
    SyncSettings,
    WeightSyncCapabilities,
    weight_syncs,
)
from rollcast_serving.receiving import WeightTally
from rollcast_serving.server import IncomingWeights
from rollcast_testing.checks import require

__all__ = ["NamedTensors", "ReplicaProcess", "WeightSyncSuite"]

#: Seconds to wait for an answer of a replica's process.
_PATIENCE_S = 120.0
_DAMAGED = "layer.4.weight"


class NamedTensors:
    """The part of an engine that a weight sync reads: named tensors, and an adapter.

    Attributes:
        named: name and tensor of each weight, in order.
        gathered: number of tensors that were read, which on several ranks is the number of collectives.
        adapter: adapter that the engine trains, or None.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.named = list(named)
        self.gathered = 0
        self.adapter: AdapterWeights | None = None

    def get_adapter(self) -> AdapterWeights | None:
        """Return the adapter."""
        return self.adapter

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of each weight."""
        for entry in self.named:
            self.gathered += 1
            yield entry


@dataclass(frozen=True)
class _Held:
    """A tensor in a replica's process, by what it is compared with."""

    checksum: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Held:
        return cls(tensor_checksum(tensor), str(tensor.dtype), tuple(tensor.shape))


@dataclass(frozen=True)
class _Order:
    """A request to a replica's process.

    Attributes:
        name: registry name of the sync.
        sync: its class.
        source: the sender's description.
        version: version of the weights.
        fault: "" for none; "damage" to flip a bit of a tensor as it arrives; "die" to end the process after the first
            bucket.
    """

    name: str
    sync: type[BaseWeightSync]
    source: Mapping[str, Any]
    version: int
    fault: str


class ReplicaProcess:
    """A replica in a process of its own, which keeps checksums of the weights that it receives.

    Attributes:
        fault: fault of the next update; see :class:`_Order`.
        held: tensors that it received last, by name.
        largest: largest bucket in bytes, of all updates.
    """

    node = "127.0.0.1"

    def __init__(self, sync: type[BaseWeightSync]) -> None:
        self._sync = sync
        self.fault = ""
        self.held: dict[str, _Held] = {}
        self.largest = 0
        self._updating = threading.Lock()  # as in a replica's server, an update waits for the one before
        forking = mp.get_context("forkserver")
        forking.set_forkserver_preload(["rollcast_serving.testing.weight_syncs"])
        self._connection, theirs = forking.Pipe()
        self._process: Any = forking.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        """True if the process runs."""
        return bool(self._process.is_alive())

    def receive_weights(self, sync: str, source: Mapping[str, Any], version: int) -> WeightReport:
        """Load the buckets in the process; see :class:`rollcast_serving.contracts.weight_sync.RemoteRollout`."""
        with self._updating:
            try:
                self._connection.send(_Order(sync, self._sync, dict(source), version, self.fault))
                if not self._connection.poll(_PATIENCE_S):
                    raise RolloutError(f"the replica's process did not answer within {_PATIENCE_S:g} s")
                answer = self._connection.recv()
            except (EOFError, OSError) as error:
                raise RolloutError("the replica's process died") from error
        if isinstance(answer, Exception):
            raise answer
        report: WeightReport
        report, self.held, largest = answer
        self.largest = max(self.largest, largest)
        return report

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Any) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            order: _Order = connection.recv()
        except EOFError:
            return
        if order.name not in weight_syncs:
            weight_syncs.register(order.name, order.sync)
        try:
            connection.send(_receive(order))
        except Exception as error:  # noqa: BLE001  # the caller raises it
            connection.send(error if isinstance(error, RolloutError) else WeightSyncError(f"{error!r}"))


def _receive(order: _Order) -> tuple[WeightReport, dict[str, _Held], int]:
    tally = WeightTally(_spoil(IncomingWeights(order.name, order.source), order.fault))
    held: dict[str, _Held] = {}
    largest = 0
    for bucket in tally:
        if order.fault == "die":
            os._exit(1)
        largest = max(largest, sum(tensor.numel() * tensor.element_size() for _, tensor in bucket))
        held |= {name: _Held.of(tensor) for name, tensor in bucket}
    return tally.report(order.version), held, largest


def _spoil(buckets: Iterable[WeightBucket], fault: str) -> Iterator[WeightBucket]:
    for bucket in buckets:
        if fault != "damage":
            yield bucket
            continue
        named = [(name, tensor.clone()) for name, tensor in bucket]
        for name, tensor in named:
            if name == _DAMAGED:
                tensor.view(torch.uint8).view(-1)[17] ^= 4
        yield WeightBucket(named, bucket.expected)


#: Processes that wait for the next test, by the sync of their tests; they end with this process.
_started: dict[type[BaseWeightSync], list[ReplicaProcess]] = {}


class _Liar(ReplicaProcess):
    """A replica whose report is not what it received."""

    lie: ClassVar[Mapping[str, Any]] = {}

    def receive_weights(self, sync: str, source: Mapping[str, Any], version: int) -> WeightReport:
        return replace(super().receive_weights(sync, source, version), **self.lie)


class WeightSyncSuite:
    """Conformance tests of one weight sync, from this process to replicas in two other processes.

    A sync whose ends share a process needs an engine and a rollout: override :meth:`in_process_pair`.
    """

    #: Name of the sync in ``rollcast.weight_syncs``.
    name: ClassVar[str] = ""
    #: Device of the weights; ``cuda`` for a sync that needs one.
    device: ClassVar[str] = "cpu"
    #: True if the living replicas of a sync in which another one died have to be sent to again, because all share a
    #: connection.
    shares_connection: ClassVar[bool] = False

    @pytest.fixture
    def sync_class(self) -> type[BaseWeightSync]:
        """Return the class under test; by default the plugin :attr:`name`."""
        if not self.name:
            raise NotImplementedError(f"{type(self).__name__} must set `name` or override the fixture `sync_class`")
        if self.device != "cpu" and not torch.cuda.is_available():
            pytest.skip(f"the sync needs a device {self.device}")
        return weight_syncs.get(self.name, requested_by=f"{type(self).__name__}.name")

    def in_process_pair(self) -> tuple[Any, Any]:
        """Return an engine and a rollout that can generate with its module; override it for ``same_process``."""
        raise NotImplementedError(f"{type(self).__name__} must override in_process_pair(): the sync is in one process")

    def tensors(self, seed: int = 0) -> list[tuple[str, Tensor]]:
        """Return weights of many dtypes and shapes, an empty one and a scalar among them."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [(64, 32), (7,), (), (0, 3), (500, 33), (5, 5, 5), (3,)]
        dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float32, torch.int64, torch.uint8]
        return [
            (f"layer.{number}.weight", (torch.rand(shape, generator=generator) * 100).to(dtype).to(self.device))
            for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]

    @pytest.fixture
    def started(self, sync_class: type[BaseWeightSync]) -> list[ReplicaProcess]:
        """Return the processes for this sync, which the tests of a process share, because starting them is slow."""
        if sync_class.capabilities.same_process:
            pytest.skip("both ends share a process")
        return _started.setdefault(sync_class, [])

    @pytest.fixture
    def replicas(self, sync_class: type[BaseWeightSync], started: list[ReplicaProcess]) -> list[ReplicaProcess]:
        """Return two replicas that work."""
        for dead in [receiver for receiver in started if not receiver.is_alive]:
            started.remove(dead)
            dead.close()
        while len(started) < 2:
            started.append(ReplicaProcess(sync_class))
        for process in started:
            process.fault, process.held, process.largest = "", {}, 0
        return list(started)

    def build(
        self, sync_class: type[BaseWeightSync], engine: Any, targets: Sequence[Any], **settings: Any
    ) -> BaseWeightSync:
        """Build the sync of one rank."""
        return sync_class(engine, targets, SyncSettings(**{"timeout_s": 60.0, **settings}))

    def send(self, sync: BaseWeightSync, version: int, only_adapter: bool = False) -> Sequence[Delivery]:
        """Send the weights; the call may not take longer than two minutes."""
        return asyncio.run(asyncio.wait_for(sync.sync(version, only_adapter), _PATIENCE_S))

    # -- both ends in one process --------------------------------------------------------------------------------

    def test_it_declares_where_it_works(self, sync_class: type[BaseWeightSync]) -> None:
        can = sync_class.capabilities
        require(isinstance(can, WeightSyncCapabilities), f"capabilities are WeightSyncCapabilities, not {can!r}")
        require(bool(can.modes), "capabilities name at least one mode of the rollout")
        require(can.modes <= set(RolloutMode), f"modes are of RolloutMode: {can.modes}")
        require(not (can.own_devices and can.shared_devices), "devices are either shared or not")

    def test_a_rollout_in_this_process_gets_the_version(self, sync_class: type[BaseWeightSync]) -> None:
        if not sync_class.capabilities.same_process:
            pytest.skip("the ends may be in two processes")
        engine, rollout = self.in_process_pair()
        sync = sync_class(engine, [rollout])
        for version in (3, 4):
            (report,) = self.send(sync, version)
            require(isinstance(report, WeightReport), f"the delivery is a WeightReport, not {report!r}")
            require(getattr(report, "version", None) == version, f"the report has the version {version}: {report}")
        sync.close()

    def test_a_rollout_elsewhere_is_refused(self, sync_class: type[BaseWeightSync]) -> None:
        if not sync_class.capabilities.same_process:
            pytest.skip("the ends may be in two processes")
        engine, _ = self.in_process_pair()
        with pytest.raises(CapabilityError):
            self.send(sync_class(engine, [object()]), 1)  # type: ignore[list-item]
        with pytest.raises(CapabilityError):
            list(sync_class.open({}))

    # -- replicas in other processes -----------------------------------------------------------------------------

    def test_what_is_sent_arrives(self, sync_class: type[BaseWeightSync], replicas: list[ReplicaProcess]) -> None:
        for bucket_bytes in (1, 5000, 1 << 30):
            engine = NamedTensors([])
            sync = self.build(sync_class, engine, replicas, bucket_bytes=bucket_bytes)
            for version in (1, 2):
                engine.named = self.tensors(version)
                reports = self.send(sync, version)
                _require_delivered(engine, replicas, reports, version)
            sync.close()
            bound = max(bucket_bytes, *(tensor.numel() * tensor.element_size() for _, tensor in engine.named))
            largest = max(replica.largest for replica in replicas)
            require(largest <= bound, f"buckets of {bucket_bytes} bytes have at most {bound}, not {largest}")

    def test_a_small_change_arrives(self, sync_class: type[BaseWeightSync], replicas: list[ReplicaProcess]) -> None:
        """Check updates in which one element, no element, a name or a shape changes."""
        engine = NamedTensors(self.tensors())
        sync = self.build(sync_class, engine, replicas)
        changes: list[list[tuple[str, Tensor]]] = [engine.named]
        nudged = [(name, tensor.clone()) for name, tensor in engine.named]
        nudged[4][1][3, 2] += 1
        changes += [nudged, nudged, [*nudged[:-1], ("another.weight", nudged[-1][1])], nudged[::-1]]
        for version, named in enumerate(changes):
            engine.named = named
            _require_delivered(engine, replicas, self.send(sync, version), version)
        sync.close()

    def test_views_and_gradients_are_sent_as_values(
        self, sync_class: type[BaseWeightSync], replicas: list[ReplicaProcess]
    ) -> None:
        weight = torch.randn(8, 6, device=self.device).T.requires_grad_()
        engine = NamedTensors([("transposed", weight), ("slice", torch.arange(20.0, device=self.device)[3::4])])
        sync = self.build(sync_class, engine, replicas)
        _require_delivered(engine, replicas, self.send(sync, 1), 1)
        sync.close()

    def test_a_rank_without_targets_takes_part(self, sync_class: type[BaseWeightSync], started: object) -> None:
        engine = NamedTensors(self.tensors())
        sync = self.build(sync_class, engine, [])
        reports = list(self.send(sync, 1))
        require(reports == [], f"without targets nothing is delivered, not {reports}")
        law = f"a rank without targets gathers every weight, {len(engine.named)}, not {engine.gathered}"
        require(engine.gathered == len(engine.named), law)

    def test_only_the_adapter_travels(self, sync_class: type[BaseWeightSync], replicas: list[ReplicaProcess]) -> None:
        lora = {"q.lora_A.weight": torch.randn(4, 8), "q.lora_B.weight": torch.randn(8, 4)}
        lora = {name: tensor.to(self.device) for name, tensor in lora.items()}
        engine = NamedTensors(self.tensors())
        engine.adapter = AdapterWeights({"r": 4, "lora_alpha": 8}, lora)
        sync = self.build(sync_class, engine, replicas)
        self.send(sync, 1)
        reports = self.send(sync, 2, only_adapter=True)
        expected = {name: _Held.of(tensor) for name, tensor in lora.items()}
        for report, replica in zip(reports, replicas, strict=True):
            require(isinstance(report, WeightReport), f"the delivery is a WeightReport, not {report!r}")
            require(replica.held == expected, f"only the adapter travels: {sorted(replica.held)}")
        sync.close()

    def test_a_damaged_tensor_is_named(self, sync_class: type[BaseWeightSync], replicas: list[ReplicaProcess]) -> None:
        """Check that buckets have checksums, so that a replica notices damage, and that the next update works."""
        engine = NamedTensors(self.tensors(1))
        sync = self.build(sync_class, engine, replicas, bucket_bytes=5000)
        self.send(sync, 1)
        engine.named, engine.gathered = self.tensors(2), 0
        replicas[0].fault = "damage"
        with pytest.raises(WeightSyncError, match=_DAMAGED.replace(".", r"\.")):
            self.send(sync, 2)
        require(engine.gathered == len(engine.named), "every weight is gathered, or other ranks would wait")
        replicas[0].fault = ""
        _require_delivered(engine, replicas, self.send(sync, 3), 3)
        sync.close()

    def test_a_wrong_report_is_refused(self, sync_class: type[BaseWeightSync], started: list[ReplicaProcess]) -> None:
        liar = _Liar(sync_class)
        started.append(liar)
        try:
            sync = self.build(sync_class, NamedTensors(self.tensors()), [liar])
            for lie in ({"version": 8}, {"tensors": 6}, {"bytes": 3}, {"checksums": {"0": "00000000"}}):
                liar.lie = lie  # type: ignore[misc]
                with pytest.raises(WeightSyncError):
                    self.send(sync, 1)
            sync.close()
        finally:
            started.remove(liar)
            liar.close()

    def test_a_dead_replica_costs_no_other_its_weights(
        self, sync_class: type[BaseWeightSync], replicas: list[ReplicaProcess]
    ) -> None:
        engine = NamedTensors(self.tensors())
        sync = self.build(sync_class, engine, replicas, bucket_bytes=200)
        replicas[0].fault = "die"
        dead, living = self.send(sync, 5)
        require(isinstance(dead, RolloutError), f"the delivery of a dead replica is its error, not {dead!r}")
        require(engine.gathered == len(engine.named), "every weight is gathered, or other ranks would wait")
        if self.shares_connection:
            require(isinstance(living, SyncInterruptedError), f"with shares_connection: {living!r}")
            sync.targets = [replicas[1]]
            (living,) = self.send(sync, 5)
        _require_delivered(engine, [replicas[1]], [living], 5)
        sync.close()

    def test_nothing_is_left_behind(
        self, sync_class: type[BaseWeightSync], replicas: list[ReplicaProcess], tmp_path: Path
    ) -> None:
        """Check files in the shared folder, descriptors and threads of this process after ``close``."""
        counts: list[tuple[int, int]] = []
        for _ in range(3):
            sync = self.build(sync_class, NamedTensors(self.tensors()), replicas, folder=str(tmp_path))
            for version in (1, 2):
                self.send(sync, version)
            sync.close()
            del sync
            # A thread that was told to end takes a moment.
            deadline = time.monotonic() + 5.0
            while counts and threading.active_count() > counts[-1][1] and time.monotonic() < deadline:
                time.sleep(0.02)
            counts.append((_descriptors(), threading.active_count()))
        left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
        require(not left, f"no file is left in the shared folder: {left}")
        law = f"after close, descriptors and threads do not grow from sync to sync: {counts}"
        require(counts[2][0] <= counts[1][0] and counts[2][1] <= counts[1][1], law)


def _require_delivered(
    engine: NamedTensors, replicas: Sequence[ReplicaProcess], reports: Sequence[Delivery], version: int
) -> None:
    __tracebackhide__ = True
    require(len(reports) == len(replicas), f"there is one delivery per target, {len(replicas)}, not {len(reports)}")
    expected = {name: _Held.of(tensor.detach()) for name, tensor in engine.named}
    count = sum(tensor.numel() * tensor.element_size() for _, tensor in engine.named)
    for report, replica in zip(reports, replicas, strict=True):
        if not isinstance(report, WeightReport):
            raise AssertionError(f"failed check: the delivery of a living replica is a WeightReport, not {report!r}")
        require(report.version == version, f"the report has the version {version}, not {report.version}")
        require(report.tensors == len(expected), f"the report counts {len(expected)} tensors, not {report.tensors}")
        require(report.bytes == count, f"the report counts {count} bytes, not {report.bytes}")
        require(list(replica.held) == list(expected), f"names arrive in order: {list(replica.held)}")
        wrong = [name for name, held in expected.items() if replica.held[name] != held]
        require(not wrong, f"tensors arrive bit for bit in dtype and shape; these do not: {wrong}")


def _descriptors() -> int:
    import gc

    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))
