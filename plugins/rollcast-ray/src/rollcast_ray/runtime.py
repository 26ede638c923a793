"""Runtime ``ray``, which starts one Ray actor per rank.

By default, it starts an embedded Ray on this machine and stops it at the end. If an address is given (or
``RAY_ADDRESS`` is set), it joins that cluster and leaves it running.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, get_args

import ray

from rollcast import WorkerGroup, WorkerHost
from rollcast.contracts.dispatch import RankCall
from rollcast.contracts.pools import NodeResources, ResourcePool
from rollcast.contracts.runtime import (
    Attached,
    CallFailed,
    Cancelled,
    Host,
    LaunchSpec,
    Outcome,
    Runtime,
    RuntimeCapabilities,
    RuntimeConfig,
    WorkerRaised,
)
from rollcast.contracts.worker import ClassWithInitArgs
from rollcast.errors import DispatchError, ResourceError, RollcastError, WorkerError, WorkerTimeoutError
from rollcast_ray.actors import (
    BESIDE,
    build_hosts,
    detached_places,
    find_actors,
    keep_record,
    kill_actors,
    meet_actors,
    pack_roles,
    read_record,
    start_actors,
    started_runtimes,
)
from rollcast_ray.control import ask_all
from rollcast_ray.driver import run_driver
from rollcast_ray.embedded import EmbeddedRay, drop_own_token
from rollcast_ray.liveness import LivenessWatch
from rollcast_ray.logs import read_worker_log
from rollcast_ray.machine import keeping_sigterm, require_reachable, require_same_cluster
from rollcast_ray.pools import Placements, Slot, check_room, read_nodes
from rollcast_ray.ray_internals import actor_id, task_id
from rollcast_ray.schemas import RayRuntimeConfig
from rollcast_ray.session import current_session
from rollcast_ray.store import FULL, explain_full, get_rows, get_values

if TYPE_CHECKING:
    from rollcast.protocol import Cut

__all__ = ["RayRuntime", "RayWorkerGroup"]

logger = logging.getLogger(__name__)

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
#: Time limit in seconds for a process to answer an interrupt before it counts as unreachable.
_INTERRUPT_S = 15.0
#: Grace period in seconds in which the other ranks of a failed call can end by themselves.
_SETTLE_S = 2.0
#: Time in seconds between two checks of the embedded Ray while waiting for a result.
_SLICE_S = 1.0


@dataclass
class _Running:
    """A running group.

    Attributes:
        name: name of the group.
        slots: places of the group's processes; empty if the places belong to another process.
        hosts: processes of the group; empty while the group is ``starting``.
        detached: True if the group outlives this process.
        beside: role and name of the methods that run concurrently with other calls.
    """

    name: str
    slots: list[Slot]
    hosts: list[Host]
    detached: bool
    beside: frozenset[tuple[str, str]] = frozenset()
    starting: bool = False


@contextmanager
def _explaining_loss(count: int, timeout: float | None) -> Iterator[None]:
    """Convert Ray's errors from fetching ``count`` stored objects to worker errors."""
    try:
        yield
    except ray.exceptions.GetTimeoutError as error:
        raise WorkerTimeoutError(f"{count} kept columns did not arrive within {timeout:g} s") from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RollcastError):
            raise error.cause from None
        raise WorkerError(f"kept columns cannot be read: {error.cause}") from error
    except ray.exceptions.RayError as error:
        text = str(error).partition(" Some common causes")[0].strip()
        raise WorkerError(f"kept columns are lost with the worker that held them: {text}") from error


class RayRuntime(Runtime):
    """A runtime that runs worker groups in Ray actors.

    Args:
        address: address of a cluster to join; by default ``RAY_ADDRESS`` if set, else an embedded Ray is started.
        num_cpus: logical CPUs of an embedded Ray, which may exceed the number of cores; by default all cores.
        object_store_memory: size of an embedded Ray's object store in bytes; by default 30 % of this machine's
            memory, limited by its shared memory.
        log_to_driver: True to print the workers' output on the driver.
        runtime_env: runtime environment of all processes; the group's own takes precedence.
        stop_grace_s: grace period in seconds in which workers can close before they are killed.
        include_dashboard: True to start Ray's dashboard beside an embedded Ray.
    """

    config_schema: ClassVar[type[RuntimeConfig]] = RayRuntimeConfig
    capabilities = RuntimeCapabilities(runtime_env=True, detached=True, chained_calls=True, parallel_launch=True)
    _shared: RayRuntime | None = None

    def __init__(
        self,
        address: str | None = None,
        num_cpus: int | None = None,
        object_store_memory: int | None = None,
        log_to_driver: bool = False,
        runtime_env: Mapping[str, Any] | None = None,
        stop_grace_s: float = 5.0,
        include_dashboard: bool = False,
    ) -> None:
        self._include_dashboard = include_dashboard
        self._stop_grace_s = stop_grace_s
        self._address = address or os.environ.get("RAY_ADDRESS") or None
        self._num_cpus = num_cpus
        self._object_store_memory = object_store_memory
        self._log_to_driver = log_to_driver
        self._runtime_env = dict(runtime_env or {})
        self._initialized_ray = False
        self._embedded = EmbeddedRay()
        self._session: str | None = None
        self._pools = Placements()
        #: Held while a pool is placed, possibly for minutes, because several threads may start groups at a time.
        self._placing = threading.Lock()
        #: Held while ``_running`` changes or determines which pools to release. Never held while waiting for resources,
        #: so that another thread can end the group that holds them.
        self._books = threading.RLock()
        self._running: list[_Running] = []
        self._liveness = LivenessWatch(self._how_it_died)
        #: The latest references, kept because Ray logs the errors of references that are garbage-collected.
        self._resuming: list[Any] = []
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
            stop_grace_s=config.stop_grace_s,
            include_dashboard=config.include_dashboard,
        )

    @classmethod
    def shared(cls) -> RayRuntime:
        """Return the runtime of groups that are built without one; it joins a Ray that already runs here."""
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker that receives a group calls it through the shared runtime of its own process.
        return RayRuntime.shared, ()

    def start(self) -> None:
        """Start or join Ray; do nothing if this process is already connected."""
        started_runtimes.add(self)
        self._leave_ended_session()
        if ray.is_initialized():
            if self._address is not None:
                require_same_cluster(self._address, ray.get_runtime_context().gcs_address)
        else:
            with keeping_sigterm():
                if self._address:
                    self._join(self._address)
                else:
                    self._embedded.start(
                        self._num_cpus, self._object_store_memory, self._log_to_driver, self._include_dashboard
                    )
            self._initialized_ray = True
        self._session = current_session()

    def _leave_ended_session(self) -> None:
        """Drop the state of a Ray session that ``ray.shutdown`` has ended, even if ``ray.init`` started a new one."""
        if self._session is None or self._session == current_session():
            return
        self._liveness.stop()
        ended = [host for running in self._running for host in running.hosts]
        self._embedded.forget()
        self._liveness.bury(ended, "the Ray that the worker ran on was shut down (ray.shutdown)")
        self._pools.forget()
        self._running.clear()
        self._senders.clear()
        self._resuming.clear()
        self._initialized_ray = False
        self._session = None

    def _join(self, address: str) -> None:
        try:
            require_reachable(address)  # Ray itself would retry for minutes
            drop_own_token()
            ray.init(address=address, log_to_driver=self._log_to_driver, logging_level=logging.WARNING)
        except (OSError, ray.exceptions.RayError) as error:
            raise ResourceError(
                f"cannot join Ray at {address} (from runtime.address or RAY_ADDRESS): {error}. "
                "Start it with `ray start --head`, or unset the address for a Ray of this run's own"
            ) from error
        logger.info("joined Ray at %s", address)

    def nodes(self) -> list[NodeResources]:
        self.start()
        return read_nodes()

    def launch(self, pool: ResourcePool, spec: LaunchSpec, timeout: float) -> list[Host]:
        return self._launch(pool, spec, timeout, time.monotonic() + timeout)

    def _launch(self, pool: ResourcePool, spec: LaunchSpec, timeout: float, deadline: float) -> list[Host]:
        """Start a group before ``deadline``, a time of the monotonic clock; errors name the whole ``timeout``."""
        self.start()
        if spec.detached and self._initialized_ray and self._address is None:
            logger.warning("the detached group %s ends with this process, whose Ray it runs on", spec.name)
        spec = self._with_own_environment(spec)
        blob = pack_roles(spec)
        placed = self._place(pool, spec, timeout, deadline)
        handles: list[Any] = []
        try:
            handles = start_actors(pool, placed.slots, spec)
            get = self._getter(deadline)
            hosts = build_hosts(handles, placed.slots, spec, blob, get)
            if spec.detached:
                keep_record(hosts, placed.slots, spec, self._pools.owns(placed.slots), get)
        except BaseException:
            kill_actors(handles)
            with self._books:
                self._running = [running for running in self._running if running is not placed]
                self._release_unused()
            raise
        with self._books:
            placed.hosts, placed.starting = hosts, False
        self._liveness.watch(placed.name, hosts)
        return hosts

    def _place(self, pool: ResourcePool, spec: LaunchSpec, timeout: float, deadline: float) -> _Running:
        """Reserve the places of a group and register it as starting."""
        beside = WorkerHost.methods_beside({role: wrapped.cls for role, wrapped in spec.roles.items()})
        with self._placing, self._reserved(pool):
            slots = self._pools.slots(pool, spec.detached, timeout, deadline)
            with self._books:
                check_room(pool, slots, [(running.name, running.slots) for running in self._running])
                placed = _Running(spec.name, slots, [], spec.detached, beside, starting=True)
                self._running.append(placed)
        return placed

    @contextmanager
    def _reserved(self, pool: ResourcePool) -> Iterator[None]:
        """Keep the pool's places reserved inside the block, even without a group; after an error, release them."""
        self._pools.pin(pool)
        failed = True
        try:
            yield
            failed = False
        finally:
            with self._books:
                self._pools.unpin(pool)
                if failed:
                    self._release_unused()

    def _with_own_environment(self, spec: LaunchSpec) -> LaunchSpec:
        """Merge this runtime's environment into the group's specification; the group's own takes precedence."""
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
        self._now_runs(
            _Running(name, list(record.slots), hosts, True, WorkerHost.methods_beside(known)), record.owns_slots
        )
        return Attached(known, hosts)

    def attach_actors(
        self, actors: Sequence[Any], roles: Mapping[str, type], timeout: float = 60.0, namespace: str | None = None
    ) -> Attached:
        """Attach to a group in actors that another process has started.

        The group keeps its places. It ends with the process that started it, or when it is shut down here.

        Args:
            actors: handles, or names in ``namespace``, of all ranks in any order.
            roles: role → class with which the group was built.
            timeout: time in seconds within which every actor has to answer.
            namespace: Ray namespace of the names; None for that of this process.

        Raises:
            ResourceError: they are not all ranks of one group.
            CallFailed: an actor does not answer.
        """
        self.start()
        hosts = meet_actors(actors, namespace, self._getter(time.monotonic() + timeout))
        self._now_runs(_Running(hosts[0].context.group, [], hosts, True, WorkerHost.methods_beside(roles)))
        return Attached(dict(roles), hosts)

    def end_detached(self, name: str, timeout: float = 60.0) -> None:
        """End a detached group that cannot be attached to because it has lost a rank.

        Raises:
            ResourceError: there is no such group.
        """
        self.start()
        record = read_record(name, self._getter(time.monotonic() + timeout))
        kill_actors(find_actors(name))
        with self._books:
            self._pools.adopt(record.slots if record.owns_slots else ())
            self._release_unused()

    def _now_runs(self, running: _Running, adopt: bool = False) -> None:
        """Start watching a group that was attached to; take over its places if ``adopt``."""
        with self._books:
            self._pools.adopt(running.slots if adopt else ())
            self._running.append(running)
        self._liveness.watch(running.name, running.hosts)

    def _release_unused(self) -> None:
        """Release the pools on which no group runs."""
        with self._books:
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
            # The task's name carries role and method: unlike an argument it costs nothing, and Ray's tools show it.
            beside = {"concurrency_group": BESIDE} if (role, method) in self._beside(host) else {}
            submit = getattr(host.handle, outcome).options(name=f"{role}.{method}", **beside).remote
            self._senders[key] = (host, submit)
        return self._senders[key][1]

    def _beside(self, host: Host) -> frozenset[tuple[str, str]]:
        """Return role and name of the methods that run concurrently with other calls in the host's process."""
        groups = [running.beside for running in self._running if any(known is host for known in running.hosts)]
        return groups[0] if groups else frozenset()

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
            return self._wait_for(refs, timeout)
        except ray.exceptions.GetTimeoutError:
            waiting = set(ray.wait(refs, num_returns=len(refs), timeout=0)[1])
            late = [i for i, ref in enumerate(refs) if ref in waiting]
            detail = f"no answer within {timeout:g} s from {len(late)} of {len(refs)} ranks (indices {late[:8]})"
            raise CallFailed(late[0] if late else 0, None, detail, timed_out=True, late=late) from None
        except ray.exceptions.RayError as error:
            failed, ended = self._first_failure(refs, error)
            failed.late = tuple(i for i, ref in enumerate(refs) if ref not in ended)
            raise failed from None

    def _wait_for(self, refs: list[Any], timeout: float | None) -> list[Any]:
        """Return the results, waiting in short slices, because Ray's client notices a dead Ray only after a minute.

        Raises:
            ResourceError: a vital process of the embedded Ray has ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._embedded.require_whole()
            left = _SLICE_S if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                return list(ray.get(refs, timeout=min(left, _SLICE_S)))
            except ray.exceptions.GetTimeoutError:
                if left <= _SLICE_S and deadline is not None:
                    raise
            except ray.exceptions.RayError:
                self._embedded.require_whole()
                raise

    def fetch(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        with _explaining_loss(len(refs), timeout):
            return get_values(refs, timeout, self._wait_for)

    def fetch_rows(self, cuts: Sequence[Cut], timeout: float | None) -> list[Any]:
        with _explaining_loss(len(cuts), timeout):
            return get_rows(cuts, timeout, self._wait_for)

    def wait_any(self, refs: Sequence[Any], timeout: float | None) -> list[int]:
        refs = list(refs)
        ready = set(ray.wait(refs, num_returns=1, timeout=timeout)[0])
        return [index for index, ref in enumerate(refs) if ref in ready]

    def ready(self, refs: Sequence[Any]) -> bool:
        return len(ray.wait(list(refs), num_returns=len(refs), timeout=0)[0]) == len(refs)

    def _first_failure(self, refs: list[Any], error: Exception) -> tuple[CallFailed, set[Any]]:
        """Return the first failure (a dead process before exceptions, then by time), and the references that ended."""
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_SETTLE_S)
        done = set(ready)
        failures: list[tuple[float, CallFailed]] = []
        for index, ref in enumerate(refs):
            if ref not in done:
                continue
            try:
                ray.get(ref)
            except ray.exceptions.RayError as seen:
                raised = getattr(seen, "cause", seen)
                if isinstance(raised, WorkerRaised):
                    failures.append((raised.failure.when, CallFailed(index, raised.failure)))
                else:
                    failures.append((0.0, self._lost(index, seen)))
        if not failures:
            return self._lost(0, error), done
        return min(failures, key=lambda entry: entry[0])[1], done

    def _lost(self, index: int, error: Exception) -> CallFailed:
        """Build the failure of a call whose worker did not report one."""
        cause = getattr(error, "cause", error)
        if isinstance(cause, FULL):
            return CallFailed(index, None, explain_full("the call's result"), cause_type=type(cause).__name__)
        if isinstance(error, ray.exceptions.RayTaskError):
            detail = f"{type(cause).__name__}: {cause}\n{_COLOURS.sub('', str(error)).strip()}"
            return CallFailed(index, None, detail, cause_type=type(cause).__name__)
        # Drop Ray's list of possible causes, which is long and always the same.
        text = str(error).partition(" Some common causes")[0].strip()
        if not isinstance(error, ray.exceptions.ActorDiedError | ray.exceptions.ActorUnavailableError):
            return CallFailed(index, None, text, cause_type=type(error).__name__)
        dead = [
            host
            for running in self._running
            for host in running.hosts
            if actor_id(host.handle) == getattr(error, "actor_id", None)
        ]
        detail = self._how_it_died(dead[0] if dead else None, error)
        if dead and isinstance(error, ray.exceptions.ActorDiedError):
            self._liveness.note(dead[0], detail)
        return CallFailed(index, None, detail)

    def _how_it_died(self, host: Host | None, error: Exception) -> str:
        """Return Ray's message and the last output of the process, read on its node."""
        text = str(error).partition(" Some common causes")[0].strip()
        tail = read_worker_log(host.info) if host is not None else []
        output = "\n  last output of the worker:" + "".join(f"\n    {line}" for line in tail) if tail else ""
        return f"the worker's process died, possibly out of memory, or a crash in native code. {text}{output}"

    def lost(self, hosts: Sequence[Host]) -> dict[int, str]:
        self._leave_ended_session()
        return self._liveness.lost(hosts)

    def stacks(self, hosts: Sequence[Host]) -> list[str]:
        answers = ask_all([(host.info.control, {"ask": "stack"}) for host in hosts])
        return ["" if isinstance(answer, OSError) else answer for answer in answers]

    def install_plugins(self, hosts: Sequence[Host], snapshot: bytes | None, timeout: float) -> None:
        self.gather([host.handle.install.remote(snapshot) for host in hosts], timeout)

    def cancel(self, refs: Sequence[Any], hosts: Sequence[Host]) -> list[Cancelled]:
        refs = list(refs)
        running = set(ray.wait(refs, num_returns=len(refs), timeout=0)[1]) if refs else set()
        for ref in running:
            ray.cancel(ref, force=False, recursive=False)  # does not affect a call that has started
        ends: dict[Any, Cancelled] = dict.fromkeys(refs, "ended")
        asked = [(ref, host) for ref, host in zip(refs, hosts, strict=True) if ref in running]
        questions = [(host.info.control, {"ask": "interrupt", "token": task_id(ref)}) for ref, host in asked]
        answers = ask_all(questions, _INTERRUPT_S)
        for (ref, host), answer in zip(asked, answers, strict=True):
            if isinstance(answer, OSError):
                logger.debug("process %d on node %s cannot be interrupted: %s", host.info.pid, host.info.node, answer)
                ends[ref] = "unreachable"
            elif answer in get_args(Cancelled):
                ends[ref] = cast("Cancelled", answer)
        # Ranks on which these calls failed refuse calls sent in the meantime, but accept later ones.
        self._resuming = [host.handle.resume.remote() for host in hosts]
        return [ends[ref] for ref in refs]

    def restart(self, hosts: Sequence[Host], pool: ResourcePool, spec: LaunchSpec, timeout: float) -> list[Host]:
        self.start()
        # Keep the places reserved in between, because another driver could take them.
        with self._reserved(pool):
            self._end(self._known(hosts))
            deadline = time.monotonic() + timeout
            with self._placing:
                self._pools.replace_lost(pool, timeout, deadline)
            return self._launch(pool, spec, timeout, deadline)

    def run_driver(self, function: Callable[..., Any], /, *args: Any) -> Any:
        self._log_to_driver = True  # otherwise the output of the run would be lost
        self.start()
        return run_driver(function, *args)

    def stop(self, hosts: Sequence[Host]) -> None:
        self._leave_ended_session()
        self._end(self._known(hosts))
        if ray.is_initialized():
            self._release_unused()

    def _known(self, hosts: Sequence[Host]) -> list[Host]:
        """Return the hosts of the current Ray session; those of an ended session no longer exist."""
        known = {id(host) for running in self._running for host in running.hosts}
        return [host for host in hosts if id(host) in known]

    def _end(self, hosts: Sequence[Host]) -> None:
        """End processes; their places stay reserved."""
        if not ray.is_initialized() or not hosts:
            return
        self._liveness.forget(hosts)
        self._senders.clear()
        closing = [host.handle.close.remote() for host in hosts]
        closed, _ = ray.wait(closing, num_returns=len(closing), timeout=self._stop_grace_s)
        for ref in closed:
            try:
                ray.get(ref)
            except ray.exceptions.RayTaskError as error:
                logger.warning("close() of a worker raised: %s", getattr(error, "cause", error))
            except ray.exceptions.RayError as error:
                logger.debug("a worker was gone before it was closed: %s", error)
        kill_actors([host.handle for host in hosts])
        gone = {id(host) for host in hosts}
        with self._books:
            for running in self._running:
                running.hosts = [host for host in running.hosts if id(host) not in gone]
            self._running = [running for running in self._running if running.hosts or running.starting]

    def shutdown(self) -> None:
        """End all processes except detached groups, which keep running if Ray does."""
        self._leave_ended_session()
        self._liveness.stop()
        if ray.is_initialized():
            if self._embedded.running:
                self._embedded.end(self._stop_all)
            else:
                self._stop_all()
                if self._initialized_ray:
                    ray.shutdown()  # ends only this process's connection
        self._pools.forget()
        self._running.clear()
        self._initialized_ray = False
        self._session = None

    def _stop_all(self) -> None:
        self.stop([host for running in self._running if not running.detached for host in running.hosts])


class RayWorkerGroup(WorkerGroup):
    """A :class:`WorkerGroup` on Ray, which joins or starts Ray if no runtime is given.

    Args:
        resource_pool: pool of the group's processes.
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

    @classmethod
    def from_actors(
        cls,
        actors: Sequence[Any],
        roles: type | Mapping[str, type],
        *,
        runtime: RayRuntime | None = None,
        namespace: str | None = None,
        timeout: float = 3600.0,
        attach_timeout: float = 60.0,
    ) -> Self:
        """Attach to actors of another process's group, by their handles or names.

        Args:
            actors: ``[worker.handle for worker in group.workers]`` of the other process, or their names.
            roles: role → class with which the group was built; one class for a group without roles.
            runtime: runtime connected to the same Ray; by default that of this process.
            namespace: Ray namespace of the names; None for that of this process.
            timeout: deadline of each blocking call, in seconds.
            attach_timeout: time in seconds within which every actor has to answer.

        Raises:
            ResourceError: they are not all ranks of one group.
        """
        runtime = runtime or RayRuntime.shared()
        by_role = {"worker": roles} if isinstance(roles, type) else roles
        attached = runtime.attach_actors(actors, by_role, attach_timeout, namespace)
        return cls.from_attached(attached, attached.hosts[0].context.group, runtime=runtime, timeout=timeout)
