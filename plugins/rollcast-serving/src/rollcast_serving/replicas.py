"""The replicas of a run behind blocking calls: started, asked, brought back, and ended."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rollcast import WorkerGroup
from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, SamplingParams
from rollcast.errors import RollcastError
from rollcast.protocol import DataProto
from rollcast_serving.generation import assemble_sequences, build_requests
from rollcast_serving.launcher import ReplicaAddress
from rollcast_serving.manager import RoutingSettings, ServerManager

__all__ = ["LOOPBACK", "Replicas"]

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
_PROGRESS_S = 10.0
T = TypeVar("T")


class Replicas:
    """Starts a replica on each place of a group of :class:`~rollcast_serving.worker.ReplicaWorker`.

    Args:
        group: the view of its role.
        settings: of the routing.
        launch_timeout_s: until all replicas have to be ready.
        one_node: all of the run's processes share a node; replicas then listen on its loopback only.

    Raises:
        WorkerError: a replica cannot be started.
    """

    def __init__(
        self,
        group: WorkerGroup,
        settings: RoutingSettings | None = None,
        launch_timeout_s: float = 300.0,
        one_node: bool = True,
    ) -> None:
        self._group = group.with_timeout(launch_timeout_s + 60.0)
        places = group.devices()
        self._hosts = {node: LOOPBACK if one_node else node for node, _ in places}
        self._devices = [device for _, device in places]
        #: Gives replicas that were started again the present weights; set by whoever has them.
        self.resync: Callable[[Sequence[ReplicaAddress]], None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollcast-replicas", daemon=True)
        self._manager = ServerManager(self._launch(), settings, self._revive)
        self._thread.start()

    def _launch(self, replaced: Sequence[int] = ()) -> list[ReplicaAddress]:
        addresses = self._group.launch(self._hosts, self._devices, list(replaced))
        return [address for address in addresses if address is not None]

    async def _revive(self, indices: Sequence[int]) -> list[ReplicaAddress]:
        return await asyncio.to_thread(self._revive_blocking, list(indices))

    def _revive_blocking(self, indices: Sequence[int]) -> list[ReplicaAddress]:
        started = [address for address in self._launch(indices) if address.index in indices]
        if self.resync is not None:
            self.resync(started)
        return started

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def addresses(self) -> list[ReplicaAddress]:
        """Of the replicas that are not given up."""
        return self._manager.addresses

    @property
    def manager(self) -> ServerManager:
        """What routes; for callers in its event loop."""
        return self._manager

    def generate(self, requests: Sequence[RolloutRequest]) -> list[RolloutOutput]:
        """All requests over all replicas; see :meth:`ServerManager.generate_many`."""
        return self._run(self._manager.generate_many(requests, _Progress()))

    def generate_sequences(self, prompts: DataProto, sampling: SamplingParams) -> DataProto:
        """Return a response for each row; see :func:`rollcast_serving.generation.generate_sequences`."""
        outputs = self.generate(build_requests(prompts, sampling))
        return assemble_sequences(prompts, outputs, sampling.max_tokens)

    def generate_on_each(self, request: RolloutRequest) -> list[RolloutOutput]:
        """One request on every replica.

        Raises:
            RollcastError: of the first that answered with one.
        """
        return self._run(self._manager.generate_on_each(request))

    def check_health(self) -> None:
        """See :meth:`ServerManager.check_health`."""
        self._run(self._manager.check_health())

    def release(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Have all replicas give the named memory back."""
        self._run(self._manager.call_all("release", {"tags": list(tags)}))

    def resume(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Have all replicas take the named memory again."""
        self._run(self._manager.call_all("resume", {"tags": list(tags)}))

    def close(self) -> None:
        """Close the connections; the processes end with their group. May be called twice."""
        if not self._thread.is_alive():
            return
        try:
            self._run(self._manager.close())
        except RollcastError as error:
            logger.debug("closing the connections to the replicas: %s", error)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Progress:
    """Says every few seconds how far a batch is."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        if time.monotonic() - self._last > _PROGRESS_S:
            self._last = time.monotonic()
            logger.info("generated %d of %d responses", done, of)
