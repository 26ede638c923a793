"""Runtime ``ray``: a Ray actor for each rank.

By default it starts a Ray of its own on this machine and stops it at the end; where an address is
given (or ``RAY_ADDRESS`` is set) it joins that cluster and leaves it running.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import ray

from rollcast import WorkerGroup
from rollcast.contracts.dispatch import RankCall
from rollcast.contracts.pools import NodeResources, ResourcePool
from rollcast.contracts.runtime import (
    Attached,
    CallFailed,
    Host,
    LaunchSpec,
    Outcome,
    Runtime,
    RuntimeCapabilities,
    RuntimeConfig,
    WorkerRaised,
)
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.errors import DispatchError, ResourceError, WorkerError, WorkerTimeoutError
from rollcast_ray.actors import (
    build_hosts,
    detached_places,
    find_actors,
    keep_record,
    kill_actors,
    pack_roles,
    read_record,
    start_actors,
    started_runtimes,
)
from rollcast_ray.control import ask_all
from rollcast_ray.liveness import LivenessWatch
from rollcast_ray.machine import (
    check_temp_dir,
    default_object_store,
    keeping_sigterm,
    read_last_lines,
    require_reachable,
)
from rollcast_ray.pools import Placements, Slot, check_room, read_nodes
from rollcast_ray.schemas import RayRuntimeConfig
from rollcast_ray.store import FULL, explain_full

__all__ = ["RayRuntime", "RayWorkerGroup"]

logger = logging.getLogger(__name__)

#: What an embedded Ray needs to behave on a small or busy machine: workers at nice 15 starve in
#: collectives, and usage statistics want a network. What is freed is given back at once, not once a
#: second: the next batch finds memory that is mapped already, which is ten times as fast as new pages.
_EMBEDDED_ENV = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_free_objects_batch_size": "1",
}
#: Warns at each start that a local Ray asks for its token, which is as it should be.
_auth_logger = logging.getLogger("ray._private.authentication.authentication_token_setup")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CLOSE_GRACE_S = 5.0
_SETTLE_S = 0.5


@dataclass
class _Running:
    """A running group: its places and its processes."""

    name: str
    slots: list[Slot]
    hosts: list[Host]
    detached: bool


class RayRuntime(Runtime):
    """Groups of Ray actors.

    Args:
        address: of a cluster to join; ``RAY_ADDRESS`` if that is set, else a Ray of our own.
        num_cpus: logical CPUs of an embedded Ray; all cores by default. May exceed the cores.
        object_store_memory: bytes of an embedded Ray's object store; by default 30 % of the
            memory, at most 4 GiB.
        log_to_driver: show what workers print.
        runtime_env: runtime environment of all processes, under that of each group.
    """

    config_schema: ClassVar[type[RuntimeConfig]] = RayRuntimeConfig
    capabilities = RuntimeCapabilities(runtime_env=True, detached=True)
    _shared: RayRuntime | None = None

    def __init__(
        self,
        address: str | None = None,
        num_cpus: int | None = None,
        object_store_memory: int | None = None,
        log_to_driver: bool = False,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        self._address = address or os.environ.get("RAY_ADDRESS") or None
        self._num_cpus = num_cpus
        self._object_store_memory = object_store_memory
        self._log_to_driver = log_to_driver
        self._runtime_env = dict(runtime_env or {})
        self._initialized_ray = False
        self._pools = Placements()
        self._running: list[_Running] = []
        self._liveness = LivenessWatch(self._how_it_died)
        #: By id of host (which is kept, so that its id stays its own), role, method and outcome.
        self._senders: dict[tuple[int, str, str, Outcome], tuple[Host, Callable[..., Any]]] = {}

    @classmethod
    def from_config(cls, config: RayRuntimeConfig, *, processes: int, run_dir: Path | None = None) -> Self:  # noqa: ARG003
        return cls(
            address=config.address,
            num_cpus=config.num_cpus or max(os.cpu_count() or 1, processes),
            object_store_memory=config.object_store_memory,
            log_to_driver=config.log_to_driver,
            runtime_env=config.runtime_env,
        )

    @classmethod
    def shared(cls) -> RayRuntime:
        """Return the runtime of groups that are built without one; it joins a Ray that already runs here."""
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    def __reduce__(self) -> tuple[Any, ...]:
        # A group that is given to a worker is called from there through the runtime of that process.
        return RayRuntime.shared, ()

    def start(self) -> None:
        """Start or join Ray; nothing if this process already has one."""
        started_runtimes.add(self)
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
                address="local",  # else Ray would join whatever somebody has started on this machine
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
        return read_nodes()

    def launch(self, pool: ResourcePool, spec: LaunchSpec, timeout: float) -> list[Host]:
        self.start()
        if spec.detached and self._initialized_ray and self._address is None:
            logger.warning("the detached group %s ends with this process, whose Ray it runs on", spec.name)
        deadline = time.monotonic() + timeout
        spec = self._with_own_environment(spec)
        blob = pack_roles(spec)
        try:
            slots = self._pools.slots(pool, spec.detached, timeout)
            check_room(pool, slots, [(running.name, running.slots) for running in self._running])
            handles = start_actors(pool, slots, spec)
            try:
                get = self._getter(deadline)
                hosts = build_hosts(handles, slots, spec, blob, get)
                if spec.detached:
                    keep_record(hosts, slots, spec, self._pools.owns(slots), get)
            except BaseException:
                kill_actors(handles)
                raise
        except BaseException:
            self._release_unused()
            raise
        self._now_runs(_Running(spec.name, slots, hosts, spec.detached))
        return hosts

    def _with_own_environment(self, spec: LaunchSpec) -> LaunchSpec:
        """Return the group's specification with this runtime's environment under the group's own."""
        env_vars = {**self._runtime_env.get("env_vars", {}), **spec.runtime_env.get("env_vars", {})}
        merged = {**self._runtime_env, **spec.runtime_env, **({"env_vars": env_vars} if env_vars else {})}
        return replace(spec, runtime_env=merged)

    def attach(self, name: str, timeout: float, roles: Mapping[str, type] | None = None) -> Attached:
        self.start()
        get = self._getter(time.monotonic() + timeout)
        record = read_record(name, get)
        known = dict(roles) if roles is not None else record.load_roles()
        handles = find_actors(name, len(record.contexts))
        infos = get([handle.hello.remote() for handle in handles])
        hosts = [Host(*entry) for entry in zip(handles, infos, record.contexts, strict=True)]
        self._pools.adopt(record.slots if record.owns_slots else ())
        self._now_runs(_Running(name, list(record.slots), hosts, detached=True))
        return Attached(known, hosts)

    def end_detached(self, name: str, timeout: float = 60.0) -> None:
        """End a detached group that cannot be attached to, because it has lost a rank.

        Raises:
            ResourceError: there is no such group.
        """
        self.start()
        record = read_record(name, self._getter(time.monotonic() + timeout))
        kill_actors(find_actors(name))
        self._pools.adopt(record.slots if record.owns_slots else ())
        self._release_unused()

    def _now_runs(self, running: _Running) -> None:
        self._running.append(running)
        self._liveness.watch(running.name, running.hosts)

    def _release_unused(self) -> None:
        """Release the pools on which no group runs any more."""
        used = {slot.key[0] for running in self._running for slot in running.slots}
        self._pools.release_all_but(used | (detached_places() if self._pools.has_detached() else set()))

    def _getter(self, deadline: float) -> Callable[[Sequence[Any]], list[Any]]:
        return lambda refs: self.gather(refs, max(deadline - time.monotonic(), 0.001))

    def call(self, host: Host, role: str, method: str, call: RankCall, outcome: Outcome = "send") -> Any:
        try:
            return self._sender(host, role, method, outcome)(*call.args, **call.kwargs)
        except TypeError as error:
            raise DispatchError(f"an argument of {role}.{method} cannot be sent to a worker: {error}") from error
        except FULL as error:
            largest = max([*call.args, *call.kwargs.values()], key=lambda value: getattr(value, "nbytes", 0) or 0)
            raise ResourceError(explain_full(f"an argument of {role}.{method}", largest)) from error

    def _sender(self, host: Host, role: str, method: str, outcome: Outcome) -> Callable[..., Any]:
        key = (id(host), role, method, outcome)
        if key not in self._senders:
            # The task's name says what to call: it travels for nothing, unlike an argument, and Ray's tools show it.
            made = getattr(host.handle, outcome).options(name=f"{role}.{method}").remote
            self._senders[key] = (host, made)
        return self._senders[key][1]

    def put(self, value: Any) -> Any:
        try:
            return ray.put(value)
        except TypeError as error:
            raise DispatchError(f"a {type(value).__name__} cannot be sent to workers: {error}") from error
        except FULL as error:
            raise ResourceError(explain_full(f"a {type(value).__name__} for several ranks", value)) from error

    def gather(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        refs = list(refs)
        try:
            return list(ray.get(refs, timeout=timeout))
        except ray.exceptions.GetTimeoutError:
            _, waiting = ray.wait(refs, num_returns=len(refs), timeout=0)
            late = [i for i, ref in enumerate(refs) if ref in set(waiting)]
            detail = f"no answer within {timeout:g} s from {len(late)} of {len(refs)} ranks (indices {late[:8]})"
            raise CallFailed(late[0] if late else 0, None, detail, timed_out=True, late=late) from None
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
        """Return the first failure: a dead process before any exception, then by the clock."""
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
        """Return the failure of a call that the worker did not report."""
        cause = getattr(error, "cause", error)
        if isinstance(cause, FULL):
            return CallFailed(index, None, explain_full("the call's result"), cause_type=type(cause).__name__)
        if isinstance(error, ray.exceptions.RayTaskError):
            detail = f"{type(cause).__name__}: {cause}\n{_COLOURS.sub('', str(error)).strip()}"
            return CallFailed(index, None, detail, cause_type=type(cause).__name__)
        # Ray's own list of possible causes is long, and the same each time.
        text = str(error).partition(" Some common causes")[0].strip()
        if not isinstance(error, ray.exceptions.ActorDiedError | ray.exceptions.ActorUnavailableError):
            return CallFailed(index, None, text, cause_type=type(error).__name__)
        dead = [
            host
            for running in self._running
            for host in running.hosts
            if host.handle._actor_id.hex() == getattr(error, "actor_id", None)
        ]
        detail = self._how_it_died(dead[0] if dead else None, error)
        if dead and isinstance(error, ray.exceptions.ActorDiedError):
            self._liveness.note(dead[0], detail)
        return CallFailed(index, None, detail)

    def _how_it_died(self, host: Host | None, error: Exception) -> str:
        """Return Ray's message, and the end of the process's output where this machine has it."""
        text = str(error).partition(" Some common causes")[0].strip()
        node = getattr(ray._private.worker, "_global_node", None)
        tail = read_last_lines(Path(node.get_logs_dir_path()), host.info.pid) if node is not None and host else []
        output = "\n  last output of the worker:" + "".join(f"\n    {line}" for line in tail) if tail else ""
        return f"the worker's process died, possibly out of memory, or a crash in native code. {text}{output}"

    def lost(self, hosts: Sequence[Host]) -> dict[int, str]:
        return self._liveness.lost(hosts)

    def stacks(self, hosts: Sequence[Host]) -> list[str]:
        return [text or "" for text in ask_all([(host.info.control, {"ask": "stack"}) for host in hosts])]

    def install_plugins(self, hosts: Sequence[Host], snapshot: bytes | None, timeout: float) -> None:
        self.gather([host.handle.install.remote(snapshot) for host in hosts], timeout)

    def cancel(self, refs: Sequence[Any], hosts: Sequence[Host]) -> None:
        refs = list(refs)
        running = set(ray.wait(refs, num_returns=len(refs), timeout=0)[1]) if refs else set()
        for ref in running:
            ray.cancel(ref, force=False, recursive=False)  # does not touch a call that has started
        wanted = [(ref, host) for ref, host in zip(refs, hosts, strict=True) if ref in running]
        ask_all([(host.info.control, {"ask": "interrupt", "token": ref.task_id().hex()}) for ref, host in wanted])

    def stop(self, hosts: Sequence[Host]) -> None:
        if not ray.is_initialized() or not hosts:
            return
        self._liveness.forget(hosts)
        self._senders.clear()
        closing = [host.handle.close.remote() for host in hosts]
        closed, _ = ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_GRACE_S)
        for ref in closed:
            try:
                ray.get(ref)
            except ray.exceptions.RayTaskError as error:
                logger.warning("close() of a worker raised: %s", getattr(error, "cause", error))
            except ray.exceptions.RayError as error:
                logger.debug("a worker was gone before it was closed: %s", error)
        kill_actors([host.handle for host in hosts])
        gone = {id(host) for host in hosts}
        for running in self._running:
            running.hosts = [host for host in running.hosts if id(host) not in gone]
        self._running = [running for running in self._running if running.hosts]
        self._release_unused()

    def shutdown(self) -> None:
        """End everything but detached groups, which run on where Ray does."""
        self._liveness.stop()
        if ray.is_initialized():
            self.stop([host for running in self._running if not running.detached for host in running.hosts])
            if self._initialized_ray:
                # Ends a Ray of our own; of a cluster that was joined only this process's connection.
                ray.shutdown()
        self._pools.forget()
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

    @classmethod
    def attach(cls, name: str, *, runtime: Runtime | None = None, **options: Any) -> Self:
        """See :meth:`WorkerGroup.attach`."""
        return super().attach(name, runtime=runtime or RayRuntime.shared(), **options)
