"""verl's resource pools and worker groups on rollcast; :mod:`rollcast_verl.hook` puts them in place of verl's.

A method whose dispatch mode splits and joins batches (``DP_COMPUTE_PROTO``, ``DP_COMPUTE_PROTO_WITH_FUNC``,
``DP_COMPUTE_METRIC`` and those of a mesh) runs with rollcast's mode: rows that are not read stay on the workers. All
other modes, also a user's own, run verl's or the user's dispatch and collect functions. Calls, failures, timeouts and
processes are rollcast's in both cases.
"""

from __future__ import annotations

import functools
import random
import string
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ray import cloudpickle
from verl.plugin.platform import get_platform
from verl.protocol import DataProtoFuture
from verl.single_controller.base import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup
from verl.single_controller.base import decorator as declarations

import rollcast
import rollcast_ray
from rollcast.contracts.dispatch import DispatchMode, RankCall
from rollcast.contracts.runtime import Host
from rollcast.errors import DispatchError, ResourceError
from rollcast_dispatch import DpComputeMetric, DpComputeProto, DpComputeProtoWithFunc, NdMesh
from rollcast_verl.batches import from_verl, is_convertible, to_verl
from rollcast_verl.hosted_worker import RAY_CALL, HostedWorker, attribute_of, hosted_worker_class

__all__ = [
    "RankHandle",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "SubRayResourcePool",
    "Worker",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "merge_resource_pool",
    "split_resource_pool",
]

#: Variables that the group sets for each process.
_OWN_VARIABLES = frozenset(
    {"WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "WG_PREFIX", "WG_BACKEND", "RAY_LOCAL_WORLD_SIZE"}
)


def _random_name() -> str:
    return "".join(random.choices(string.ascii_letters + string.digits, k=6))  # noqa: S311  # a label


# -- pools --------------------------------------------------------------------------------------


class RayResourcePool(ResourcePool):  # type: ignore[misc]
    """verl's resource pool, placed by rollcast.

    Args:
        process_on_nodes: number of processes on each node.
        use_gpu: True to reserve a device for each process.
        name_prefix: name of the pool in messages.
        max_colocate_count: largest number of groups on the pool; each process reserves a CPU for each of them.
        detached: True if the reservation outlives this process.
        accelerator_type: custom resource that the nodes must have.
    """

    def __init__(
        self,
        process_on_nodes: list[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix or _random_name()
        self.detached = detached
        self.accelerator_type = accelerator_type
        self._pool: rollcast.ResourcePool | None = None

    def placed_on(self, strategy: str = "STRICT_PACK") -> rollcast.ResourcePool:
        """Return rollcast's pool; ``strategy`` counts at the first call."""
        if self._pool is None:
            self._pool = rollcast_ray.RayResourcePool(
                self.store,
                self.use_gpu,
                self.max_colocate_count,
                self.name_prefix,
                float(self.max_colocate_count),
                accelerator=get_platform().ray_resource_name(),
                resources={self.accelerator_type: 1e-4} if self.use_gpu and self.accelerator_type else None,
                strategy=strategy,
                detached=self.detached,
            )
        return self._pool

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[Any]:
        """Return the placement groups, sorted by node; place the pool first if necessary.

        ``name`` and ``device_name`` have no effect: the pool has a name, and the platform of verl knows its devices.
        """
        rollcast_ray.RayRuntime.shared().start()
        bases = {id(base): base for base, _ in self.placed_on(strategy).places()}
        return [group for base in bases.values() for group in base.get_placement_groups()]  # type: ignore[attr-defined]

    @property
    def pgs(self) -> list[Any] | None:
        """The placement groups; None before the pool is placed."""
        bases = [] if self._pool is None else [base for base, _ in self._pool.places()]
        placed = bases and all(base.is_placed for base in bases)  # type: ignore[attr-defined]
        return self.get_placement_groups() if placed else None


class SubRayResourcePool(RayResourcePool):
    """A part of a resource pool; :func:`split_resource_pool` makes it.

    Attributes:
        start_bundle_index: index of the first process in the pool that was split.
        subgroup_world_size: number of processes.
    """

    def __init__(self, whole: RayResourcePool, part: rollcast.ResourcePool, start: int, name_prefix: str) -> None:
        super().__init__(whole.store, whole.use_gpu, name_prefix, whole.max_colocate_count, whole.detached)
        self._pool = part
        self.start_bundle_index = start
        self.subgroup_world_size = part.world_size

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.subgroup_world_size


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | list[int]) -> list[SubRayResourcePool]:
    """Split a pool, or a part of one, into parts of ``split_size`` processes each, or of the given sizes.

    Raises:
        ResourceError: the sizes do not add up to the pool.
    """
    parts = resource_pool.placed_on().split(split_size)
    start = resource_pool.start_bundle_index if isinstance(resource_pool, SubRayResourcePool) else 0
    sub_pools = []
    for number, part in enumerate(parts):
        sub_pools.append(SubRayResourcePool(resource_pool, part, start, f"{resource_pool.name_prefix}_split_{number}"))
        start += part.world_size
    return sub_pools


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """Return a pool of the processes of two pools, first those of ``rp1``.

    Raises:
        ResourceError: the pools differ in ``use_gpu``, ``max_colocate_count`` or ``detached``.
    """
    name = f"{rp1.name_prefix}_{rp2.name_prefix}"
    pool = RayResourcePool(rp1.store + rp2.store, rp1.use_gpu, name, rp1.max_colocate_count, rp1.detached)
    pool._pool = rp1.placed_on().merge(rp2.placed_on(), name=name)
    return pool


@dataclass
class ResourcePoolManager:
    """verl's pools by name, and the pool of each role.

    Attributes:
        resource_pool_spec: name of a pool → processes on each node.
        mapping: role → name of its pool.
        max_colocate_count: largest number of groups on a pool.
        resource_pool_dict: the pools by name.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Any, str]
    max_colocate_count: int = 3
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Create the pools, and check that the cluster has room for them.

        Raises:
            ResourceError: a pool does not fit; names the nodes and what they have.
        """
        for name, processes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(
                processes, True, name, max_colocate_count=self.max_colocate_count
            )
        pools = {name: pool.placed_on() for name, pool in self.resource_pool_dict.items()}
        rollcast.ResourcePoolManager(pools, {}).check(rollcast_ray.RayRuntime.shared().nodes())

    def get_resource_pool(self, role: Any) -> RayResourcePool:
        """Return the pool of a role."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Return the number of processes of all pools."""
        return sum(count for processes in self.resource_pool_spec.values() for count in processes)


# -- classes ------------------------------------------------------------------------------------


class RayClassWithInitArgs(ClassWithInitArgs):  # type: ignore[misc]
    """A class of workers with its arguments; ``@ray.remote`` on the class is allowed and has no effect."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self._options: dict[str, Any] = {}

    def update_options(self, options: dict[str, Any]) -> None:
        """Set options of the Ray actors; only ``runtime_env`` is accepted.

        Raises:
            DispatchError: another option is given.
        """
        if unknown := sorted(options.keys() - {"runtime_env"}):
            raise DispatchError(f"options {unknown} of RayClassWithInitArgs: rollcast starts the actors; use the pool")
        self._options.update(options)

    def set_additional_resource(self, additional_resource: dict[str, Any]) -> None:
        """Refuse resources of single processes, which belong to the pool.

        Raises:
            DispatchError: always, unless the dict is empty.
        """
        if additional_resource:
            raise DispatchError("additional resources of a class: give the pool an accelerator_type instead")

    def packed(self) -> bytes:
        """Return the pickle of the class and its arguments."""
        return bytes(cloudpickle.dumps((_plain(self.cls), self.args, self.kwargs)))


def _plain(cls: Any) -> Any:
    """Return the class under ``@ray.remote``."""
    return getattr(cls, "__ray_actor_class__", cls)


def _registrations(cls: type) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Yield the name, function and declaration of each method registered with verl's ``register``."""
    for name in dir(cls):
        function = getattr(cls, name, None)
        if callable(function) and isinstance(attributes := getattr(function, declarations.MAGIC_ATTR, None), dict):
            yield name, function, attributes


def _functions(mode: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the dispatch and the collect function of a mode of verl."""
    if mode is declarations.Dispatch.RANK_ZERO:  # declared by verl without functions
        mode = declarations.Dispatch.ALL_TO_ALL
    modes = mode if isinstance(mode, dict) else declarations.get_predefined_dispatch_fn(mode)
    return modes["dispatch_fn"], modes["collect_fn"]


def _own_mode(mode: Any, prefix: str) -> DispatchMode | None:
    """Return rollcast's mode that does what a mode of verl does; None if verl's functions have to run."""
    dispatch, collect = _functions(mode)
    if isinstance(dispatch, functools.partial) and isinstance(collect, functools.partial):
        lazy = (declarations.dispatch_lazy_compute_data_proto, declarations.collect_lazy_compute_data_proto)
        if (dispatch.func, collect.func) == lazy and dispatch.args == collect.args:
            return NdMesh(f"{prefix}/{dispatch.args[0]}" if prefix else dispatch.args[0])
    known: dict[Any, type[DispatchMode]] = {
        (declarations.dispatch_dp_compute_data_proto, declarations.collect_dp_compute_data_proto): DpComputeProto,
        (
            declarations.dispatch_dp_compute_data_proto_with_func,
            declarations.collect_dp_compute_data_proto,
        ): DpComputeProtoWithFunc,
        (declarations.dispatch_dp_compute_data_proto, declarations.collect_dp_compute): DpComputeMetric,
    }
    mode_name = known.get((dispatch, collect))
    return None if mode_name is None else mode_name()


@dataclass(frozen=True)
class _Method:
    """A method of a group.

    Attributes:
        path: path of the method in the hosted worker.
        function: the registered function.
        mode: rollcast's dispatch mode; None if ``dispatch`` and ``collect`` run.
        dispatch, collect: functions of verl or of the user.
        rank_zero: True if only rank 0 runs.
        blocking: True if the call waits.
    """

    path: str
    function: Callable[..., Any]
    mode: DispatchMode | None
    dispatch: Callable[..., Any]
    collect: Callable[..., Any]
    rank_zero: bool
    blocking: bool


def _methods_of(cls: Any, prefix: str = "") -> dict[str, _Method]:
    """Return the registered methods of a class and of the classes fused into it, by path."""
    methods = {}
    for name, function, declared in _registrations(_plain(cls)):
        path = f"{prefix}/{name}" if prefix else name
        mode, execute = declared["dispatch_mode"], declared["execute_mode"]
        rank_zero = execute is declarations.Execute.RANK_ZERO or mode is declarations.Dispatch.RANK_ZERO
        own = None if rank_zero else _own_mode(mode, prefix)
        methods[path] = _Method(path, function, own, *_functions(mode), rank_zero, declared["blocking"])
    if not prefix:
        for key, inner in getattr(_plain(cls), "raw_cls_dict", {}).items():
            methods |= _methods_of(inner, key)
    return methods


def _hosted_worker(cls: Any) -> type[HostedWorker]:
    methods = {path: (method.function, method.mode, method.blocking) for path, method in _methods_of(cls).items()}
    return hosted_worker_class(_plain(cls).__name__, methods)


# -- groups -------------------------------------------------------------------------------------


class _Future(DataProtoFuture):  # type: ignore[misc]
    """verl's future of a batch that stays on the workers; given to another group, its rows go there directly."""

    def __init__(self, handle: rollcast.DataProtoFuture | rollcast.DataProto, refs: Sequence[Any]) -> None:
        self.handle = handle
        super().__init__(collect_fn=declarations.collect_dp_compute_data_proto, futures=list(refs))

    def get(self) -> Any:
        """Wait for the batch and return it."""
        handle = self.handle
        return _returned(handle.local() if isinstance(handle, rollcast.DataProto) else handle.get())

    def chunk(self, chunks: int) -> list[_Future]:
        """Split the batch without reading it."""
        return [_Future(part, self.futures) for part in self.handle.chunk(chunks)]


def _returned(value: Any) -> Any:
    return to_verl(value) if isinstance(value, rollcast.DataProto) else value


def _sent(value: Any) -> Any:
    """Convert an argument: batches and futures to rollcast's."""
    if isinstance(value, _Future):
        return value.handle
    return from_verl(value, rank=-1) if is_convertible(value) else value


class RankHandle:
    """One worker of a group; ``handle.method.remote(...)`` calls any of its methods and returns a Ray reference."""

    def __init__(self, host: Host, role: str, prefix: str) -> None:
        self._host, self._role, self._prefix = host, role, prefix

    def __getattr__(self, name: str) -> Any:
        if name == "__ray_call__":
            path = RAY_CALL
        elif name.startswith("__"):
            raise AttributeError(name)
        else:
            path = attribute_of(f"{self._prefix}/{name}" if self._prefix else name)
        return _RemoteMethod(self._host, self._role, path)

    def __reduce__(self) -> tuple[Any, ...]:
        return RankHandle, (self._host, self._role, self._prefix)


@dataclass(frozen=True)
class _RemoteMethod:
    host: Host
    role: str
    path: str

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start the call and return a Ray reference to its result."""
        call = RankCall(tuple(map(_sent, args)), {key: _sent(value) for key, value in kwargs.items()})
        return rollcast_ray.RayRuntime.shared().call(self.host, self.role, self.path, call, "send")


#: Attributes that the groups of :meth:`RayWorkerGroup.spawn` have in common.
_SHARED = ("name_prefix", "resource_pool", "device_name", "profile_steps", "worker_nsight_options", "_lease")


def _actor_of(worker: Any) -> Any:
    """Return the actor, or the name of one, of a handle that a user passes."""
    if isinstance(worker, RankHandle):
        return worker._host.handle
    return worker.handle if isinstance(worker, _Name) else worker


class _Name(str):  # noqa: SLOT000
    """The name of a worker, which finds the worker in any process of the cluster."""

    handle: Any

    def __new__(cls, text: str, handle: Any) -> Self:
        instance = super().__new__(cls, text)
        instance.handle = handle
        return instance

    def __reduce__(self) -> tuple[Any, ...]:
        return _Name, (str(self), self.handle)


class _Lease:
    """Held by all groups on the same processes; the processes end when the last of the groups is gone."""


def _end_later(group: rollcast.WorkerGroup) -> None:
    # Not in the thread of the garbage collection, which may hold any lock.
    threading.Thread(target=group.shutdown, name="rollcast-verl-end", daemon=True).start()


class RayWorkerGroup(WorkerGroup):  # type: ignore[misc]
    """verl's worker group on rollcast's.

    Args:
        resource_pool: pool of the processes; None to attach to running workers.
        ray_cls_with_init: class of the workers.
        bin_pack: True to keep the processes of an entry of the pool on one node.
        name_prefix: name of the group.
        detached: True if the processes outlive this one.
        worker_names, worker_handles: workers to attach to.
        use_gpu: False for workers without a device on a pool with devices is not supported.
        device_name, ray_wait_register_center_timeout: accepted; verl's platform knows the device.
        worker_env: environment variables of the processes.
        profile_steps, worker_nsight_options: options of NVIDIA Nsight, as in verl.
        timeout: deadline of each blocking call, in seconds.

    Raises:
        ResourceError: the pool cannot be placed.
        DispatchError: ``worker_env`` sets a variable that the group sets itself.
        WorkerError: a constructor raised.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_wait_register_center_timeout: int = 300,
        *,
        use_gpu: bool | None = None,
        device_name: str = "cuda",
        worker_env: Mapping[str, str] | None = None,
        profile_steps: Sequence[int] | None = None,
        worker_nsight_options: dict[str, Any] | None = None,
        timeout: float = 7 * 24 * 3600.0,
    ) -> None:
        super().__init__(resource_pool)
        if ray_cls_with_init is None:
            raise DispatchError("RayWorkerGroup needs ray_cls_with_init, from which it knows the methods")
        self.name_prefix = name_prefix or _random_name()
        self.resource_pool = resource_pool
        self.device_name = device_name
        self.profile_steps, self.worker_nsight_options = profile_steps, worker_nsight_options
        if resource_pool is None:
            group = self._attach(ray_cls_with_init, worker_names or (), worker_handles or (), timeout)
        else:
            if use_gpu is not None and use_gpu != resource_pool.use_gpu:
                raise ResourceError(
                    f"use_gpu is {use_gpu}, but the pool {resource_pool.name_prefix!r} has it otherwise"
                )
            group = self._launch(resource_pool, ray_cls_with_init, bin_pack, detached, worker_env or {}, timeout)
        self._lease = _Lease()
        if resource_pool is not None and not detached:
            weakref.finalize(self._lease, _end_later, group).atexit = False
        self._use(group, ray_cls_with_init, "")

    def _launch(
        self,
        pool: RayResourcePool,
        wanted: RayClassWithInitArgs,
        bin_pack: bool,
        detached: bool,
        worker_env: Mapping[str, str],
        timeout: float,
    ) -> rollcast_ray.RayWorkerGroup:
        if clashes := sorted(_OWN_VARIABLES & worker_env.keys()):
            raise DispatchError(f"worker_env sets {', '.join(clashes)}, which the group sets for each process")
        local = pool.store[0]
        env = {"WG_PREFIX": self.name_prefix, "WG_BACKEND": "ray", "RAY_LOCAL_WORLD_SIZE": str(local)}
        runtime_env = dict(wanted._options.get("runtime_env", {}))
        if worker_env:
            runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **worker_env}
        if self.profile_steps and self.worker_nsight_options is not None:
            options = dict(self.worker_nsight_options)
            if options.get("capture-range-end") is None:
                options["capture-range-end"] = f"repeat-shutdown:{6 * len(self.profile_steps)}"
            runtime_env["nsight"] = options
        return rollcast_ray.RayWorkerGroup(
            pool.placed_on("STRICT_PACK" if bin_pack else "PACK"),
            rollcast.ClassWithInitArgs(_hosted_worker(wanted.cls), wanted.packed()),
            name=self.name_prefix,
            env=env,
            runtime_env=runtime_env,
            detached=detached,
            timeout=timeout,
        )

    @staticmethod
    def _attach(
        wanted: RayClassWithInitArgs, names: Sequence[str], handles: Sequence[Any], timeout: float
    ) -> rollcast_ray.RayWorkerGroup:
        selected = list(handles or names)
        if not selected:
            raise ResourceError("a RayWorkerGroup without a pool needs worker_names or worker_handles")
        actors = [_actor_of(worker) for worker in selected]
        return rollcast_ray.RayWorkerGroup.from_actors(actors, _hosted_worker(wanted.cls), timeout=timeout)

    def _use(self, group: rollcast_ray.RayWorkerGroup, wanted: RayClassWithInitArgs, prefix: str) -> None:
        self.group = group
        self.ray_cls_with_init = wanted
        self.fused_worker_used = wanted.fused_worker_used
        self.sub_cls_name = prefix
        cls = _plain(wanted.cls)
        name = cls.__name__
        self._workers = [RankHandle(host, group.role, prefix) for host in group.workers]
        self._worker_names = [
            _Name(f"{self.name_prefix}{name}_{place.node}:{place.local_rank}", host.handle)
            for host, place in zip(group.workers, group.contexts, strict=True)
        ]
        for path, method in _methods_of(cls).items():
            before, _, own = path.rpartition("/")
            if before == prefix:
                setattr(self, own, functools.partial(self._call, method))
            elif not prefix:  # verl's WorkerDict has them under this name
                setattr(self, f"{before}_{own}", functools.partial(self._call, method))

    # -- views

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        **options: Any,
    ) -> Self:
        """Attach to running workers by their names or handles; further options are those of the class."""
        return cls(
            None,
            ray_cls_with_init,
            name_prefix=name_prefix,
            worker_names=worker_names,
            worker_handles=worker_handles,
            **options,
        )

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Self]:
        """Return a group for each of these workers of a colocated class, on the same processes.

        Raises:
            DispatchError: the class has no such worker.
        """
        inside = getattr(_plain(self.ray_cls_with_init.cls), "raw_cls_dict", {})
        views = {}
        for prefix in prefix_set:
            if prefix not in inside:
                raise DispatchError(f"no worker {prefix!r} in this group; there are: {', '.join(inside) or 'none'}")
            view = object.__new__(type(self))
            view.__dict__.update({name: getattr(self, name) for name in _SHARED})
            view._use(self.group, self.ray_cls_with_init, prefix)
            views[prefix] = view
        return views

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make the groups of :meth:`spawn` attributes of this one."""
        self.__dict__.update(self.spawn(prefix_set))

    # -- calls

    def _call(self, method: _Method, /, *args: Any, **kwargs: Any) -> Any:
        if method.mode is None or not all(self._is_batch(value, method) for value in (*args, *kwargs.values())):
            return self._call_functions(method, args, kwargs)
        bound = getattr(self.group, attribute_of(method.path))
        values, named = [_sent(value) for value in args], {key: _sent(value) for key, value in kwargs.items()}
        if not method.blocking and not isinstance(method.mode, DpComputeMetric):
            started = bound.remote(*values, **named)
            return _Future(started, started.refs)
        result = bound(*values, **named)
        if isinstance(result, rollcast.DataProtoFuture):
            result = result.get()
        return [_returned(output) for output in result] if isinstance(result, list) else _returned(result)

    @staticmethod
    def _is_batch(value: Any, method: _Method) -> bool:
        """Return True if rollcast's mode takes the argument; batches of TransferQueue are left to verl's functions."""
        is_function = isinstance(method.mode, DpComputeProtoWithFunc) and callable(value)
        return is_function or is_convertible(value) or isinstance(value, _Future)

    def _call_functions(self, method: _Method, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        values, named = method.dispatch(self, *args, **kwargs)
        path = attribute_of(method.path)
        ranks = [0] if method.rank_zero else list(range(self.world_size))
        calls = [RankCall(tuple(values), named)] if method.rank_zero else self._spread(values, named)
        refs = self._send(path, ranks, calls)
        outputs = [_returned(output) for output in self.group.receive(path, ranks, refs)] if method.blocking else refs
        return method.collect(self, outputs[0] if method.rank_zero else outputs)

    def _spread(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[RankCall]:
        """Return the call of each rank; arguments that are all lists with an item for each rank are split."""
        values = [*args, *kwargs.values()]
        if not all(isinstance(value, list) and len(value) == self.world_size for value in values):
            return [RankCall(tuple(args), kwargs)] * self.world_size
        return [
            RankCall(tuple(value[rank] for value in args), {key: value[rank] for key, value in kwargs.items()})
            for rank in range(self.world_size)
        ]

    def _send(self, path: str, ranks: Sequence[int], calls: Sequence[RankCall]) -> list[Any]:
        ready = [
            RankCall(tuple(map(_handle_of, call.args)), {key: _handle_of(value) for key, value in call.kwargs.items()})
            for call in calls
        ]
        return self.group.send(path, list(zip(ranks, ready, strict=True)))

    def _path(self, method_name: str) -> str:
        return attribute_of(f"{self.sub_cls_name}/{method_name}" if self.sub_cls_name else method_name)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method on all ranks and return Ray references; lists with an item for each rank are split."""
        return self._send(self._path(method_name), range(self.world_size), self._spread(args, kwargs))

    execute_all = execute_all_async

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method on all ranks and return the outputs by rank."""
        refs = self.execute_all_async(method_name, *args, **kwargs)
        return self.group.receive(self._path(method_name), range(self.world_size), refs)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call any method on rank 0 and return a Ray reference."""
        return self._send(self._path(method_name), [0], [RankCall(args, kwargs)])[0]

    execute_rank_zero = execute_rank_zero_async

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call any method on rank 0 and return its output."""
        ref = self.execute_rank_zero_async(method_name, *args, **kwargs)
        return self.group.receive(self._path(method_name), [0], [ref])[0]

    # -- what verl's code reads of a group

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.group.world_size

    @property
    def workers(self) -> list[RankHandle]:
        """The workers by rank."""
        return self._workers

    @property
    def worker_names(self) -> Sequence[str]:
        """Names of the workers, for :meth:`from_detached`, also in another process."""
        return self._worker_names

    @property
    def master_address(self) -> str:
        """Address of the rendezvous of ``torch.distributed``."""
        return self.group.contexts[0].master_addr

    @property
    def master_port(self) -> str:
        """Port of the rendezvous of ``torch.distributed``."""
        return str(self.group.contexts[0].master_port)

    @property
    def _dispatch_info(self) -> dict[str, list[int]]:
        return {self._own(name): [place.dp_rank for place in places] for name, places in self._meshes()}

    @_dispatch_info.setter
    def _dispatch_info(self, value: dict[str, list[int]]) -> None:
        """Ignore the empty dict of verl's constructor: rollcast's group keeps the meshes."""

    @property
    def _collect_info(self) -> dict[str, list[bool]]:
        return {self._own(name): [place.is_collect for place in places] for name, places in self._meshes()}

    @_collect_info.setter
    def _collect_info(self, value: dict[str, list[bool]]) -> None:
        """See the setter above."""

    def _meshes(self) -> Iterator[tuple[str, Any]]:
        for name, places in self.group.meshes.items():
            if name.rpartition("/")[0] == self.sub_cls_name:
                yield name, places

    @staticmethod
    def _own(mesh_name: str) -> str:
        return mesh_name.rpartition("/")[2]

    def _is_worker_alive(self, worker: RankHandle) -> bool:
        return self._workers.index(worker) not in self.group.lost_ranks


def _handle_of(value: Any) -> Any:
    return value.handle if isinstance(value, _Future) else value


# -- colocation ---------------------------------------------------------------------------------


def create_colocated_worker_raw_cls(class_dict: dict[str, RayClassWithInitArgs]) -> type:
    """Return a class of workers that builds a worker of each class in its process, by name.

    The inner workers are attributes of the outer one, and ``fused_worker_dict`` of all of them holds them by name.
    """
    parts = {name: (_plain(wanted.cls), wanted.args, wanted.kwargs) for name, wanted in class_dict.items()}
    bases = {_worker_base(cls) for cls, _, _ in parts.values()}
    base = bases.pop() if len(bases) == 1 else Worker

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)  # type: ignore[misc]  # the class is made below
        self.fused_worker_dict = {}
        for name, (cls, positional, named) in parts.items():
            self.fused_worker_dict[name] = cls(*positional, **named)
            setattr(self, name, self.fused_worker_dict[name])
        for worker in self.fused_worker_dict.values():
            worker.fused_worker_dict = self.fused_worker_dict

    members = {
        "__init__": build,
        "is_fused_worker": True,
        "raw_cls_dict": {name: cls for name, (cls, _, _) in parts.items()},
    }
    return type("_".join(["FusedWorker", *parts]), (base,), members)


def _worker_base(cls: type) -> type:
    """Return the class among the bases of a worker that sets up its process: ``MegatronWorker`` or ``Worker``."""
    return next((base for base in cls.__mro__ if base.__name__ in ("MegatronWorker", "Worker")), Worker)


def create_colocated_worker_cls_fused(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Return one class that holds a worker of each class in one process; ``spawn`` separates them."""
    merged = RayClassWithInitArgs(create_colocated_worker_raw_cls(class_dict))
    merged.fused_worker_used = True
    return merged


def create_colocated_worker_cls(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Return the same as :func:`create_colocated_worker_cls_fused`: rollcast has one way to share a process."""
    return create_colocated_worker_cls_fused(class_dict)
