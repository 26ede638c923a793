"""The worker that represents replicas in a worker group and starts their processes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from rollcast import Worker, register
from rollcast.contracts.device import CUDA, current_device
from rollcast.errors import ResourceError
from rollcast_serving.launcher import ReplicaAddress, ReplicaProcess, ReplicaSpec

__all__ = ["ReplicaWorker"]


class ReplicaWorker(Worker):
    """A host of one replica, which uses the devices of ``tensor_parallel`` consecutive ranks.

    The engine's process is a child of this worker's, so it has its own environment, and can crash without the worker.

    Args:
        spec: settings of the replicas; a replica's seed is the spec's plus its number.
        tensor_parallel: ranks per replica.

    Raises:
        ResourceError: the ranks of a replica are on several nodes, as a pool with ``strategy=PACK`` may place them.
    """

    def __init__(self, spec: ReplicaSpec, tensor_parallel: int = 1) -> None:
        place = self.context
        # Ranks on a node are consecutive, so a replica fits if the node has enough ranks after its first.
        if self.rank % tensor_parallel == 0 and place.local_rank + tensor_parallel > place.local_world_size:
            last = self.rank + tensor_parallel - 1
            raise ResourceError(
                f"the replica of ranks {self.rank} to {last} would span nodes: from rank {self.rank} on, node "
                f"{place.node} has {place.local_world_size - place.local_rank} of the pool's processes, and "
                f"{spec.section}.tensor_model_parallel_size is {tensor_parallel}; use strategy STRICT_PACK, or a "
                "smaller size"
            )
        self._spec = spec
        self._tensor_parallel = tensor_parallel
        self._process: ReplicaProcess | None = None
        self._address: ReplicaAddress | None = None
        self._generation = 0

    @register(dispatch_mode="one_to_all")
    def devices(self) -> tuple[str, str]:
        """Return this rank's node and the id of its accelerator, empty without one."""
        return self.context.node, self.context.device_id

    @register(dispatch_mode="one_to_all")
    def launch(
        self, hosts: dict[str, str], devices: list[str], replaced: Collection[int] = ()
    ) -> ReplicaAddress | None:
        """Start this rank's replica unless it runs.

        Args:
            hosts: node → address to listen on.
            devices: by rank, the device id from :meth:`devices`.
            replaced: numbers of the replicas to restart; the others are left alone. Empty starts all that do not run.

        Returns:
            Its address; None on ranks that only contribute devices to a replica, and on those that are left alone.

        Raises:
            RolloutError: it cannot be started; the message has the end of its log.
        """
        if self.rank % self._tensor_parallel:
            return None
        index = self.rank // self._tensor_parallel
        if replaced and index not in replaced:
            return None
        if self._process is not None and (index in replaced or not self._process.is_alive):
            self._process.stop()
            self._process = None
            self._generation += 1
        if self._process is None:
            node = self.context.node
            own = ",".join(filter(None, devices[self.rank : self.rank + self._tensor_parallel]))
            variable = (current_device().visibility or CUDA.visibility)[0] if own else ""
            env = {**({variable: own} if own else {}), **self._spec.env}
            spec = replace(self._spec, seed=self._spec.seed + index, env=env, host=hosts[node])
            self._process = ReplicaProcess(spec, index, node, self._generation)
            self._address = self._process.wait_ready()
        return self._address

    @register(dispatch_mode="one_to_all")
    def stop(self, indices: Collection[int]) -> None:
        """End this rank's replica if its number is among these, so that its devices are free."""
        if self.rank // self._tensor_parallel in indices:
            self.close()

    def close(self) -> None:
        """End the replica."""
        if self._process is not None:
            self._process.stop()
            self._process = None
