"""The worker that represents replicas in a worker group and starts their processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from rollcast import Worker, register
from rollcast.contracts.device import CUDA, current_device
from rollcast.contracts.rollout import EngineNode
from rollcast.errors import ResourceError
from rollcast_serving.launcher import ReplicaAddress, ReplicaProcess, ReplicaSpec
from rollcast_serving.lifeline import Meeting, MeetingPlace

__all__ = ["RankPlace", "ReplicaWorker"]


class RankPlace(NamedTuple):
    """A rank's node and device.

    Attributes:
        node: address of the node.
        device: id of the accelerator; empty without one.
        local_rank: number of the rank among those on its node.
    """

    node: str
    device: str
    local_rank: int


class ReplicaWorker(Worker):
    """A host of one replica, which uses the devices of ``size`` consecutive ranks.

    The engine's process is a child of this worker's, so it has its own environment, and can crash without the worker.
    A replica that spans nodes has a process on each.

    Args:
        spec: settings of the replicas; a replica's seed is the spec's plus its number.
        size: ranks per replica.

    Raises:
        ResourceError: the ranks of a replica are on several nodes, as a pool with ``strategy=PACK`` may place them, and
            the rollout's engines cannot span nodes.
    """

    def __init__(self, spec: ReplicaSpec, size: int = 1) -> None:
        place = self.context
        # Ranks on a node are consecutive, so a replica fits if the node has enough ranks after its first.
        is_first = self.rank % size == 0
        if not spec.multi_node and is_first and place.local_rank + size > place.local_world_size:
            raise ResourceError(
                f"the replica of ranks {self.rank} to {self.rank + size - 1} would span nodes: from rank {self.rank} "
                f"on, node {place.node} has {place.local_world_size - place.local_rank} of the pool's processes, and a "
                f"replica needs {size} ({spec.section}.tensor_model_parallel_size); use strategy STRICT_PACK, or a "
                "smaller size"
            )
        self._spec = spec
        self._size = size
        self._process: ReplicaProcess | None = None
        self._address: ReplicaAddress | None = None
        self._meeting_place: MeetingPlace | None = None
        self._generation = 0

    @register(dispatch_mode="one_to_all")
    def place(self) -> RankPlace:
        """Return this rank's node and device."""
        return RankPlace(self.context.node, self.context.device_id, self.context.local_rank)

    @register(dispatch_mode="one_to_all")
    def meet(self, hosts: dict[str, str], replaced: Collection[int] = ()) -> Meeting | None:
        """End this rank's process if its replica is to be started again, and reserve ports for the replica's processes.

        To be called before :meth:`launch` if replicas span nodes.

        Args:
            hosts, replaced: as in :meth:`launch`.

        Returns:
            Where the processes of the replica meet; None on ranks that are not the first of a replica to be started.
        """
        index = self.rank // self._size
        if not self._starts(index, replaced):
            return None
        self._end_process()
        if self.rank % self._size:
            return None
        self._meeting_place = MeetingPlace(hosts[self.context.node])
        return self._meeting_place.meeting

    @register(dispatch_mode="one_to_all")
    def launch(
        self,
        hosts: dict[str, str],
        places: list[RankPlace],
        replaced: Collection[int] = (),
        meetings: Sequence[Meeting | None] = (),
    ) -> ReplicaAddress | None:
        """Start this rank's replica, or its node's part of it, unless it runs.

        Args:
            hosts: node → address to listen on.
            places: by rank, the result of :meth:`place`.
            replaced: numbers of the replicas to restart; the others are left alone. Empty starts all that do not run.
            meetings: by rank, the result of :meth:`meet`; empty if no replica spans nodes.

        Returns:
            Its address; None on ranks that serve nothing, and on those that are left alone.

        Raises:
            ResourceError: a replica has unequal numbers of ranks on its nodes.
            RolloutError: it cannot be started; the message has the end of its log.
        """
        index = self.rank // self._size
        first = index * self._size
        ranks = range(first, first + self._size)
        starts = [rank for rank in ranks if rank == first or places[rank].local_rank == 0]
        if self.rank not in starts or (replaced and index not in replaced):
            return None
        if self._starts(index, replaced) and not meetings:
            self._end_process()
        if self._process is None:
            self._start(index, hosts, places, starts, meetings[first] if meetings else None)
        return self._address

    def _starts(self, index: int, replaced: Collection[int]) -> bool:
        is_alive = self._process is not None and self._process.is_alive
        return index in replaced or (not replaced and not is_alive)

    def _end_process(self) -> None:
        if self._process is not None:
            self._generation += 1
        self.close()

    def _start(
        self,
        index: int,
        hosts: dict[str, str],
        places: Sequence[RankPlace],
        starts: Sequence[int],
        meeting: Meeting | None,
    ) -> None:
        node, last = self.context.node, (index + 1) * self._size
        ends = [*starts[1:], last]
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        if len(set(counts)) > 1:
            raise ResourceError(
                f"the replica of ranks {starts[0]} to {last - 1} has {' and '.join(map(str, counts))} ranks on its "
                "nodes, and an engine needs as many on each; use strategy STRICT_PACK"
            )
        number = starts.index(self.rank)
        own = ",".join(filter(None, (place.device for place in places[self.rank : ends[number]])))
        variable = (current_device().visibility or CUDA.visibility)[0] if own else ""
        env = {**({variable: own} if own else {}), **self._spec.env}
        spec = replace(self._spec, seed=self._spec.seed + index, env=env, host=hosts[node])
        listener = None if self._meeting_place is None else self._meeting_place.listener
        if meeting is None or len(starts) == 1:
            meeting = listener = None
        engine_node = EngineNode()
        if meeting is not None:
            engine_node = EngineNode(number, len(starts), hosts[node], meeting.address, meeting.port)
        self._process = ReplicaProcess(spec, index, node, self._generation, engine_node, meeting, listener)
        address = replace(self._process.wait_ready(), device=self.context.device_id)
        self._address = address if number == 0 else None

    @register(dispatch_mode="one_to_all")
    def stop(self, indices: Collection[int]) -> None:
        """End this rank's replica if its number is among these, so that its devices are free."""
        if self.rank // self._size in indices:
            self.close()

    def close(self) -> None:
        """End the replica."""
        if self._process is not None:
            self._process.stop()
            self._process = None
        if self._meeting_place is not None:
            self._meeting_place.close()
            self._meeting_place = None
