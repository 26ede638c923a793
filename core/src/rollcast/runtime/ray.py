"""Runtime ``ray``: a Ray actor for each rank. Only this module and those beside it named ``ray_*`` import Ray.

By default it starts a Ray of its own on this machine and stops it at the end; where an address is
given (or ``RAY_ADDRESS`` is set) it joins that cluster and leaves it running.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollcast.controller.dispatch import RankCall
from rollcast.controller.hosting import HostInfo, WorkerRaised
from rollcast.controller.resource_pool import NodeResources, ResourcePool, check_resources
from rollcast.controller.runtime import CallFailed, Host, LaunchSpec, Runtime
from rollcast.controller.worker import ClassWithInitArgs
from rollcast.controller.worker_group import WorkerGroup
from rollcast.errors import DispatchError, ResourceError, WorkerError, WorkerTimeoutError
from rollcast.plugins.inprocess import snapshot
from rollcast.runtime.places import (
    build_contexts,
    check_temp_dir,
    default_object_store,
    keeping_sigterm,
    read_last_lines,
    require_reachable,
)
from rollcast.runtime.process import HostProcess
from rollcast.runtime.ray_pool import RayResourcePool

__all__ = ["RayResourcePool", "RayRuntime", "RayWorkerGroup"]

logger = logging.getLogger(__name__)

#: What an embedded Ray needs to behave on a small or busy machine: workers at nice 15 starve in
#: collectives, and usage statistics want a network.
_EMBEDDED_ENV = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
#: Warns at each start that a local Ray asks for its token, which is as it should be.
_auth_logger = logging.getLogger("ray._private.authentication.authentication_token_setup")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CLOSE_GRACE_S = 5.0
_SETTLE_S = 0.5


class _ObjectStore:
    """Ray's object store, as the workers see it."""

    def put(self, value: Any) -> Any:
        return ray.put(value)

    def fetch(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        return list(ray.get(list(refs), timeout=timeout))


class _HostActor(HostProcess):
    """The Ray actor."""

    def __init__(self) -> None:
        super().__init__(_ObjectStore())

    def hello(self) -> HostInfo:
        return self.host.describe(ray.util.get_node_ip_address())


@dataclass
class _Running:
    """A group that runs: its processes, and where they were placed."""

    pool: RayResourcePool
    hosts: list[Host]


class RayRuntime(Runtime):
    """Groups of Ray actors.

    Args:
        address: of a cluster to join; ``RAY_ADDRESS`` if that is set, else a Ray of our own.
        num_cpus: logical CPUs of an embedded Ray; all cores by default. May exceed the cores.
        object_store_memory: bytes of an embedded Ray's object store; by default 30 % of the
            memory, at most 4 GiB.
        log_to_driver: show what workers print.
    """

    _shared: RayRuntime | None = None

    def __init__(
        self,
        address: str | None = None,
        num_cpus: int | None = None,
        object_store_memory: int | None = None,
        log_to_driver: bool = False,
    ) -> None:
        self._address = address or os.environ.get("RAY_ADDRESS") or None
        self._num_cpus = num_cpus
        self._object_store_memory = object_store_memory
        self._log_to_driver = log_to_driver
        self._initialized_ray = False
        self._pools: dict[int, RayResourcePool] = {}
        self._running: list[_Running] = []

    @classmethod
    def shared(cls) -> RayRuntime:
        """The runtime of groups that are built without one; joins a Ray that already runs here."""
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    def start(self) -> None:
        """Start or join Ray; nothing if this process already has one."""
        if ray.is_initialized():
            return
        with keeping_sigterm():
            self._join(self._address) if self._address else self._embed()
        self._initialized_ray = True

    def _join(self, address: str) -> None:
        try:
            require_reachable(address)  # Ray itself goes on trying for minutes
            ray.init(address=address, log_to_driver=self._log_to_driver, logging_level=logging.WARNING)
        except (OSError, ray.exceptions.RayError) as error:
            raise ResourceError(
                f"cannot join Ray at {address} (from runtime.address or RAY_ADDRESS): {error}. "
                "Start it with `ray start --head`, or unset the address for a Ray of this run's own"
            ) from error
        logger.info("joined Ray at %s", address)

    def _embed(self) -> None:
        check_temp_dir()
        added = {key: value for key, value in _EMBEDDED_ENV.items() if key not in os.environ}
        os.environ.update(added)
        level = _auth_logger.level
        _auth_logger.setLevel(logging.ERROR)
        try:
            ray.init(
                num_cpus=self._num_cpus or os.cpu_count(),
                object_store_memory=self._object_store_memory or default_object_store(),
                include_dashboard=False,
                log_to_driver=self._log_to_driver,
                logging_level=logging.WARNING,
            )
        finally:
            _auth_logger.setLevel(level)
            for key in added:
                os.environ.pop(key, None)

    def nodes(self) -> list[NodeResources]:
        self.start()
        return [
            NodeResources(
                n["NodeManagerAddress"], float(n["Resources"].get("CPU", 0)), float(n["Resources"].get("GPU", 0))
            )
            for n in ray.nodes()
            if n["Alive"]
        ]

    def launch(self, pool: ResourcePool, spec: LaunchSpec, timeout: float) -> list[Host]:
        self.start()
        deadline = time.monotonic() + timeout
        placed = self._placed(pool)
        try:
            if placed.placement_groups is None:
                others = [other for other in self._pools.values() if other.placement_groups is not None]
                check_resources([*others, placed], self.nodes())
            hosts = self._start_hosts(placed, spec, timeout, deadline)
        except BaseException:
            self._release_unused()
            raise
        self._running.append(_Running(placed, hosts))
        return hosts

    def _start_hosts(self, pool: RayResourcePool, spec: LaunchSpec, timeout: float, deadline: float) -> list[Host]:
        try:
            blob = cloudpickle.dumps((snapshot(), cloudpickle.dumps(dict(spec.roles))))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise DispatchError(
                f"the classes or arguments of {spec.name} cannot be sent to workers: {error}"
            ) from error
        handles = self._start_actors(pool, timeout)
        try:
            infos = self._get([handle.hello.remote() for handle in handles], deadline)
            counts = [count for count, _ in pool.get_placement_groups()]
            built = [
                handle.build.remote(context, dict(spec.env), list(sys.path), blob)
                for handle, context in zip(handles, build_contexts(counts, spec, infos), strict=True)
            ]
            self._get(built, deadline)
        except BaseException:
            for handle in handles:
                ray.kill(handle)
            raise
        return [Host(handle, info) for handle, info in zip(handles, infos, strict=True)]

    def _placed(self, pool: ResourcePool) -> RayResourcePool:
        if isinstance(pool, RayResourcePool):
            if pool.placement_groups is None:
                self._pools[id(pool)] = pool  # placed by us, and so released by us
            return pool
        if id(pool) not in self._pools:
            placed = RayResourcePool(
                pool.process_on_nodes, pool.use_gpu, pool.max_colocate_count, pool.name, pool.cpus_per_process
            )
            placed._origin = pool  # type: ignore[attr-defined]  # keeps its id from being reused
            self._pools[id(pool)] = placed
        return self._pools[id(pool)]

    @staticmethod
    def _start_actors(pool: RayResourcePool, timeout: float) -> list[Any]:
        actor, share = ray.remote(_HostActor), pool.max_colocate_count
        return [
            actor.options(
                num_cpus=pool.cpus_per_process / share,
                num_gpus=(1.0 / share if pool.use_gpu else 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote()
            for count, group in pool.get_placement_groups(timeout)
            for index in range(count)
        ]

    def _release_unused(self) -> None:
        """Give back the places of pools on which no group runs any more."""
        used = {id(running.pool) for running in self._running}
        for key, pool in list(self._pools.items()):
            if id(pool) not in used:
                pool.release()
                del self._pools[key]

    def _get(self, refs: Sequence[Any], deadline: float) -> list[Any]:
        return self.gather(refs, max(deadline - time.monotonic(), 0.001))

    def call(self, host: Host, role: str, method: str, call: RankCall, keep: bool = False) -> Any:
        try:
            return host.handle.call.remote(role, method, keep, tuple(call.kwargs), *call.args, *call.kwargs.values())
        except TypeError as error:
            raise DispatchError(f"an argument of {role}.{method} cannot be sent to a worker: {error}") from error

    def put(self, value: Any) -> Any:
        try:
            return ray.put(value)
        except TypeError as error:
            raise DispatchError(f"a {type(value).__name__} cannot be sent to workers: {error}") from error

    def gather(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        refs = list(refs)
        try:
            return list(ray.get(refs, timeout=timeout))
        except ray.exceptions.GetTimeoutError:
            _, waiting = ray.wait(refs, num_returns=len(refs), timeout=0)
            late = [i for i, ref in enumerate(refs) if ref in set(waiting)]
            detail = f"no answer within {timeout:g} s from {len(late)} of {len(refs)} ranks (indices {late[:8]})"
            raise CallFailed(late[0] if late else 0, None, detail, timed_out=True) from None
        except ray.exceptions.RayError as error:
            raise self._first_failure(refs, error) from None

    def fetch(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        try:
            return list(ray.get(list(refs), timeout=timeout))
        except ray.exceptions.GetTimeoutError as error:
            raise WorkerTimeoutError(f"{len(refs)} kept columns did not arrive within {timeout:g} s") from error
        except ray.exceptions.RayError as error:
            text = str(error).partition(" Some common causes")[0].strip()
            raise WorkerError(f"kept columns are lost with the worker that held them: {text}") from error

    def ready(self, refs: Sequence[Any]) -> bool:
        return len(ray.wait(list(refs), num_returns=len(refs), timeout=0)[0]) == len(refs)

    def _first_failure(self, refs: list[Any], error: Exception) -> CallFailed:
        """Which rank failed first: a dead process before any exception, then by the clock."""
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_SETTLE_S)
        done = set(ready)
        found: list[tuple[float, CallFailed]] = []
        for index, ref in enumerate(refs):
            if ref not in done:
                continue
            try:
                ray.get(ref)
            except ray.exceptions.RayError as seen:
                raised = getattr(seen, "cause", seen)
                if isinstance(raised, WorkerRaised):
                    found.append((raised.failure.when, CallFailed(index, raised.failure)))
                else:
                    found.append((0.0, self._lost(index, seen)))
        if not found:
            return self._lost(0, error)
        return min(found, key=lambda entry: entry[0])[1]

    def _lost(self, index: int, error: Exception) -> CallFailed:
        """A call of which the worker gave no account: its process died, or Ray could not carry the result."""
        if isinstance(error, ray.exceptions.RayTaskError):
            cause = error.cause
            detail = f"{type(cause).__name__}: {cause}\n{_COLOURS.sub('', str(error)).strip()}"
            return CallFailed(index, None, detail, cause_type=type(cause).__name__)
        # Ray's own list of possible causes is long, and the same each time.
        text = str(error).partition(" Some common causes")[0].strip()
        if not isinstance(error, ray.exceptions.ActorDiedError | ray.exceptions.ActorUnavailableError):
            return CallFailed(index, None, text, cause_type=type(error).__name__)
        tail = self._last_output(getattr(error, "actor_id", None))
        output = "\n  last output of the worker:" + "".join(f"\n    {line}" for line in tail) if tail else ""
        detail = f"the worker's process died, perhaps for want of memory or in a crash of native code. {text}{output}"
        return CallFailed(index, None, detail)

    def _last_output(self, actor_id: str | None) -> list[str]:
        """The end of a dead worker's output, where this machine has it."""
        node = getattr(ray._private.worker, "_global_node", None)
        pids = [
            host.info.pid
            for running in self._running
            for host in running.hosts
            if host.handle._actor_id.hex() == actor_id
        ]
        return read_last_lines(Path(node.get_logs_dir_path()), pids[0]) if node is not None and pids else []

    def install_parts(self, hosts: Sequence[Host], parts: bytes | None, timeout: float) -> None:
        self.gather([host.handle.install.remote(parts) for host in hosts], timeout)

    def cancel(self, refs: Sequence[Any]) -> None:
        for ref in refs:
            ray.cancel(ref, force=False, recursive=False)

    def stop(self, hosts: Sequence[Host]) -> None:
        if not ray.is_initialized():
            return
        closing = [host.handle.close.remote() for host in hosts]
        closed, _ = ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_GRACE_S)
        for ref in closed:
            try:
                ray.get(ref)
            except ray.exceptions.RayTaskError as error:
                logger.warning("close() of a worker raised: %s", getattr(error, "cause", error))
            except ray.exceptions.RayError as error:
                logger.debug("a worker was gone before it was closed: %s", error)
        for host in hosts:
            ray.kill(host.handle)
        gone = {id(host) for host in hosts}
        for running in self._running:
            running.hosts = [host for host in running.hosts if id(host) not in gone]
        self._running = [running for running in self._running if running.hosts]
        self._release_unused()

    def shutdown(self) -> None:
        if ray.is_initialized():
            self.stop([host for running in self._running for host in running.hosts])
            if self._initialized_ray:
                # Ends a Ray of our own; of a cluster that was joined only this process's connection.
                ray.shutdown()
        self._pools.clear()
        self._running.clear()
        self._initialized_ray = False


class RayWorkerGroup(WorkerGroup):
    """A :class:`WorkerGroup` on Ray; joins or starts Ray by itself where no runtime is given.

    Args:
        resource_pool: how many processes, where.
        ray_cls_with_init: one class, or role → class.
    """

    def __init__(
        self,
        resource_pool: ResourcePool,
        ray_cls_with_init: ClassWithInitArgs[Any] | Mapping[str, ClassWithInitArgs[Any]],
        *,
        runtime: Runtime | None = None,
        **options: Any,
    ) -> None:
        super().__init__(resource_pool, ray_cls_with_init, runtime=runtime or RayRuntime.shared(), **options)
