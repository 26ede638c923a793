"""Runtime ``ray``: a Ray actor for each rank. The only module of the core that imports Ray.

By default it starts a Ray of its own on this machine and stops it at the end; where an address is
given (or ``RAY_ADDRESS`` is set) it joins that cluster and leaves it running.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollcast.controller.dispatch import RankCall
from rollcast.controller.hosting import HostInfo, WorkerHost, WorkerRaised
from rollcast.controller.resource_pool import NodeResources, ResourcePool, check_resources
from rollcast.controller.runtime import CallFailed, Host, LaunchSpec, Runtime
from rollcast.controller.worker import ClassWithInitArgs, WorkerContext
from rollcast.controller.worker_group import WorkerGroup
from rollcast.errors import ResourceError
from rollcast.plugins.inprocess import install_snapshot, snapshot

__all__ = ["RayResourcePool", "RayRuntime", "RayWorkerGroup"]

logger = logging.getLogger(__name__)

#: What an embedded Ray needs to behave on a small or busy machine: workers at nice 15 starve in
#: collectives, and usage statistics want a network.
_EMBEDDED_ENV = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_MAX_OBJECT_STORE = 4 << 30
_CLOSE_GRACE_S = 5.0
_SETTLE_S = 0.5


class _HostActor:
    """The Ray actor around a :class:`WorkerHost`."""

    def __init__(self) -> None:
        self._host = WorkerHost()

    def hello(self) -> HostInfo:
        return self._host.describe(ray.util.get_node_ip_address())

    def build(self, context: WorkerContext, env: Mapping[str, str], driver_path: list[str], blob: bytes) -> None:
        """Set up this process, then unpickle the classes: the order lets ``env`` reach their imports."""
        os.environ.update({"OMP_NUM_THREADS": str(context.threads), **context.environment(), **env})
        sys.path.extend(entry for entry in driver_path if entry not in sys.path and Path(entry).exists())
        parts, roles = cloudpickle.loads(blob)
        if parts is not None:
            install_snapshot(parts)
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(context.threads)
        self._host.build(context, cloudpickle.loads(roles))

    def install(self, parts: bytes) -> None:
        install_snapshot(parts)

    def call(self, role: str, method: str, keys: tuple[str, ...], *values: Any) -> Any:
        split = len(values) - len(keys)
        return self._host.call(role, method, values[:split], dict(zip(keys, values[split:], strict=True)))

    def close(self) -> None:
        self._host.close()


class RayResourcePool(ResourcePool):
    """A resource pool with Ray placement groups, one a node, made when they are first needed."""

    _groups: list[tuple[int, Any]] | None = None

    def get_placement_groups(self, timeout: float = 300.0) -> list[tuple[int, Any]]:
        """``(processes, placement group)`` for each node, sorted by node address, so that ranks
        stay where they were after a restart.

        Raises:
            ResourceError: not placed before the deadline; says what is asked and what is free.
        """
        if self._groups is None:
            bundle = {"CPU": self.cpus_per_process, **({"GPU": 1.0} if self.use_gpu else {})}
            groups = [
                (count, placement_group([dict(bundle) for _ in range(count)], strategy="STRICT_PACK"))
                for count in self.process_on_nodes
            ]
            deadline = time.monotonic() + timeout
            for _, group in groups:
                if not group.wait(max(deadline - time.monotonic(), 0.001)):
                    for _, made in groups:
                        remove_placement_group(made)
                    free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
                    raise ResourceError(
                        f"pool {self.name!r} ({list(self.process_on_nodes)} processes, each {bundle}) was not placed "
                        f"within {timeout:g} s; free in the cluster: {free}"
                    )
            self._groups = sorted(groups, key=lambda entry: _node_address(entry[1]))
        return self._groups

    def release(self) -> None:
        """Give the placement groups back."""
        for _, group in self._groups or ():
            remove_placement_group(group)
        self._groups = None


def _node_address(group: Any) -> str:
    node_id = placement_group_table(group)["bundles_to_node_id"][0]
    return next((n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node_id), "")


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
        self._owns_ray = False
        self._pools: dict[int, RayResourcePool] = {}
        self._hosts: list[Host] = []

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
        if self._address:
            ray.init(address=self._address, log_to_driver=self._log_to_driver, logging_level=logging.WARNING)
            logger.info("joined Ray at %s", self._address)
            return
        added = {key: value for key, value in _EMBEDDED_ENV.items() if key not in os.environ}
        os.environ.update(added)
        try:
            ray.init(
                num_cpus=self._num_cpus or os.cpu_count(),
                object_store_memory=self._object_store_memory or _default_store(),
                include_dashboard=False,
                log_to_driver=self._log_to_driver,
                logging_level=logging.WARNING,
            )
        finally:
            for key in added:
                os.environ.pop(key, None)
        self._owns_ray = True

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
        if placed._groups is None:
            check_resources([pool], self.nodes())
        blob = cloudpickle.dumps((snapshot(), cloudpickle.dumps(dict(spec.roles))))
        handles = self._start_actors(placed, timeout)
        try:
            infos = self._get(handles, [handle.hello.remote() for handle in handles], deadline)
            hosts = [Host(handle, info) for handle, info in zip(handles, infos, strict=True)]
            contexts = self._contexts(placed, spec, infos)
            built = [
                host.handle.build.remote(context, dict(spec.env), list(sys.path), blob)
                for host, context in zip(hosts, contexts, strict=True)
            ]
            self._get(handles, built, deadline)
        except BaseException:
            for handle in handles:
                ray.kill(handle)
            raise
        self._hosts.extend(hosts)
        return hosts

    def _placed(self, pool: ResourcePool) -> RayResourcePool:
        if isinstance(pool, RayResourcePool):
            return self._pools.setdefault(id(pool), pool)
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

    @staticmethod
    def _contexts(pool: RayResourcePool, spec: LaunchSpec, infos: Sequence[HostInfo]) -> list[WorkerContext]:
        counts = [count for count, _ in pool.get_placement_groups()]
        places = [(local, count) for count in counts for local in range(count)]
        cores = os.cpu_count() or 1
        return [
            WorkerContext(
                rank=rank,
                world_size=len(infos),
                local_rank=local,
                local_world_size=count,
                master_addr=infos[0].node,
                master_port=infos[0].free_port,
                node=info.node,
                group=spec.name,
                threads=spec.threads or max(1, cores // count),
            )
            for rank, ((local, count), info) in enumerate(zip(places, infos, strict=True))
        ]

    def _get(self, handles: Sequence[Any], refs: Sequence[Any], deadline: float) -> list[Any]:
        return self.gather(refs, max(deadline - time.monotonic(), 0.001))

    def call(self, host: Host, role: str, method: str, call: RankCall) -> Any:
        return host.handle.call.remote(role, method, tuple(call.kwargs), *call.args, *call.kwargs.values())

    def put(self, value: Any) -> Any:
        return ray.put(value)

    def gather(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        refs = list(refs)
        try:
            return list(ray.get(refs, timeout=timeout))
        except ray.exceptions.GetTimeoutError:
            ready, waiting = ray.wait(refs, num_returns=len(refs), timeout=0)
            late = [i for i, ref in enumerate(refs) if ref in set(waiting)]
            detail = f"no answer within {timeout:g} s from {len(late)} of {len(refs)} ranks (indices {late[:8]})"
            raise CallFailed(late[0] if late else 0, None, detail, timed_out=True) from None
        except ray.exceptions.RayError as error:
            raise self._first_failure(refs, error) from None

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
                    found.append((0.0, CallFailed(index, None, self._describe(seen))))
        if not found:
            return CallFailed(0, None, self._describe(error))
        return min(found, key=lambda entry: entry[0])[1]

    def _describe(self, error: Exception) -> str:
        text = str(error).strip()
        if isinstance(error, ray.exceptions.ActorDiedError | ray.exceptions.ActorUnavailableError):
            text = "the worker's process died. " + text
            tail = self._last_output(getattr(error, "actor_id", None))
            if tail:
                text += "\n  last output of the worker:" + "".join(f"\n    {line}" for line in tail)
        return text

    def _last_output(self, actor_id: str | None, lines: int = 20) -> list[str]:
        """The end of a dead worker's output files, where this machine has them."""
        node = getattr(ray._private.worker, "_global_node", None)
        if node is None or actor_id is None:
            return []
        for host in self._hosts:
            if host.handle._actor_id.hex() == actor_id:
                files = sorted(Path(node.get_logs_dir_path()).glob(f"worker-*-{host.info.pid}.*"))
                text = [line for file in files for line in file.read_text(errors="replace").splitlines()]
                return [line for line in text if not line.startswith(":")][-lines:]
        return []

    def install_parts(self, hosts: Sequence[Host], parts: bytes, timeout: float) -> None:
        self.gather([host.handle.install.remote(parts) for host in hosts], timeout)

    def cancel(self, refs: Sequence[Any]) -> None:
        for ref in refs:
            ray.cancel(ref, force=False, recursive=False)

    def stop(self, hosts: Sequence[Host]) -> None:
        if not ray.is_initialized():
            return
        closing = [host.handle.close.remote() for host in hosts]
        ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_GRACE_S)
        for host in hosts:
            ray.kill(host.handle)
            self._hosts = [kept for kept in self._hosts if kept is not host]

    def shutdown(self) -> None:
        if ray.is_initialized():
            if self._hosts:
                self.stop(list(self._hosts))
            for pool in self._pools.values():
                pool.release()
            if self._owns_ray:
                ray.shutdown()
        self._pools.clear()
        self._owns_ray = False


def _default_store() -> int:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return min(int(pages * size * 0.3), _MAX_OBJECT_STORE)


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
