"""Runtime ``simulated``, a cluster of any size in one process, with a simulated clock.

Example::

    with SimulatedRuntime(nodes=128, processes_per_node=8, latency_s=1e-3) as cluster:
        group = WorkerGroup(ResourcePool([8] * 128), ClassWithInitArgs(MyWorker), runtime=cluster)
        future = group.compute.remote(batch)
        group.consume(future)
        assert cluster.traffic.between_nodes < budget
        cluster.kill_rank(group, 17)          # the next call raises WorkerError; group.restart() fixes it
        print(cluster.now)                    # seconds of the simulated clock

Every rank is an object whose calls run one after the other in the caller's thread, in the order in which they were
sent. Workers must not wait for each other, so collectives are not supported. The start and end of a call on the
simulated clock are computed from the settings and the bytes to move; nothing sleeps. The clock advances when the
controller waits.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from rollcast import WorkerGroup, WorkerHost
from rollcast.contracts.dispatch import RankCall
from rollcast.contracts.pools import NodeResources, ResourcePool
from rollcast.contracts.runtime import (
    CallFailed,
    Cancelled,
    Host,
    HostInfo,
    LaunchSpec,
    Outcome,
    Runtime,
    RuntimeCapabilities,
    RuntimeConfig,
    WorkerRaised,
)
from rollcast.contracts.worker import WorkerContext
from rollcast.errors import ResourceError, WorkerError, WorkerTimeoutError
from rollcast.protocol import DataProto
from rollcast_testing.schemas import SimulatedRuntimeConfig

__all__ = ["SimulatedRuntime", "Traffic"]

#: Simulated duration of a query of a call's state in seconds, so that a polling loop ends.
_POLL_S = 1e-3
_DRIVER = 0  # index of the controller's node


@dataclass
class Traffic:
    """Bytes moved since the start, or since :meth:`clear`.

    Attributes:
        between_nodes: bytes moved from one node to another.
        within_nodes: bytes moved between processes of a node.
        into_node: bytes received by each node from other nodes, by node index.
        stored: bytes put into the store.
    """

    between_nodes: int = 0
    within_nodes: int = 0
    into_node: dict[int, int] = field(default_factory=dict)
    stored: int = 0

    def add(self, source: int, target: int, size: int) -> None:
        """Count bytes that move from node ``source`` to node ``target``."""
        if source == target:
            self.within_nodes += size
        else:
            self.between_nodes += size
            self.into_node[target] = self.into_node.get(target, 0) + size

    def clear(self) -> None:
        """Reset all counts to zero."""
        self.between_nodes = self.within_nodes = self.stored = 0
        self.into_node.clear()


@dataclass(eq=False)
class _Process:
    """A simulated process.

    Attributes:
        node: index of the node.
        free_at: simulated end of the last call in seconds.
        died_at: simulated time of death in seconds; infinite if no death is planned.
        how: cause of death, for messages.
        reading_s: time that the running call spends on reading from other nodes, in seconds.
        kept: values that the running call has stored.
    """

    node: int
    context: WorkerContext
    free_at: float = 0.0
    died_at: float = math.inf
    how: str = ""
    reading_s: float = 0.0
    kept: list[_Stored] = field(default_factory=list)
    worker_host: WorkerHost = field(init=False)


@dataclass(eq=False)
class _Stored:
    """A value in the store of a node.

    Attributes:
        owner: process whose death loses the value; None for the controller's values.
        at: simulated time in seconds from which the value is available.
        seen_on: other nodes that have fetched the whole value.
    """

    value: Any
    node: int
    owner: _Process | None
    at: float
    size: int
    seen_on: set[int] = field(default_factory=set)


@dataclass(eq=False)
class _Call:
    """A call in flight, which is executed when it or a later call is awaited."""

    number: int
    process: _Process
    role: str
    method: str
    call: RankCall
    outcome: Outcome
    sent: float
    start: float = math.inf
    end: float = math.inf
    cancelled_at: float = math.inf
    executed: bool = False
    result: Any = None
    failure: CallFailed | None = None


class _NodeStore:
    """The store of one process."""

    def __init__(self, runtime: SimulatedRuntime, process: _Process) -> None:
        self._runtime = runtime
        self._process = process

    def put(self, value: Any) -> Any:
        """Store a value on this process's node."""
        stored = self._runtime._store(value, self._process.node, self._process, self._process.free_at)
        self._process.kept.append(stored)
        return stored

    def fetch(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:  # nothing ever waits
        """Return the values, adding the transfer time of values on other nodes."""
        return [self._read(ref, self._runtime._value_of(ref), whole=True) for ref in refs]

    def fetch_rows(self, cuts: Sequence[Any], timeout: float | None) -> list[Any]:
        """Return rows of values, cut on the node that stores them."""
        return [self._read(cut.ref, cut.of(self._runtime._value_of(cut.ref))) for cut in cuts]

    def _read(self, ref: Any, value: Any, whole: bool = False) -> Any:
        process, runtime = self._process, self._runtime
        begun = process.free_at + process.reading_s  # a call sets free_at to its start
        process.reading_s += max(runtime._there_at(ref) - begun, 0.0) + runtime._move(ref, value, process.node, whole)
        return value


class SimulatedRuntime(Runtime):
    """A runtime that simulates a cluster in this process; see the module.

    Args:
        nodes: number of nodes, ``node-0`` (which has the controller) and so on.
        processes_per_node: largest number of processes on a node for each pool, with one CPU and GPU each.
        latency_s: latency of sending a call, and of returning its result, in seconds.
        bytes_per_s: bandwidth between two nodes; None for infinite.
        call_s: ``role.method`` → duration of the call on each rank in seconds; 0 for other methods.

    Attributes:
        now: the simulated clock, in seconds.
        traffic: counts of moved bytes.
        starts: number of processes started so far.
    """

    config_schema: ClassVar[type[RuntimeConfig]] = SimulatedRuntimeConfig
    capabilities = RuntimeCapabilities(chained_calls=True)

    def __init__(
        self,
        nodes: int = 1,
        processes_per_node: int = 8,
        *,
        latency_s: float = 0.0,
        bytes_per_s: float | None = None,
        call_s: Mapping[str, float] | None = None,
    ) -> None:
        self.now = 0.0
        self.traffic = Traffic()
        self.starts = 0
        self._nodes, self._per_node = nodes, processes_per_node
        self._latency_s = latency_s
        self._seconds_per_byte = 0.0 if bytes_per_s is None else 1.0 / bytes_per_s
        self._call_s = dict(call_s or {})
        self._node_died_at: dict[int, float] = {}
        self._hosts: list[Host] = []
        #: Pool → node of each place, while a group runs on the pool.
        self._placed: dict[int, tuple[ResourcePool, list[int]]] = {}
        self._places_of: dict[int, tuple[tuple[ResourcePool, int], str]] = {}
        self._queue: deque[_Call] = deque()
        self._sent = 0
        # Reentrant, because several threads may read handles, and a worker may read a handle inside a call.
        self._lock = threading.RLock()

    @classmethod
    def from_config(
        cls,
        config: SimulatedRuntimeConfig,
        *,
        processes: int,  # noqa: ARG003
        run_dir: Path | None = None,  # noqa: ARG003
    ) -> Self:
        clone = cls(
            config.nodes,
            config.processes_per_node,
            latency_s=config.latency_s,
            bytes_per_s=config.bytes_per_s,
            call_s=config.call_s,
        )
        clone._node_died_at = {int(node): at for node, at in config.kill_nodes_at_s.items()}
        return clone

    # -- failures -----------------------------------------------------------------------------

    def kill_rank(self, group: WorkerGroup, rank: int, at: float | None = None) -> None:
        """Kill a process of a group, now or at a later time of the simulated clock."""
        self._kill(group.workers[rank].handle, self.now if at is None else at, "it was killed")

    def kill_node(self, node: int, at: float | None = None) -> None:
        """Kill a node with its processes, now or at a later time; nothing can be placed on it afterwards.

        Raises:
            ResourceError: the controller runs on the node, or there is no such node.
        """
        if not _DRIVER < node < self._nodes:
            raise ResourceError(f"node {node} cannot be killed; nodes that can: 1 to {self._nodes - 1}")
        when = self.now if at is None else at
        self._node_died_at[node] = min(when, self._node_died_at.get(node, math.inf))
        for host in self._hosts:
            if host.handle.node == node:
                self._kill(host.handle, when, f"its node {_name(node)} was lost")

    @staticmethod
    def _kill(process: _Process, at: float, how: str) -> None:
        if at < process.died_at:
            process.died_at, process.how = at, how

    def advance(self, seconds: float) -> None:
        """Advance the simulated clock."""
        self.now += seconds

    # -- places -------------------------------------------------------------------------------

    def _alive(self) -> list[int]:
        return [node for node in range(self._nodes) if self._node_died_at.get(node, math.inf) > self.now]

    def _used(self) -> dict[int, int]:
        used: dict[int, int] = {}
        for _, nodes in self._placed.values():
            for node in nodes:
                used[node] = used.get(node, 0) + 1
        return used

    def nodes(self) -> list[NodeResources]:
        used, capacity = self._used(), float(self._per_node)
        outcomes = []
        for node in self._alive():
            free = capacity - used.get(node, 0)
            outcomes.append(
                NodeResources(_name(node), capacity, capacity, free={"CPU": free, "GPU": free}, node_id=_name(node))
            )
        return outcomes

    def _place(self, pool: ResourcePool) -> list[int]:
        """Assign a node to each process; the processes of one entry of ``process_on_nodes`` share a node."""
        for base in {id(base): base for base, _ in pool.places()}.values():
            if id(base) not in self._placed:
                self._placed[id(base)] = (base, self._find_room(base))
        return [self._placed[id(base)][1][number] for base, number in pool.places()]

    def _find_room(self, pool: ResourcePool) -> list[int]:
        used, alive, places = self._used(), self._alive(), []
        free = {node: self._per_node - used.get(node, 0) for node in alive}
        candidates = deque(alive)
        for count in pool.process_on_nodes:
            for _ in range(len(candidates)):
                if free[candidates[0]] >= count:
                    break
                candidates.rotate(-1)
            else:
                raise ResourceError(
                    f"pool {pool.name!r} asks for {list(pool.process_on_nodes)} processes on nodes, but no node has "
                    f"{count} places left; {len(alive)} of {self._nodes} nodes are alive, with {self._per_node} each"
                )
            free[candidates[0]] -= count
            places += [candidates[0]] * count
            candidates.rotate(-1)
        return places

    def launch(self, pool: ResourcePool, spec: LaunchSpec, timeout: float) -> list[Host]:
        if spec.detached:
            raise ResourceError(f"group {spec.name!r} cannot be detached: a simulated cluster ends with this process")
        self._check_room(pool, spec.name)
        placed = self._place(pool)
        size, started = pool.world_size, []
        local, local_size = pool.local_rank_list(), pool.local_world_size_list()
        for rank, (node, place) in enumerate(zip(placed, pool.places(), strict=True)):
            context = WorkerContext(
                rank, size, local[rank], local_size[rank], _name(placed[0]), 1 + rank, _name(node), spec.name
            )
            process = _Process(node, context, free_at=self.now, died_at=self._node_died_at.get(node, math.inf))
            process.how = f"its node {_name(node)} was lost"
            process.worker_host = WorkerHost(_NodeStore(self, process))
            host = Host(process, HostInfo(_name(node), os.getpid(), 1 + rank), context)
            started.append(host)
            self._hosts.append(host)
            self._places_of[id(host)] = ((place[0], place[1]), spec.name)
            self.starts += 1
            try:
                process.worker_host.build(context, spec.roles)
            except WorkerRaised as raised:
                self.stop(started)
                raise CallFailed(rank, raised.failure) from raised
        return started

    def _check_room(self, pool: ResourcePool, name: str) -> None:
        wanted = {(id(base), number) for base, number in pool.places()}
        groups = {
            other
            for (base, number), other in self._places_of.values()
            if (id(base), number) in wanted and other != name
        }
        if len(groups) >= pool.max_colocate_count:
            raise ResourceError(
                f"pool {pool.name!r} is full: {', '.join(sorted(groups))} runs there, and max_colocate_count is "
                f"{pool.max_colocate_count}"
            )

    # -- calls --------------------------------------------------------------------------------

    def call(self, host: Host, role: str, method: str, call: RankCall, outcome: Outcome = "send") -> Any:
        with self._lock:
            self._sent += 1
            sent = _Call(self._sent, host.handle, role, method, call, outcome, self.now)
            self._queue.append(sent)
            return sent

    def put(self, value: Any) -> Any:
        return self._store(value, _DRIVER, None, self.now)

    def gather(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        with self._lock:
            self._run(refs)
            deadline = math.inf if timeout is None else self.now + timeout
            failed = min(((ref.end, index) for index, ref in enumerate(refs) if ref.failure), default=None)
            if failed is not None and failed[0] <= deadline:
                self.now = max(self.now, failed[0])
                cause = refs[failed[1]].failure
                raise CallFailed(failed[1], cause.failure, cause.detail, cause_type=cause.cause_type)
            late = [index for index, ref in enumerate(refs) if ref.end > deadline]
            if late:
                self.now = deadline
                detail = f"no answer within {timeout:g} s from {len(late)} of {len(refs)} ranks (indices {late[:8]})"
                raise CallFailed(late[0], None, detail, timed_out=True, late=late)
            self.now = max([self.now, *(ref.end for ref in refs)])
            return [ref.result for ref in refs]

    def _run(self, refs: Sequence[Any]) -> None:
        """Execute all calls up to the last one in ``refs``, in the order in which they were sent."""
        last = max((ref.number for ref in refs if not ref.executed), default=0)
        while self._queue and self._queue[0].number <= last:
            self._execute(self._queue.popleft())

    def _execute(self, call: _Call) -> None:
        process = call.process
        call.executed = True
        call.start = max(call.sent + self._latency_s, process.free_at)
        busy_s = self._call_s.get(f"{call.role}.{call.method}", 0.0)
        if self._ends_early(call, call.start + busy_s):
            return
        process.free_at, process.reading_s, process.kept = call.start, 0.0, []
        try:
            args = tuple(self._arrive(value, process) for value in call.call.args)
            kwargs = {key: self._arrive(value, process) for key, value in call.call.kwargs.items()}
            call.result = process.worker_host.call(call.role, call.method, args, kwargs, call.outcome)
        except WorkerRaised as raised:
            call.failure = CallFailed(0, raised.failure, cause_type=raised.failure.cause_type)
        process.free_at = call.start + process.reading_s + busy_s
        for entry in process.kept:
            entry.at = process.free_at
        if not self._ends_early(call, process.free_at):
            call.end = process.free_at + self._send(size_of(call.result), process.node, _DRIVER) + self._latency_s

    def _ends_early(self, call: _Call, end: float) -> bool:
        """Return True if the call's process dies, or the call is cancelled, before ``end``."""
        process = call.process
        if call.cancelled_at < min(end, process.died_at):
            call.failure = CallFailed(0, None, "the call was cancelled", cause_type="Cancelled")
            call.end = max(call.cancelled_at, call.sent)
            if call.cancelled_at > call.start:
                process.free_at = call.cancelled_at
        elif process.died_at <= end:
            call.failure = CallFailed(0, None, f"the worker's process died: {process.how}", cause_type=CallFailed.DIED)
            call.end = max(process.died_at, call.sent)
        else:
            return False
        call.result = None
        return True

    def _send(self, size: int, source: int, target: int) -> float:
        """Count bytes that move between two nodes; return the transfer time in seconds."""
        self.traffic.add(source, target, size)
        return 0.0 if source == target else size * self._seconds_per_byte

    def _arrive(self, value: Any, process: _Process) -> Any:
        """Return an argument as its worker receives it, and count the moved bytes."""
        if isinstance(value, _Stored | _Call):
            return _NodeStore(self, process)._read(value, self._value_of(value), whole=True)
        process.reading_s += self._send(size_of(value), _DRIVER, process.node)
        return value

    def ready(self, refs: Sequence[Any]) -> bool:
        with self._lock:
            self._run(refs)
            if all(ref.end <= self.now for ref in refs):
                return True
            self.now += _POLL_S
            return False

    def cancel(self, refs: Sequence[Any], hosts: Sequence[Host]) -> list[Cancelled]:
        with self._lock:
            return [self._cancel(ref) for ref in refs]

    def _cancel(self, call: _Call) -> Cancelled:
        if not call.executed:
            call.cancelled_at = self.now
            arrived = call.process.free_at <= self.now and call.sent + self._latency_s <= self.now
            return "interrupted" if arrived else "ended"
        if call.end <= self.now:
            return "ended"
        if call.process.died_at <= self.now:
            return "unreachable"
        call.failure = CallFailed(0, None, "the call was cancelled", cause_type="Cancelled")
        started = call.start <= self.now
        call.end = self.now
        call.process.free_at = min(call.process.free_at, self.now)
        return "interrupted" if started else "ended"

    def install_plugins(self, hosts: Sequence[Host], snapshot: bytes | None, timeout: float) -> None:
        """Do nothing, because the workers share this process's registries."""

    # -- store --------------------------------------------------------------------------------

    def _store(self, value: Any, node: int, owner: _Process | None, at: float) -> _Stored:
        size = size_of(value)
        self.traffic.stored += size
        return _Stored(value, node, owner, at, size)

    def _value_of(self, ref: Any) -> Any:
        """Return a stored value, or the result of a call."""
        if isinstance(ref, _Call):
            self._run([ref])
            if ref.failure is not None:
                raise WorkerError(f"{ref.role}.{ref.method}, whose result is wanted, failed: {_explain(ref.failure)}")
            return ref.result
        owner = ref.owner
        if owner is not None and owner.died_at <= self.now:
            rank = f"{owner.context.group}, rank {owner.context.rank}"
            raise WorkerError(f"kept columns are lost with the worker that held them ({rank}): {owner.how}")
        return ref.value

    @staticmethod
    def _there_at(ref: Any) -> float:
        return float(ref.end if isinstance(ref, _Call) else ref.at)

    def _move(self, ref: Any, value: Any, node: int, whole: bool) -> float:
        """Count the bytes that a node reads of a stored value or a result; return the transfer time in seconds.

        Args:
            ref: reference to a stored value or a call.
            value: the value, or rows of it.
            node: index of the reader's node.
            whole: True if the node caches the value, so that it is transferred only once.
        """
        if isinstance(ref, _Call):
            return self._send(size_of(value), ref.process.node, node)
        if not whole:
            return self._send(size_of(value), ref.node, node)
        if node in ref.seen_on:
            return 0.0
        if node != ref.node:
            ref.seen_on.add(node)
        return self._send(ref.size, ref.node, node)

    def fetch(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        with self._lock:
            return self._receive([(ref, self._value_of(ref)) for ref in refs], timeout, whole=True)

    def fetch_rows(self, cuts: Sequence[Any], timeout: float | None) -> list[Any]:
        """Return rows of stored batches, cut on the node that stores them."""
        with self._lock:
            return self._receive([(cut.ref, cut.of(self._value_of(cut.ref))) for cut in cuts], timeout, whole=False)

    def _receive(self, pairs: Sequence[tuple[Any, Any]], timeout: float | None, whole: bool) -> list[Any]:
        seconds = sum(self._move(ref, value, _DRIVER, whole) for ref, value in pairs)
        seconds = max([self.now, *(self._there_at(ref) for ref, _ in pairs)]) + seconds - self.now
        if timeout is not None and seconds > timeout:
            self.now += timeout
            raise WorkerTimeoutError(f"{len(pairs)} kept columns did not arrive within {timeout:g} s")
        self.now += seconds
        return [value for _, value in pairs]

    def wait_any(self, refs: Sequence[Any], timeout: float | None) -> list[int]:
        """Wait until a call has ended; return the indices of all ended calls, none if ``timeout`` seconds passed."""
        with self._lock:
            self._run(refs)
            first = min(ref.end for ref in refs)
            self.now = max(self.now, first if timeout is None else min(first, self.now + timeout))
            return [index for index, ref in enumerate(refs) if ref.end <= self.now]

    # -- end ----------------------------------------------------------------------------------

    def lost(self, hosts: Sequence[Host]) -> dict[int, str]:
        return {
            index: f"the worker's process died: {host.handle.how}"
            for index, host in enumerate(hosts)
            if host.handle.died_at <= self.now
        }

    def stop(self, hosts: Sequence[Host]) -> None:
        ending = {id(host) for host in hosts}
        processes = {id(host.handle) for host in hosts}
        with self._lock:
            for call in self._queue:
                if id(call.process) in processes:
                    call.executed, call.end = True, self.now
                    call.failure = CallFailed(0, None, "the group was shut down")
            self._queue = deque(call for call in self._queue if not call.executed)
        known = [host for host in self._hosts if id(host) in ending]
        self._hosts = [host for host in self._hosts if id(host) not in ending]
        for host in known:
            self._places_of.pop(id(host), None)
            self._kill(host.handle, self.now, "its group was shut down")
            host.handle.worker_host.close()
        used = {id(base) for (base, _), _ in self._places_of.values()}
        self._placed = {key: placed for key, placed in self._placed.items() if key in used}

    def shutdown(self) -> None:
        self.stop(list(self._hosts))


def _explain(failed: CallFailed) -> str:
    failure = failed.failure
    return failed.detail if failure is None else f"{failure.cause_type}: {failure.message}"


def _name(node: int) -> str:
    return f"node-{node}"


class _Sizer(pickle.Pickler):
    """A pickler that measures a batch without the stored values that it refers to."""

    def persistent_id(self, value: Any) -> str | None:
        return "stored" if isinstance(value, _Stored | _Call) else None


def size_of(value: Any) -> int:
    """Return the bytes of tensors and batches in a value and the references to remote rows; other values count 0."""
    if isinstance(value, DataProto) and value.is_remote:
        sink = io.BytesIO()
        _Sizer(sink, protocol=5).dump(value)
        return sink.tell()
    if isinstance(value, DataProto):
        return int(value.nbytes)
    if isinstance(value, list | tuple):
        return sum(map(size_of, value))
    if isinstance(value, Mapping):
        return sum(map(size_of, value.values()))
    return int(getattr(value, "nbytes", 0) or 0)
