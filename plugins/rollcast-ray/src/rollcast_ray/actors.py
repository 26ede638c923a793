"""The actors of a group on Ray: their start, and their lookup by name."""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle
from ray.util import list_named_actors
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollcast import WorkerHost
from rollcast.contracts.device import use_device
from rollcast.contracts.logs import set_log_level
from rollcast.contracts.pools import ResourcePool
from rollcast.contracts.runtime import Cancelled, Host, HostInfo, LaunchSpec, Outcome, WorkerRaised
from rollcast.contracts.worker import WorkerContext
from rollcast.errors import DispatchError, ResourceError, WorkerError
from rollcast_ray.control import ControlServer, Interrupted, Interruptible
from rollcast_ray.devices import local_device_index, visible_devices
from rollcast_ray.embedded import loopback_environment
from rollcast_ray.pools import Slot, remove_groups_made_by
from rollcast_ray.ray_internals import actor_id
from rollcast_ray.store import ObjectStore

if TYPE_CHECKING:
    from rollcast.contracts.runtime import Runtime

__all__ = [
    "BESIDE",
    "GroupRecord",
    "HostActor",
    "build_hosts",
    "detached_places",
    "find_actors",
    "keep_record",
    "kill_actors",
    "meet_actors",
    "pack_roles",
    "read_record",
    "start_actors",
    "started_runtimes",
]

#: Ray namespace of detached groups, the same for all drivers.
NAMESPACE = "rollcast"
#: Ray's concurrency group of coroutine methods.
BESIDE = "beside"
#: Coroutine methods of one process that run at one time.
_BESIDE_AT_ONCE = 32
#: Pattern of an actor's name, which contains its group, its rank and the id of its placement group.
_ACTOR_NAME = re.compile(r"(?P<group>.+)\.(?P<rank>\d+)@[0-9a-f]+", re.DOTALL)
#: Runtimes with processes started by this process, which may be a worker that has its own groups.
started_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()

Get = Callable[[Sequence[Any]], list[Any]]


@dataclass(frozen=True)
class GroupRecord:
    """The record that each actor of a detached group stores, so that another driver can attach to the group.

    Attributes:
        name: name of the group.
        roles: pickle of role → class.
        contexts, slots: contexts and places by rank.
        owns_slots: True if the placement groups end with the group.
    """

    name: str
    roles: bytes
    contexts: tuple[WorkerContext, ...]
    slots: tuple[Slot, ...]
    owns_slots: bool

    def load_roles(self) -> dict[str, type]:
        """Unpickle and return role → class.

        Raises:
            ResourceError: a class cannot be imported here.
        """
        try:
            return dict(pickle.loads(self.roles))
        except (ImportError, AttributeError) as error:
            raise ResourceError(
                f"a class of the detached group {self.name!r} cannot be imported here: {error}. Make its module "
                "importable (PYTHONPATH), or give the classes: attach(name, roles={role: cls})"
            ) from error


class InterruptibleThread(Interruptible):
    """Interruption of the thread that runs calls, if Ray keeps the main thread idle to run coroutines in others.

    Only the main thread receives signals, so an exception is raised in this thread instead. It takes effect at the next
    line of Python, not in the middle of a sleep.
    """

    @contextmanager
    def running(self, token: str) -> Iterator[None]:
        """See :meth:`Interruptible.running`."""
        self._main = threading.current_thread()
        with super().running(token):
            yield

    def interrupt(self, token: str) -> Cancelled:
        """See :meth:`Interruptible.interrupt`."""
        self._given_up.append(token)
        if token != self._token:
            return "ended"
        thread = ctypes.c_ulong(self._main.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Interrupted))
        return "interrupted"


class HostActor:
    """The Ray actor of a rank: a :class:`rollcast.WorkerHost` and the set-up of its process."""

    def __init__(self, beside: bool = False) -> None:
        self.host = WorkerHost(ObjectStore())
        self._main: Interruptible = InterruptibleThread() if beside else Interruptible()
        #: Task → thread of a coroutine that runs concurrently with other calls.
        self._tasks: dict[str, int] = {}
        self._control: ControlServer | None = None
        self._record: bytes | None = None
        #: Description of a failed call that the controller has not handled yet; empty if there is none.
        self._failed = ""
        self._alone = True

    def hello(self) -> HostInfo:
        """Return this process's address and start its control server, which answers while the process is busy."""
        node = ray.util.get_node_ip_address()
        if self._control is None:
            self._control = ControlServer(node, {"interrupt": self._interrupt, "stack": self._main.stack})
        runtime = ray.get_runtime_context()
        reached = self._control.address._replace(worker_id=runtime.get_worker_id(), node_id=runtime.get_node_id())
        return replace(self.host.describe(node), control=reached)

    def build(self, context: WorkerContext, env: Mapping[str, str], driver_path: list[str], blob: bytes) -> None:
        """Set up this process, then unpickle the classes, in this order so that ``env`` is set before their imports.

        Args:
            context: this rank's place in the group.
            env: environment variables, which override those of the context.
            driver_path: the driver's ``sys.path``; its folders that exist on this node are added.
            blob: pickle of the in-process plugins and of the pickled roles.

        Raises:
            WorkerRaised: a constructor raised.
            ResourceError: ``env`` hides the device assigned to the process.
        """
        own = {"OMP_NUM_THREADS": str(context.threads), **loopback_environment(context.node)}
        os.environ.update({**own, **context.environment(), **env})
        sys.path.extend(entry for entry in driver_path if entry not in sys.path and Path(entry).exists())
        set_log_level()
        snapshot, roles = pickle.loads(blob)
        if snapshot is not None:
            self.host.install(snapshot)
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(context.threads)
        self._alone = context.world_size == 1
        context = self._with_device(context)
        use_device(context.device_index)
        self.host.build(context, pickle.loads(roles))

    def _with_device(self, context: WorkerContext) -> WorkerContext:
        """Return the context with the accelerator that Ray assigned to this process."""
        for kind, ids in ray.get_runtime_context().get_accelerator_ids().items():
            index = local_device_index(os.environ, ids, context.local_rank, kind) if ids else None
            if ids:
                visible = visible_devices(os.environ, kind)
                name = "" if index is None else visible[index] if visible else str(index)
                return replace(context, device_index=index, device_id=name)
        return context

    def install(self, snapshot: bytes | None) -> None:
        """Replace the driver's in-process plugins in this process by those of a snapshot."""
        self.host.install(snapshot)

    def send(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the method ``role.method`` given by the task's name, and return its result."""
        return self._run("send", args, kwargs)

    def keep(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run :meth:`send`, but store a returned DataProto here and return its description."""
        return self._run("keep", args, kwargs)

    def drop(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run :meth:`send` and return nothing."""
        return self._run("drop", args, kwargs)

    def _run(self, outcome: Outcome, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        task = ray.get_runtime_context()
        role, _, method = str(task.get_task_name()).rpartition(".")
        if self._failed and not self._alone:
            # The other ranks may still run the failed call, and collectives of this call would pair with theirs.
            raise WorkerError(f"{role}.{method} was not run on this rank, because before it {self._failed}")
        token = str(task.get_task_id())
        if self.host.runs_beside(role, method):
            # The failure of a concurrent call blocks no other call, because only sequential calls run collectives.
            self._tasks[token] = threading.get_ident()
            try:
                return self.host.call(role, method, args, kwargs, outcome)
            finally:
                del self._tasks[token]
        try:
            with self._main.running(token):
                return self.host.call(role, method, args, kwargs, outcome)
        except Interrupted:
            self._failed = f"{role}.{method} was given up by the controller"
            raise WorkerError(self._failed) from None
        except WorkerRaised as raised:
            self._failed = f"{role}.{method} failed: {raised.failure.cause_type}: {raised.failure.message}"
            raise

    def resume(self) -> None:
        """Accept calls again after a failed one; called by the controller once it has handled the failure."""
        self._failed = ""

    def _interrupt(self, token: str) -> Cancelled:
        thread = self._tasks.get(token)
        if thread is None:
            return self._main.interrupt(token)
        return "interrupted" if self.host.cancel_beside(thread) else "ended"

    def ping(self) -> None:
        """Do nothing; an answer shows that the process is alive."""

    def place(self) -> WorkerContext:
        """Return this rank's place in its group."""
        return self.host.context

    def remember(self, record: bytes) -> None:
        """Store the record of a detached group."""
        self._record = record

    def recall(self) -> bytes | None:
        """Return the stored record."""
        return self._record

    def close(self) -> None:
        """Close the workers, then the runtimes that they started.

        Raises:
            WorkerRaised: a ``close()`` raised.
        """
        if self._control is not None:
            self._control.close()
            self._control = None
        try:
            self.host.close()
        finally:
            for runtime in list(started_runtimes):
                runtime.shutdown()


def pack_roles(spec: LaunchSpec) -> bytes:
    """Pickle the in-process plugins and the classes with their arguments, for :meth:`HostActor.build`.

    Raises:
        DispatchError: a class or argument cannot be serialized.
    """
    try:
        return bytes(cloudpickle.dumps((spec.snapshot(), cloudpickle.dumps(dict(spec.roles)))))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise DispatchError(f"the classes or arguments of {spec.name} cannot be sent to workers: {error}") from error


def start_actors(pool: ResourcePool, slots: Sequence[Slot], spec: LaunchSpec) -> list[Any]:
    """Start an actor for each rank.

    Raises:
        ResourceError: a detached group with this name exists.
    """
    options: dict[str, Any] = {"num_cpus": pool.cpus_per_process / pool.max_colocate_count, "num_gpus": 0}
    if pool.use_gpu:
        share = 1.0 / pool.max_colocate_count
        options.update({"num_gpus": share} if pool.accelerator == "GPU" else {"resources": {pool.accelerator: share}})
    runtime_env = dict(spec.runtime_env)
    if runtime_env:
        options["runtime_env"] = runtime_env
    if spec.detached:
        if spec.name in find_detached():
            raise ResourceError(
                f"a detached group {spec.name!r} runs already; attach to it, shut it down, or choose another name"
            )
        options.update(lifetime="detached", namespace=NAMESPACE)
    beside = bool(WorkerHost.methods_beside({role: wrapped.cls for role, wrapped in spec.roles.items()}))
    own_threads: dict[str, Any] = {"concurrency_groups": {BESIDE: _BESIDE_AT_ONCE}}
    # Use one class for all ranks, because Ray exports every actor class to the cluster's key-value store.
    actor = ray.remote(**own_threads)(HostActor) if beside else ray.remote(HostActor)
    handles = []
    for rank, slot in enumerate(slots):
        here = PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.bundle)
        name = {"name": f"{spec.name}.{rank}@{slot.key[0]}"} if spec.detached else {}
        handles.append(actor.options(**options, **name, scheduling_strategy=here).remote(beside))
    return handles


def meet_actors(actors: Sequence[Any], namespace: str | None, get: Get) -> list[Host]:
    """Query the actors of a group, given in any order, and return its hosts by rank.

    Args:
        actors: handles or names of the actors.
        namespace: Ray namespace of the names; None for that of this process.
        get: function that waits for references.

    Raises:
        ResourceError: an actor does not exist or hosts no workers, or the actors are not all ranks of one group.
    """
    handles = [_find_by_name(actor, namespace) if isinstance(actor, str) else actor for actor in actors]
    for handle in handles:
        if not all(hasattr(handle, method) for method in ("hello", "place", "build")):
            raise ResourceError(
                f"{handle!r:.200} hosts no rollcast workers; give the handles of a group: "
                "[worker.handle for worker in group.workers]"
            )
    infos = get([handle.hello.remote() for handle in handles])
    places = get([handle.place.remote() for handle in handles])
    ordered = sorted(zip(handles, infos, places, strict=True), key=lambda entry: int(entry[2].rank))
    ranks, groups = [place.rank for _, _, place in ordered], {place.group for _, _, place in ordered}
    size = ordered[0][2].world_size if ordered else 0
    if ranks != list(range(size)) or len(groups) != 1:
        raise ResourceError(
            f"the actors are ranks {ranks} of {', '.join(sorted(groups)) or 'no group'}; give all {size} ranks of one "
            "group, each once"
        )
    return [Host(*entry) for entry in ordered]


def _find_by_name(name: str, namespace: str | None) -> Any:
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError as error:
        raise ResourceError(f"no actor {name!r} runs in the namespace {namespace or 'of this process'}") from error


def kill_actors(handles: Sequence[Any]) -> None:
    """Kill processes, and release the reservations of groups that they had started."""
    for handle in handles:
        ray.kill(handle)
    remove_groups_made_by([actor_id(handle) for handle in handles])


def build_hosts(handles: Sequence[Any], slots: Sequence[Slot], spec: LaunchSpec, blob: bytes, get: Get) -> list[Host]:
    """Build the workers in their actors.

    Raises:
        CallFailed: a constructor raised.
    """
    env = dict(spec.env)
    infos = get([handle.hello.remote() for handle in handles])
    contexts = _build_contexts([slot.node_id for slot in slots], spec, infos)
    shared = ray.put(blob)  # stored once; as a plain argument, the bytes would be sent with every rank's task
    get(
        [
            handle.build.remote(context, env, list(sys.path), shared)
            for handle, context in zip(handles, contexts, strict=True)
        ]
    )
    return [Host(*entry) for entry in zip(handles, infos, contexts, strict=True)]


def _build_contexts(nodes: Sequence[str], spec: LaunchSpec, infos: Sequence[HostInfo]) -> list[WorkerContext]:
    """Return a context for each rank; rank 0's node and free port are the rendezvous.

    Args:
        nodes: node id of each rank.
        spec: specification of the group.
        infos: process of each rank.
    """
    sizes, seen = Counter(nodes), Counter[str]()
    places = []
    for node in nodes:
        places.append((seen[node], sizes[node]))
        seen[node] += 1
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
            threads=spec.threads or max(1, info.cores // count),
        )
        for rank, ((local, count), info) in enumerate(zip(places, infos, strict=True))
    ]


def keep_record(hosts: Sequence[Host], slots: Sequence[Slot], spec: LaunchSpec, owns_slots: bool, get: Get) -> None:
    """Store the group's record in each actor, so that another driver can attach to the group."""
    roles = cloudpickle.dumps({role: wrapped.cls for role, wrapped in spec.roles.items()})
    record = GroupRecord(spec.name, roles, tuple(host.context for host in hosts), tuple(slots), owns_slots)
    blob = cloudpickle.dumps(record)
    get([host.handle.remember.remote(blob) for host in hosts])


def find_detached() -> dict[str, dict[int, str]]:
    """Return the detached groups of the cluster: group → rank → name of the actor, for living ranks."""
    roles: dict[str, dict[int, str]] = {}
    for entry in list_named_actors(all_namespaces=True):
        parts = _ACTOR_NAME.fullmatch(entry["name"])
        if entry["namespace"] == NAMESPACE and parts is not None:
            roles.setdefault(parts["group"], {})[int(parts["rank"])] = entry["name"]
    return roles


def detached_places() -> set[str]:
    """Return the ids of the placement groups of detached groups."""
    names = [name for ranks in find_detached().values() for name in ranks.values()]
    return {name.rpartition("@")[2] for name in names}


def find_actors(group: str, size: int | None = None) -> list[Any]:
    """Return the actors of a detached group, by rank.

    Args:
        group: name of the group.
        size: required number of ranks; None to accept any number of living ranks.

    Raises:
        ResourceError: there is no such group, or it has lost a rank.
    """
    groups = find_detached()
    if group not in groups:
        raise ResourceError(f"no detached group {group!r} runs here; detached groups: {', '.join(groups) or 'none'}")
    ranks = groups[group]
    lost = sorted(set(range(size or 0)) - set(ranks))
    if lost:
        raise ResourceError(
            f"the detached group {group!r} has lost ranks {lost} of {size}; end the rest of it with "
            f"RayRuntime.end_detached({group!r}) and start it again"
        )
    return [ray.get_actor(ranks[rank], namespace=NAMESPACE) for rank in sorted(ranks)]


def read_record(group: str, get: Get) -> GroupRecord:
    """Return the record stored by the group's first living rank.

    Raises:
        ResourceError: there is no such group.
        CallFailed: the rank does not answer.
    """
    blob = get([find_actors(group)[0].recall.remote()])[0]
    if blob is None:
        raise ResourceError(f"the detached group {group!r} is still being started; try again")
    return pickle.loads(blob)  # type: ignore[no-any-return]
