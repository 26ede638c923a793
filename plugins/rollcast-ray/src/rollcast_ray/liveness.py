"""Detects that an actor has died, also while nobody calls it."""

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
    """A heartbeat: one empty call in flight at each actor, which fails at once when the actor dies.

    A busy actor leaves the call unanswered; that is no sign of death.

    Args:
        describe: host and Ray's error → how it died, for messages.
        look_s: seconds between two looks, 1 by default.
        ping_s: seconds between two calls to an actor that answers, 5 by default.
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
        """Watch the processes of a group, which the present session of Ray has started."""
        self._session = current_session()
        self._watched |= {actor_id(host): _Watched(group, host) for host in hosts}
        if self._thread is None or not self._thread.is_alive():
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._stop,), name="rollcast-liveness", daemon=True)
            self._thread.start()

    def forget(self, hosts: Sequence[Host]) -> None:
        """Stop watching these hosts: they are about to be ended."""
        for host in hosts:
            self._watched.pop(actor_id(host), None)
            self._lost.pop(actor_id(host), None)

    def bury(self, hosts: Sequence[Host], how: str) -> None:
        """Record hosts that ended all at once, with the Ray that they ran on."""
        self._lost |= {actor_id(host): how for host in hosts}

    def note(self, host: Host, how: str) -> None:
        """Record a death that a failed call has shown."""
        if self._watched.pop(actor_id(host), None) is not None:
            self._lost[actor_id(host)] = how

    def lost(self, hosts: Sequence[Host]) -> dict[int, str]:
        """Return the hosts that are dead: index → how they died."""
        if not self._lost:
            return {}
        found = {index: self._lost.get(actor_id(host)) for index, host in enumerate(hosts)}
        return {index: how for index, how in found.items() if how is not None}

    def stop(self) -> None:
        """End the watch."""
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
                        # Ray was shut down, and the watched processes with it; watch() starts anew.
                        logger.warning("the watch for dead workers stops, because Ray was shut down")
                        return
                    self._look()
            except Exception as error:  # whatever it is, workers that die later still have to be noticed
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
                return  # it was ended on purpose
            how = self._describe(entry.host, error)
            self.note(entry.host, how)
            where = f"rank {entry.host.context.rank} (node {entry.host.info.node}, process {entry.host.info.pid})"
            logger.error("%s has lost %s: %s", entry.group, where, how)
