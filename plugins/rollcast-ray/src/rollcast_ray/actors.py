"""The actors of a group on Ray: how they are started, and found again by name."""

from __future__ import annotations

import os
import pickle
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle
from ray.util import list_named_actors
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollcast import WorkerHost
from rollcast.contracts.device import use_device
from rollcast.contracts.pools import ResourcePool
from rollcast.contracts.runtime import Host, HostInfo, LaunchSpec, Outcome
from rollcast.contracts.worker import WorkerContext
from rollcast.errors import DispatchError, ResourceError, WorkerError
from rollcast_ray.control import ControlServer, Interrupted, Interruptible
from rollcast_ray.devices import local_device_index, visible_devices
from rollcast_ray.pools import Slot, remove_groups_made_by
from rollcast_ray.store import ObjectStore

if TYPE_CHECKING:
    from rollcast.contracts.runtime import Runtime

__all__ = [
    "GroupRecord",
    "HostActor",
    "build_hosts",
    "detached_places",
    "find_actors",
    "keep_record",
    "kill_actors",
    "pack_roles",
    "read_record",
    "start_actors",
    "started_runtimes",
]

#: Ray's namespace of detached groups: the same for every driver.
NAMESPACE = "rollcast"
#: Says, beside group and rank, in which placement group the actor lives.
_ACTOR_NAME = re.compile(r"(?P<group>.+)\.(?P<rank>\d+)@[0-9a-f]+", re.DOTALL)
#: The runtimes that have started something from this process; a worker may hold groups of its own.
started_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()

Get = Callable[[Sequence[Any]], list[Any]]


@dataclass(frozen=True)
class GroupRecord:
    """The record that each actor of a detached group keeps, so that another driver can find the group.

    Attributes:
        name: of the group.
        roles: pickle of role → class.
        contexts, slots: by rank.
        owns_slots: the placement groups end with the group.
    """

    name: str
    roles: bytes
    contexts: tuple[WorkerContext, ...]
    slots: tuple[Slot, ...]
    owns_slots: bool

    def load_roles(self) -> dict[str, type]:
        """Return role → class.

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


class HostActor:
    """The Ray actor: a :class:`rollcast.WorkerHost`, and the set-up of its process."""

    def __init__(self) -> None:
        self.host = WorkerHost(ObjectStore())
        self._main = Interruptible()
        self._control: ControlServer | None = None
        self._record: bytes | None = None

    def hello(self) -> HostInfo:
        """Return where this process is; from now on it answers there while it is busy."""
        node = ray.util.get_node_ip_address()
        if self._control is None:
            self._control = ControlServer(node, {"interrupt": self._main.interrupt, "stack": self._main.stack})
        return replace(self.host.describe(node), control=self._control.address)

    def build(self, context: WorkerContext, env: Mapping[str, str], driver_path: list[str], blob: bytes) -> None:
        """Set up this process, then unpickle the classes: the order lets ``env`` reach their imports.

        Args:
            context: this rank's place.
            env: environment variables, over those of the context.
            driver_path: the driver's ``sys.path``; its folders that exist here are added.
            blob: pickle of the in-process plugins and of the pickled roles.

        Raises:
            WorkerRaised: a constructor raised.
            ResourceError: ``env`` hides the device that the process was given.
        """
        os.environ.update({"OMP_NUM_THREADS": str(context.threads), **context.environment(), **env})
        sys.path.extend(entry for entry in driver_path if entry not in sys.path and Path(entry).exists())
        snapshot, roles = pickle.loads(blob)
        if snapshot is not None:
            self.host.install(snapshot)
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(context.threads)
        context = self._with_device(context)
        use_device(context.device_index)
        self.host.build(context, pickle.loads(roles))

    def _with_device(self, context: WorkerContext) -> WorkerContext:
        """Return the context with the accelerator that Ray gave this process."""
        for kind, ids in ray.get_runtime_context().get_accelerator_ids().items():
            index = local_device_index(os.environ, ids, context.local_rank, kind) if ids else None
            if ids:
                visible = visible_devices(os.environ, kind)
                name = "" if index is None else visible[index] if visible else str(index)
                return replace(context, device_index=index, device_id=name)
        return context

    def install(self, snapshot: bytes | None) -> None:
        """Replace the driver's in-process plugins that this process knows."""
        self.host.install(snapshot)

    def send(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the method that the task is named after, ``role.method``, and return its result."""
        return self._run("send", args, kwargs)

    def keep(self, /, *args: Any, **kwargs: Any) -> Any:
        """:meth:`send`, but a DataProto stays here."""
        return self._run("keep", args, kwargs)

    def drop(self, /, *args: Any, **kwargs: Any) -> Any:
        """:meth:`send`, but nothing is returned."""
        return self._run("drop", args, kwargs)

    def _run(self, outcome: Outcome, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        task = ray.get_runtime_context()
        role, _, method = str(task.get_task_name()).rpartition(".")
        try:
            with self._main.running(str(task.get_task_id())):
                return self.host.call(role, method, args, kwargs, outcome)
        except Interrupted:
            raise WorkerError(f"{role}.{method} was given up by the controller") from None

    def ping(self) -> None:
        """Do nothing: an answer shows that the process is alive."""

    def remember(self, record: bytes) -> None:
        """Keep the record of a detached group."""
        self._record = record

    def recall(self) -> bytes | None:
        """Return the record."""
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
        DispatchError: a class or argument cannot be sent.
    """
    try:
        return bytes(cloudpickle.dumps((spec.snapshot(), cloudpickle.dumps(dict(spec.roles)))))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise DispatchError(f"the classes or arguments of {spec.name} cannot be sent to workers: {error}") from error


def start_actors(pool: ResourcePool, slots: Sequence[Slot], spec: LaunchSpec) -> list[Any]:
    """Start an actor for each rank.

    Raises:
        ResourceError: a detached group of that name exists.
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
    handles = []
    for rank, slot in enumerate(slots):
        here = PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.bundle)
        name = {"name": f"{spec.name}.{rank}@{slot.key[0]}"} if spec.detached else {}
        handles.append(ray.remote(HostActor).options(**options, **name, scheduling_strategy=here).remote())
    return handles


def kill_actors(handles: Sequence[Any]) -> None:
    """End processes at once, and release the reservations of groups that they had started."""
    for handle in handles:
        ray.kill(handle)
    remove_groups_made_by([handle._actor_id.hex() for handle in handles])


def build_hosts(handles: Sequence[Any], slots: Sequence[Slot], spec: LaunchSpec, blob: bytes, get: Get) -> list[Host]:
    """Build the workers in their actors.

    Raises:
        CallFailed: a constructor raised.
    """
    env = dict(spec.env)
    infos = get([handle.hello.remote() for handle in handles])
    contexts = _build_contexts([slot.node_id for slot in slots], spec, infos)
    get(
        [
            handle.build.remote(context, env, list(sys.path), blob)
            for handle, context in zip(handles, contexts, strict=True)
        ]
    )
    return [Host(*entry) for entry in zip(handles, infos, contexts, strict=True)]


def _build_contexts(nodes: Sequence[str], spec: LaunchSpec, infos: Sequence[HostInfo]) -> list[WorkerContext]:
    """Return a context for each rank; rank 0's node and free port are the rendezvous.

    Args:
        nodes: id of each rank's node.
        spec: the group.
        infos: the process of each rank.
    """
    places = [(nodes[:rank].count(node), nodes.count(node)) for rank, node in enumerate(nodes)]
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


def keep_record(hosts: Sequence[Host], slots: Sequence[Slot], spec: LaunchSpec, owns_slots: bool, get: Get) -> None:
    """Give each actor the record with which another driver finds the group."""
    roles = cloudpickle.dumps({role: wrapped.cls for role, wrapped in spec.roles.items()})
    record = GroupRecord(spec.name, roles, tuple(host.context for host in hosts), tuple(slots), owns_slots)
    blob = cloudpickle.dumps(record)
    get([host.handle.remember.remote(blob) for host in hosts])


def find_detached() -> dict[str, dict[int, str]]:
    """Return the detached groups of the cluster: group → rank → name of its actor, for ranks that live."""
    found: dict[str, dict[int, str]] = {}
    for entry in list_named_actors(all_namespaces=True):
        parts = _ACTOR_NAME.fullmatch(entry["name"])
        if entry["namespace"] == NAMESPACE and parts is not None:
            found.setdefault(parts["group"], {})[int(parts["rank"])] = entry["name"]
    return found


def detached_places() -> set[str]:
    """Return the ids of the placement groups in which detached groups live."""
    names = [name for ranks in find_detached().values() for name in ranks.values()]
    return {name.rpartition("@")[2] for name in names}


def find_actors(group: str, size: int | None = None) -> list[Any]:
    """Return the actors of a detached group, by rank.

    Args:
        group: its name.
        size: number of ranks that there have to be; by default those that live.

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
            f"RayRuntime.end_detached({group!r}) and start it anew"
        )
    return [ray.get_actor(ranks[rank], namespace=NAMESPACE) for rank in sorted(ranks)]


def read_record(group: str, get: Get) -> GroupRecord:
    """Return the record that the group's first living rank keeps.

    Raises:
        ResourceError: no such group.
        CallFailed: the rank does not answer.
    """
    blob = get([find_actors(group)[0].recall.remote()])[0]
    if blob is None:
        raise ResourceError(f"the detached group {group!r} is still being started; try again")
    return pickle.loads(blob)  # type: ignore[no-any-return]
