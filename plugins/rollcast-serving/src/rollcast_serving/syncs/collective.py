"""Weight sync ``collective``: broadcasts in a process group that trainer and replicas join for it.

Gloo between CPUs, NCCL if the weights are on CUDA devices; between any nodes that can reach each other. A bucket's
entries travel through the group's store, its bytes in one broadcast. The group is kept between syncs while the targets
stay the same and all of them received their weights.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed has them, but its stubs do not

from rollcast.contracts.rendezvous import serve_store
from rollcast.contracts.rollout import RolloutMode
from rollcast.contracts.weights import WeightBucket, WeightReport
from rollcast.errors import WeightSyncError
from rollcast_serving.bucket_memory import fill, lay_out, read_bucket
from rollcast_serving.casting import CastRoom, Outgoing
from rollcast_serving.contracts.weight_sync import Delivery, SyncSettings, WeightSyncCapabilities
from rollcast_serving.syncs.sending import BucketSync, Receivers, Transport

__all__ = ["CollectiveSync"]

_POLL_S = 0.01
_WORK_POLL_S = 0.0005
#: Seconds between two looks of a member at whether its sender is still there.
_CHECK_S = 1.0
#: Seconds for a sender to accept a connection; a node that does not answer counts as gone.
_PROBE_S = 1.0
#: Timeout for all members to connect once each has announced itself.
_JOIN = timedelta(seconds=60)


class CollectiveSync(BucketSync):
    """The weight sync ``collective``; see the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._name = secrets.token_hex(8)
        self._sender: _Sender | None = None
        self._members: tuple[Any, ...] = ()

    name: ClassVar[str] = "collective"
    capabilities: ClassVar[WeightSyncCapabilities] = WeightSyncCapabilities(
        modes=frozenset(RolloutMode), own_devices=True
    )

    async def sync(self, version: int, only_adapter: bool = False) -> list[Delivery]:
        """Send the weights; see :meth:`BucketSync.sync`."""
        complete = False
        try:
            deliveries = await super().sync(version, only_adapter)
            complete = all(isinstance(result, WeightReport) for result in deliveries)
        finally:
            # Also after a refused report: a target that received something else must not stay in the group.
            if not complete:
                self.close()
        return deliveries

    @contextmanager
    def transport(self) -> Iterator[Transport]:
        members = tuple(getattr(target, "address", target) for target in self.targets)
        # Removed first: after a failure the members have left the group, and the next sync needs a new one.
        sender, self._sender = self._sender, None
        if sender is not None and members != self._members:
            sender.leave()
            sender = None
        if sender is None:
            nodes = {target.node for target in self.targets}  # type: ignore[union-attr]
            sender = _Sender(self._name, len(members), nodes, self.settings)
        sender.begin()
        try:
            yield sender
        except BaseException:
            sender.break_off()
            raise
        self._sender, self._members = sender, members

    @classmethod
    def open(cls, source: Mapping[str, Any]) -> Iterator[WeightBucket]:
        """Return the buckets in a target's process; see :meth:`BaseWeightSync.open`.

        Raises:
            WeightSyncError: during iteration, if the group broke.
        """
        return _receive(source)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.leave()
        self._sender = None


class _Group:
    """One end of a process group that is independent of the process's other groups."""

    def __init__(self, group: Any, aborts: bool) -> None:
        self._group = group
        self._aborts = aborts
        self._work: Any = None

    def broadcast(self, flat: Tensor, check: Callable[[], None]) -> None:
        """Send or receive a buffer; return when that is done on the device too.

        Args:
            flat: the buffer, uint8 ``[N]``.
            check: called again and again meanwhile; raises if another member is gone. The host would otherwise wait
                for the whole timeout, or on NCCL not at all, and let the device wait.
        """
        self._work = self._group.broadcast([flat], _root())
        while not self._work.is_completed():
            check()
            time.sleep(_WORK_POLL_S)
        self._work.wait()
        self._work = None

    def leave(self) -> None:
        """Leave the group, also in the middle of a broadcast; the other members notice it."""
        group, work = self._group, self._work
        self._group = self._work = None
        if group is None:
            return
        if self._aborts:
            # NCCL's communicators keep memory of the device, and a kernel that waits for a member that is gone keeps
            # the device busy, until they are aborted.
            group.abort()
        elif work is not None:
            threading.Thread(target=_outlive, args=(group, work), name="leave-weights-group", daemon=True).start()


def _join(store: Store, rank: int, size: int, host: str, timeout: timedelta, backend: str) -> Any:
    if backend == "nccl":
        nccl: Any = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    # The stubs lack the constructors' options.
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _own_address(nodes: set[str]) -> str:
    """Return the address under which the targets' nodes reach this node."""
    if nodes <= {"127.0.0.1", "localhost"}:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((min(nodes), 9))  # sends nothing
        return str(probe.getsockname()[0])


class _Room:
    """A flat buffer that is reused for each bucket; on a CPU also by the next sync."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int, device: torch.device) -> Tensor:
        """Return the first ``size`` bytes; bytes between tensors are undefined."""
        if len(self._flat) < size:
            self._flat = torch.empty(size, dtype=torch.uint8, device=device)
        return self._flat[:size]

    def leave_device(self) -> None:
        """Free memory of a device, which belongs to the rollout or the training between syncs."""
        if self._flat.device.type != "cpu":
            self._flat = self._flat.new_empty(0)


class _Sender(Transport):
    def __init__(self, name: str, targets: int, nodes: set[str], settings: SyncSettings) -> None:
        self._timeout = timedelta(seconds=settings.timeout_s)
        self._host = _own_address(nodes)
        self._store = serve_store(self._host, 0, self._timeout)
        self._group: _Group | None = None
        self._sent = self._number = 0
        self._room = _Room()
        #: Buffer and entries of the staged bucket.
        self._flat = self._room.take(0, torch.device("cpu"))
        self._entries: list[dict[str, Any]] = []
        self._targets = targets
        self._meeting = {
            "host": self._host,
            "port": self._store.port,
            "timeout_s": settings.timeout_s,
            "sender": name,
        }

    def begin(self) -> None:
        """Start a sync, with its own keys in the store."""
        for number in range(self._sent + 1):
            self._store.delete_key(f"{self._number}/bucket/{number}")
        self._number += 1
        self._sent = 0
        self.source = {**self._meeting, "number": self._number}

    def _open(self, receivers: Receivers, backend: str) -> _Group:
        if self._group is not None:
            return self._group
        offsets, size = [], 1
        for target in range(self._targets):
            while not self._store.check([f"readers/{target}"]):
                receivers.check_all()
                time.sleep(_POLL_S)
            reader = json.loads(self._store.get(f"readers/{target}"))
            if backend == "nccl":
                _check_nccl(target, reader["nccl"])
            offsets.append(size)
            size += reader["readers"]
        self._store.set("group", json.dumps({"offsets": offsets, "size": size, "backend": backend}))
        self._group = _enter_group(self._store, 0, size, self._host, self._timeout, backend)
        return self._group

    def stage(self, bucket: Sequence[Outgoing], room: CastRoom, receivers: Receivers) -> WeightBucket:
        device = bucket[0].tensor.device
        self._open(receivers, _backend(device))
        self._entries, size = lay_out(bucket)
        self._flat = self._room.take(size, device)
        return fill(self._flat, self._entries, bucket, room)

    def send(self, bucket: WeightBucket, receivers: Receivers) -> None:
        flat, entries = self._flat, self._entries
        self._store.set(f"{self._number}/bucket/{self._sent}", json.dumps({"size": len(flat), "tensors": entries}))
        self._open(receivers, _backend(flat.device)).broadcast(flat, receivers.check_all)
        self._sent += 1

    def finish(self, receivers: Receivers) -> None:
        self._open(receivers, "gloo")
        self._store.set(f"{self._number}/bucket/{self._sent}", json.dumps({"end": True}))
        self._flat = self._flat.new_empty(0)
        self._room.leave_device()

    def break_off(self) -> None:
        """Leave the group in the middle of a sync; the members are told."""
        # They wait for the next bucket, or poll in a broadcast; a traceback may keep this object and its store alive.
        for number in (self._sent, self._sent + 1):
            self._store.set(f"{self._number}/bucket/{number}", json.dumps({"broken": True}))
        self.leave()

    def leave(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()


def _outlive(group: Any, work: Any) -> None:
    """Keep a group until its broadcast has ended; a silent member delays that until its process is killed.

    Destroying the group closes its connections, and would wait for the broadcast while holding Python's lock.
    """
    while not work.is_completed():
        time.sleep(_POLL_S)
    del group


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _nccl() -> dict[str, str]:
    """Return what NCCL needs to be the same in all members; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    # NCCL reads -2 as its default: how memory is mapped for other processes depends on the driver.
    return {"version": version, "NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", "-2")}


def _check_nccl(target: int, theirs: Mapping[str, str]) -> None:
    """Check that a target's NCCL can talk to this process's, before both wait for each other.

    Raises:
        WeightSyncError: it cannot; the message says what differs.
    """
    ours = _nccl()
    if ours != theirs:
        raise WeightSyncError(
            f"rollout.weight_sync=collective connects actor and replicas by NCCL, which has to be the same at both "
            f"ends: the actor has {ours}, and target {target} has {dict(theirs)}; install torch of one NCCL version in "
            "both environments and set NCCL_CUMEM_ENABLE alike, or choose rollout.weight_sync=shared_memory or disk"
        )


def _enter_group(store: Store, rank: int, size: int, host: str, timeout: timedelta, backend: str) -> _Group:
    group = _join(PrefixStore("group", store), rank, size, host, min(timeout, _JOIN), backend)
    group._set_default_timeout(timeout)
    return _Group(group, aborts=backend == "nccl")


def _root() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options


@dataclass
class _Member:
    """The receiving end of a group.

    Attributes:
        store: store of the group.
        group: process group.
        device: device of the broadcasts.
        meeting: host and port of the sender's store, different for each group.
        room: buffer for the buckets.
    """

    store: Any
    group: _Group
    device: torch.device
    meeting: tuple[str, int]
    room: _Room = field(default_factory=_Room)

    def is_orphan(self) -> bool:
        """Return True if the sender's store is gone, and with it the sender."""
        # Not store.check(): on a broken connection it logs a warning of twenty lines.
        try:
            socket.create_connection(self.meeting, _PROBE_S).close()
        except OSError:
            return True
        return False

    def check(self, key: str) -> None:
        """Check that the sender of a bucket has not broken off.

        Raises:
            WeightSyncError: it has, or is gone.
        """
        if self.is_orphan() or "broken" in json.loads(self.store.get(key)):
            raise WeightSyncError("the sender broke off the update")

    def receive(self, size: int, key: str) -> Tensor:
        """Return the bucket that is described under ``key`` in the store, uint8 ``[size]``."""
        flat = self.room.take(size, self.device)
        following = time.monotonic() + _CHECK_S

        def check() -> None:
            nonlocal following
            if time.monotonic() >= following:
                self.check(key)
                following = time.monotonic() + _CHECK_S

        self.group.broadcast(flat, check)
        return flat


#: Groups that this process has joined, between two syncs, by the sender's name, target and reader.
_members: dict[tuple[str, int, int], _Member] = {}


def _drop_orphans() -> None:
    """Leave the groups of senders that are gone, such as a trainer that was killed and restarted."""
    for key, member in list(_members.items()):
        if member.is_orphan() and _members.pop(key, None) is not None:
            member.group.leave()


def _enter(source: Mapping[str, Any], timeout: timedelta) -> _Member:
    """Join the group of the sender and the other members."""
    store = TCPStore(source["host"], int(source["port"]), is_master=False, timeout=timeout)
    reader = {"readers": int(source.get("readers", 1)), "nccl": _nccl()}
    store.set(f"readers/{source['target']}", json.dumps(reader))
    plan = json.loads(store.get("group"))
    rank = plan["offsets"][source["target"]] + int(source.get("reader", 0))
    device = torch.device("cuda" if plan["backend"] == "nccl" else "cpu")
    host = _own_address({source["host"]})
    group = _enter_group(store, rank, plan["size"], host, timeout, plan["backend"])
    return _Member(store, group, device, (source["host"], int(source["port"])))


def _receive(source: Mapping[str, Any]) -> Iterator[WeightBucket]:
    timeout = timedelta(seconds=float(source["timeout_s"]))
    key = (source["sender"], int(source["target"]), int(source.get("reader", 0)))
    # Removed first: a member that breaks off has left the group.
    member = _members.pop(key, None)
    try:
        meeting = (source["host"], int(source["port"]))
        if source["number"] == 1:
            if member is not None:
                member.group.leave()
            member = None
            _drop_orphans()
            member = _enter(source, timeout)
        elif member is None or member.meeting != meeting:
            raise WeightSyncError("this process has left the group that carries the weights")
        number = 0
        while True:
            key_of_bucket = f"{source['number']}/bucket/{number}"
            header = json.loads(member.store.get(key_of_bucket))
            if "end" in header:
                break
            if "broken" in header:
                raise WeightSyncError("the sender broke off the update")
            yield read_bucket(member.receive(header["size"], key_of_bucket), header["tensors"])
            number += 1
        member.room.leave_device()
        _members[key], member = member, None
    except RuntimeError as error:
        if isinstance(error, WeightSyncError):
            raise
        raise WeightSyncError(f"the group that carries the weights broke: {error}") from error
    finally:
        # Members that wait for this one notice its end by closed connections, so no traceback may keep the group alive.
        if member is not None:
            member.group.leave()
        del member
