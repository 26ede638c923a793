"""Blocking calls to the replicas of a run: start, generate, restart, stop."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from rollcast import WorkerGroup
from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, SamplingParams
from rollcast.errors import RollcastError
from rollcast.protocol import DataProto
from rollcast_serving.generation import assemble_sequences, build_requests
from rollcast_serving.launcher import ReplicaAddress
from rollcast_serving.manager import Progress, RoutingSettings, ServerManager, Stragglers
from rollcast_serving.replica_loop import ReplicaLoop

__all__ = ["LOOPBACK", "Replicas"]

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
_PROGRESS_S = 10.0
T = TypeVar("T")


class Replicas:
    """The replicas on the ranks of a group of :class:`~rollcast_serving.worker.ReplicaWorker`.

    Requests run on the event loop of a :class:`~rollcast_serving.replica_loop.ReplicaLoop`. A replica is restarted only
    by the thread that waits in one of the blocking calls here. The trainer makes these calls, so a restart, which sends
    weights from the actor, never runs concurrently with a training call.

    Args:
        group: worker group of the role.
        settings: limits of routing and recovery.
        launch_timeout_s: deadline for all replicas to start, in seconds.
        one_node: True if all of the run's processes share a node; replicas then listen on its loopback only.
        loop: event loop shared with the replicas of other roles, and closed by its owner; None creates one.

    Raises:
        WorkerError: a replica cannot be started.
    """

    def __init__(
        self,
        group: WorkerGroup,
        settings: RoutingSettings | None = None,
        launch_timeout_s: float = 300.0,
        one_node: bool = True,
        loop: ReplicaLoop | None = None,
    ) -> None:
        self._group = group.with_timeout(launch_timeout_s + 60.0)
        self._places = group.place()
        self._hosts = {place.node: LOOPBACK if one_node else place.node for place in self._places}
        self._one_node = one_node
        #: Callback that sends the current weights to restarted replicas; set by the trainer.
        self.resync: Callable[[Sequence[ReplicaAddress]], None] | None = None
        self._has_own_loop, self._is_closed = loop is None, False
        self._batches = itertools.count()
        #: Called in the event loop before the connections are closed.
        self.on_close: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._manager = ServerManager(self._launch(), settings, self._revive, self._end)
        #: The event loop of the requests.
        self.loop = loop or ReplicaLoop()

    def _launch(self, replaced: Sequence[int] = ()) -> list[ReplicaAddress]:
        meetings = [] if self._one_node else self._group.meet(self._hosts, list(replaced))
        addresses = self._group.launch(self._hosts, self._places, list(replaced), meetings)
        return [address for address in addresses if address is not None]

    async def _revive(self, index: int) -> ReplicaAddress:
        return await self.loop.in_owner(lambda: self._revive_blocking(index))

    async def _end(self, index: int) -> None:
        await self.loop.in_owner(lambda: self._group.stop([index]))

    def _revive_blocking(self, index: int) -> ReplicaAddress:
        (started,) = (address for address in self._launch([index]) if address.index == index)
        if self.resync is not None:
            self.resync([started])
        return started

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return a coroutine's result from the event loop of the replicas; replicas that die meanwhile are
        restarted.
        """
        return self.loop.run(coroutine)

    @property
    def addresses(self) -> list[ReplicaAddress]:
        """Addresses of the replicas that are not lost."""
        return self._manager.addresses

    @property
    def manager(self) -> ServerManager:
        """Router of the requests, for callers in its event loop."""
        return self._manager

    def generate(self, requests: Sequence[RolloutRequest]) -> list[RolloutOutput | RollcastError]:
        """Return an output or an error for each request; see :meth:`ServerManager.generate_many`."""
        return self.run(self._manager.generate_many(requests, _Progress()))

    def generate_sequences(
        self, prompts: DataProto, sampling: SamplingParams, stragglers: Stragglers | None = None
    ) -> DataProto:
        """Return a response for each row; see :func:`rollcast_serving.generation.generate_sequences`.

        Args:
            prompts, sampling: as in that function.
            stragglers: policy for cutting late responses; None waits for all.

        Raises:
            RollcastError: a row failed; it has the class of the first row's error, and names the number of failed rows.
        """
        return self.run(self.respond(prompts, sampling, _Progress(), stragglers))

    async def respond(
        self,
        prompts: DataProto,
        sampling: SamplingParams,
        progress: Progress | None = None,
        stragglers: Stragglers | None = None,
    ) -> DataProto:
        """Return a response for each row, in the event loop of the replicas; see :meth:`generate_sequences`."""
        # Unique ids, so that concurrent batches can be cut separately.
        requests = build_requests(prompts, sampling, f"{next(self._batches)}.")
        answers = await self._manager.generate_many(requests, progress, stragglers)
        outputs = [answer for answer in answers if isinstance(answer, RolloutOutput)]
        failed = [answer for answer in answers if isinstance(answer, RollcastError)]
        if failed:
            raise type(failed[0])(f"{len(failed)} of {len(answers)} requests failed, the first with: {failed[0]}")
        return assemble_sequences(prompts, outputs, sampling.max_tokens)

    def take_metrics(self) -> dict[str, float]:
        """Return metrics of the engines' load since the last call."""

        async def take() -> dict[str, float]:
            return self._manager.take_metrics()

        return self.run(take())

    def replace_dead(self, deaths: Mapping[int, RollcastError]) -> None:
        """Restart replicas, by number, that a weight sync found dead, and send them the current weights."""
        self.run(self._replace(deaths))

    async def _replace(self, deaths: Mapping[int, RollcastError]) -> None:
        await self._manager.lose(deaths)
        await self._manager.settle()
        self._manager.require_any()

    def generate_on_each(self, request: RolloutRequest) -> list[RolloutOutput]:
        """Return an output of every replica.

        Raises:
            RollcastError: first error that a replica answered with.
        """
        return self.run(self._manager.generate_on_each(request))

    def check_health(self) -> None:
        """Check all replicas; see :meth:`ServerManager.check_health`."""
        self.run(self._manager.check_health())

    def release(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Make all replicas release the memory with these tags."""
        self.run(self._manager.call_all("release", {"tags": list(tags)}))

    def resume(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Make all replicas allocate the memory with these tags again."""
        self.run(self._manager.call_all("resume", {"tags": list(tags)}))

    def close(self) -> None:
        """Close the connections; the processes end with their group. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.run(self._close())
        except RollcastError as error:
            logger.debug("closing the connections to the replicas: %s", error)
        if self._has_own_loop:
            self.loop.close()

    async def _close(self) -> None:
        for close in self.on_close:
            await close()
        await self._manager.close()


class _Progress:
    """Logger of a batch's progress, every few seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        if time.monotonic() - self._last > _PROGRESS_S:
            self._last = time.monotonic()
            logger.info("generated %d of %d responses", done, of)
