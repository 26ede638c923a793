"""AgentLoopWorkers: processes that run agent loops, with replicas or with a rollout in the actor's processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rollcast import Worker, register
from rollcast.contracts.rollout import BaseRollout, RolloutOutput, RolloutRequest, SamplingParams
from rollcast.errors import CapabilityError
from rollcast.protocol import DataProto
from rollcast_agents.host import AgentHost, HostSetup, Rollout
from rollcast_agents.training.collector import TurnCollector

if TYPE_CHECKING:
    from rollcast_serving.launcher import ReplicaAddress
    from rollcast_serving.manager import RoutingSettings, ServerManager

__all__ = ["AgentLoopWorker", "AgentWorkerSetup", "InProcessAgentLoopWorker"]


@dataclass(frozen=True)
class AgentWorkerSetup:
    """Arguments that a worker is built from.

    Attributes:
        host: setup of its agents.
        routing: routing of requests to replicas; None without replicas.
    """

    host: HostSetup
    routing: RoutingSettings | None = None


class _AgentWorker(Worker):
    """A worker that holds the agents of its process."""

    def __init__(self, setup: AgentWorkerSetup) -> None:
        self.setup = setup
        self._host: AgentHost | None = None

    async def _started(self) -> AgentHost:
        if self._host is None:
            host = AgentHost(self.setup.host)
            await host.start()
            self._host = host
        return self._host

    async def close(self) -> None:
        """Release the agents' resources."""
        if self._host is not None:
            await self._host.close()


class AgentLoopWorker(_AgentWorker):
    """Worker for agent loops that sample from replicas; a rollout's requests go to one replica while it lives."""

    def __init__(self, setup: AgentWorkerSetup) -> None:
        super().__init__(setup)
        #: By replicas: their manager, and the number of calls that use it.
        self._managers: dict[tuple[ReplicaAddress, ...], tuple[ServerManager, int]] = {}

    @register(dispatch_mode="dp_compute_proto")
    async def run_rollouts(
        self, rows: DataProto, sampling: SamplingParams, addresses: Sequence[ReplicaAddress]
    ) -> DataProto:
        """Return the object column ``trajectories``, a list for each row; empty for padding rows.

        Args:
            rows: rows of :func:`rollcast_agents.training.manager.rows_of`.
            sampling: default sampling parameters of a reply.
            addresses: addresses of the replicas.
        """
        host = await self._started()
        async with self._connected(tuple(addresses)) as manager:

            async def generate(rollout: Rollout, request: RolloutRequest) -> RolloutOutput:
                return await manager.generate(request, rollout.rollout_id)

            return _collected(rows, await host.run(_rollouts(rows), generate, sampling))

    @asynccontextmanager
    async def _connected(self, addresses: tuple[ReplicaAddress, ...]) -> AsyncIterator[ServerManager]:
        """Yield the manager of these replicas, which concurrent calls share.

        A manager of replicas that have been restarted since is closed when its last call ends.
        """
        from rollcast_serving.manager import ServerManager

        manager, calls = self._managers.get(addresses) or (ServerManager(addresses, self.setup.routing), 0)
        self._managers[addresses] = manager, calls + 1
        try:
            yield manager
        finally:
            self._managers[addresses] = manager, self._managers[addresses][1] - 1
            newest = next(reversed(self._managers))
            old = [key for key, (_, used) in self._managers.items() if not used and key != newest]
            for key in old:
                await self._managers.pop(key)[0].close()

    async def close(self) -> None:
        """Release the agents' resources, and close the connections."""
        await super().close()
        for manager, _ in self._managers.values():
            await manager.close()


class InProcessAgentLoopWorker(_AgentWorker):
    """Worker for agent loops that sample from the actor's rollout, in its event loop."""

    #: Generation computes in the thread of all other calls; see the actor's worker.
    concurrent_async: ClassVar[bool] = False

    @register(dispatch_mode="dp_compute_proto")
    async def run_rollouts(self, rows: DataProto, sampling: SamplingParams) -> DataProto:
        """Return the object column ``trajectories``, a list for each row; empty for padding rows.

        Args:
            rows: rows of :func:`rollcast_agents.training.manager.rows_of`.
            sampling: default sampling parameters of a reply.
        """
        host, rollout = await self._started(), self._rollout()
        collector = TurnCollector(rollout.generate, self.setup.host.config.batch_wait_s)

        async def generate(of: Rollout, request: RolloutRequest) -> RolloutOutput:
            return await collector.generate(of.number, request)

        with rollout.generating():
            trajectories = await host.run(
                _rollouts(rows), generate, sampling, enter=collector.enter, leave=collector.leave
            )
        return _collected(rows, trajectories)

    def _rollout(self) -> BaseRollout:
        candidates = (getattr(worker, "rollout", None) for worker in self.colocated.values())
        rollout = next((candidate for candidate in candidates if isinstance(candidate, BaseRollout)), None)
        if rollout is None:
            raise CapabilityError(
                "agents need a rollout in the actor's processes, and there is none here; remove the role from "
                "placement.mapping"
            )
        return rollout


def _rollouts(rows: DataProto) -> list[Rollout]:
    columns = rows.non_tensor_batch
    seeds, fillers = rows["seed"].tolist(), rows["filler"].tolist()
    return [
        Rollout(number, columns["rollout_id"][number], columns["group_id"][number], columns["task"][number], seed)
        for number, (seed, filler) in enumerate(zip(seeds, fillers, strict=True))
        if not filler
    ]


def _collected(rows: DataProto, trajectories: Sequence[Any]) -> DataProto:
    lists = iter(trajectories)
    return DataProto.from_dict(
        {}, {"trajectories": [[] if filler else next(lists) for filler in rows["filler"].tolist()]}
    )
