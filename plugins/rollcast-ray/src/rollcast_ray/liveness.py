"""Detection of dead actors, even while no call to them is in flight."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rollcast.contracts.runtime import Host
from rollcast_ray import ray_internals
from rollcast_ray.session import current_session, staying_in

__all__ = ["LivenessWatch"]

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_PING_S = 5.0


@dataclass
class _Watched:
    group: str
    host: Host
    ping: Any = None
    sent: float = 0.0


def actor_id(host: Host) -> str:
    """Return Ray's id of the process."""
    return ray_internals.actor_id(host.handle)


class LivenessWatch:
    """A heartbeat that keeps one empty call in flight on each actor; the call fails at once when the actor dies.

    A busy actor does not answer the call, which does not mean that it is dead.

    Args:
        describe: function of a host and Ray's error that returns the cause of death, for messages.
        look_s: time between two checks in seconds.
        ping_s: time between two calls to a responsive actor in seconds.
    """

    def __init__(
        self, describe: Callable[[Host, Exception], str], look_s: float | None = None, ping_s: float | None = None
    ) -> None:
        self._describe = describe
        self._look_s = _LOOK_S if look_s is None else look_s
        self._ping_s = _PING_S if ping_s is None else ping_s
        self._watched: dict[str, _Watched] = {}
        self._lost: dict[str, str] = {}
        self._session: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed = ""

    def watch(self, group: str, hosts: Sequence[Host]) -> None:
        """Watch the processes of a group, which must belong to the current Ray session."""
        self._session = current_session()
        self._watched |= {actor_id(host): _Watched(group, host) for host in hosts}
        if self._thread is None or not self._thread.is_alive():
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._stop,), name="rollcast-liveness", daemon=True)
            self._thread.start()

    def forget(self, hosts: Sequence[Host]) -> None:
        """Stop watching hosts that are about to be ended."""
        for host in hosts:
            self._watched.pop(actor_id(host), None)
            self._lost.pop(actor_id(host), None)

    def bury(self, hosts: Sequence[Host], how: str) -> None:
        """Record hosts that ended together with their Ray session."""
        self._lost |= {actor_id(host): how for host in hosts}

    def note(self, host: Host, how: str) -> None:
        """Record the death of a host that a failed call has revealed."""
        if self._watched.pop(actor_id(host), None) is not None:
            self._lost[actor_id(host)] = how

    def lost(self, hosts: Sequence[Host]) -> dict[int, str]:
        """Return the dead hosts: index → cause of death."""
        if not self._lost:
            return {}
        losses = {index: self._lost.get(actor_id(host)) for index, host in enumerate(hosts)}
        return {index: how for index, how in losses.items() if how is not None}

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._look_s)
        self._thread = None
        self._watched.clear()
        self._lost.clear()

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(self._look_s):
            try:
                with staying_in(self._session) as is_current:
                    if not is_current:
                        # Ray was shut down together with the watched processes; watch() starts a new thread.
                        logger.warning("the watch for dead workers stops, because Ray was shut down")
                        return
                    self._look()
            except Exception as error:  # after any error, later deaths must still be detected
                if not ray.is_initialized():
                    logger.warning("the watch for dead workers stops, because Ray has gone: %s", error)
                    return
                if str(error) != self._failed:  # once, not every second
                    self._failed = str(error)
                    logger.exception("the watch for dead workers failed and goes on; see the error below")

    def _look(self) -> None:
        now = time.monotonic()
        watched = list(self._watched.values())
        for entry in watched:
            if entry.ping is None and now - entry.sent >= self._ping_s:
                entry.ping, entry.sent = entry.host.handle.ping.remote(), now
        open_pings = [entry.ping for entry in watched if entry.ping is not None]
        if not open_pings:
            return
        ready = set(ray.wait(open_pings, num_returns=len(open_pings), timeout=0)[0])
        for entry in watched:
            if entry.ping in ready:
                self._read(entry)

    def _read(self, entry: _Watched) -> None:
        ping, entry.ping = entry.ping, None
        try:
            ray.get(ping)
        except ray.exceptions.ActorUnavailableError as error:
            logger.warning("a worker of %s cannot be reached at present: %s", entry.group, error)
        except ray.exceptions.RayActorError as error:
            if actor_id(entry.host) not in self._watched:
                return  # ended on purpose
            how = self._describe(entry.host, error)
            self.note(entry.host, how)
            where = f"rank {entry.host.context.rank} (node {entry.host.info.node}, process {entry.host.info.pid})"
            logger.error("%s has lost %s: %s", entry.group, where, how)
