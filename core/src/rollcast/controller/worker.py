"""Workers: user classes whose registered methods run on every rank of a group."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rollcast.controller.decorator import check_registered_methods, register
from rollcast.controller.mesh import MeshInfo
from rollcast.errors import DispatchError

__all__ = ["ClassWithInitArgs", "Worker", "WorkerContext"]

W = TypeVar("W")


@dataclass(frozen=True)
class WorkerContext:
    """Where a worker stands in its group.

    Attributes:
        rank, world_size: in the whole group.
        local_rank, local_world_size: among the group's ranks on the same node.
        master_addr, master_port: rendezvous for ``torch.distributed``.
        node: address of the node.
        group, role: names, for messages.
        threads: CPU threads that this process should use.
        device_index: number of this process's accelerator among those that it sees; None without one.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    node: str = "localhost"
    group: str = "group"
    role: str = "worker"
    threads: int = 1
    device_index: int | None = None

    def environment(self) -> dict[str, str]:
        """The variables that ``torch.distributed`` and its users read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


class ClassWithInitArgs(Generic[W]):
    """A worker class with its constructor's arguments, to be built later in another process.

    Raises:
        TypeError: at once, if the arguments do not fit the constructor.
    """

    def __init__(self, cls: type[W], *args: Any, **kwargs: Any) -> None:
        try:
            inspect.signature(cls).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}{inspect.signature(cls)} cannot be built: {error}") from None
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.env: dict[str, str] = {}
        self.runtime_env: dict[str, Any] = {}

    def with_options(
        self, *, env: Mapping[str, str] | None = None, runtime_env: Mapping[str, Any] | None = None
    ) -> ClassWithInitArgs[W]:
        """The same, with wishes for the process in which the worker lives.

        Args:
            env: environment variables, over those of the group.
            runtime_env: Ray's runtime environment, over that of the group: ``env_vars``, ``pip``,
                ``working_dir`` and the rest. Its ``env_vars`` are set before the process starts.
        """
        made = ClassWithInitArgs(self.cls, *self.args, **self.kwargs)
        made.env = {**self.env, **(env or {})}
        made.runtime_env = {**self.runtime_env, **(runtime_env or {})}
        return made

    def __call__(self) -> W:
        return self.cls(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"ClassWithInitArgs({self.cls.__name__})"


_NOWHERE = WorkerContext()
_current: contextvars.ContextVar[WorkerContext] = contextvars.ContextVar("rollcast_worker_context")
_siblings: contextvars.ContextVar[Mapping[str, Worker]] = contextvars.ContextVar("rollcast_worker_siblings")


@contextmanager
def hosting(context: WorkerContext, siblings: Mapping[str, Worker]) -> Iterator[None]:
    """Build workers inside this: they take their place from it."""
    place, others = _current.set(context), _siblings.set(siblings)
    try:
        yield
    finally:
        _current.reset(place)
        _siblings.reset(others)


class Worker:
    """Base of every class that runs on the ranks of a worker group.

    Its place is known before ``__init__`` runs, whether or not a subclass calls ``super().__init__``.
    Built outside a group it is rank 0 of 1.

    Example::

        class Doubler(Worker):
            @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
            def double(self, data: DataProto) -> DataProto:
                return data.with_columns({"x": data["x"] * 2})
    """

    _context: WorkerContext
    _colocated: Mapping[str, Worker]
    _meshes: dict[str, MeshInfo]

    def __new__(cls, *args: Any, **kwargs: Any) -> Worker:
        worker = super().__new__(cls)
        worker._context = _current.get(_NOWHERE)
        worker._colocated = _siblings.get({})
        worker._meshes = {}
        return worker

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_registered_methods(cls)

    @property
    def context(self) -> WorkerContext:
        """Where this worker stands in its group."""
        return self._context

    @property
    def rank(self) -> int:
        """Rank in the group."""
        return self._context.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._context.world_size

    @property
    def colocated(self) -> Mapping[str, Worker]:
        """All workers of this process by role, this one included."""
        return self._colocated

    def register_mesh(
        self, mesh_name: str, dp_rank: int, is_collect: bool = True, coords: Mapping[str, int] | None = None
    ) -> None:
        """Say which data-parallel shard this rank works on in the mesh ``mesh_name``.

        Args:
            mesh_name: as the dispatch modes of methods that run on the mesh name it.
            dp_rank: ranks of one model-parallel group share it.
            is_collect: whether this rank's output counts; exactly one of a group's should.
            coords: place along the model-parallel dimensions, such as ``{"tp": 1, "pp": 0}``, for
                modes that tell those dimensions apart.

        Raises:
            DispatchError: a rank or coordinate is negative, or ``coords`` names ``dp`` again.
        """
        if dp_rank < 0:
            raise DispatchError(f"mesh {mesh_name!r}: dp_rank is {dp_rank}, it must be at least 0")
        places = dict(coords or {})
        if "dp" in places:
            raise DispatchError(f"mesh {mesh_name!r}: coords {places} names 'dp', whose place is dp_rank")
        if any(place < 0 for place in places.values()):
            raise DispatchError(f"mesh {mesh_name!r}: coords are {places}, each must be at least 0")
        self._meshes[mesh_name] = MeshInfo(dp_rank, is_collect, places)

    @register(dispatch_mode="one_to_all")
    def query_mesh(self, mesh_name: str) -> MeshInfo:
        """This rank's place in the mesh; the group asks once and remembers.

        Raises:
            DispatchError: nothing was registered under that name.
        """
        if mesh_name not in self._meshes:
            known = ", ".join(sorted(self._meshes)) or "none"
            raise DispatchError(
                f"{type(self).__name__} on rank {self.rank} has no mesh {mesh_name!r} (registered: {known}); "
                f"call self.register_mesh({mesh_name!r}, dp_rank, is_collect) before the first call, "
                "usually in init_model"
            )
        return self._meshes[mesh_name]

    def record_state(self, folder: str) -> None:
        """Write what a record of a call has to keep of this worker's state; nothing by default.

        Called on every rank before the call that is recorded.

        Args:
            folder: exists, and is the same for all ranks.
        """

    def replay_state(self, folder: str) -> None:
        """Make a worker that was just built ready for a recorded call; the inverse of :meth:`record_state`.

        Args:
            folder: what was written there, perhaps by another number of ranks.
        """

    def run_function(self, function: Callable[..., Any], roles: Sequence[str], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function with this worker first, or with a dict of its neighbours if there are several roles."""
        subject: Any = self if len(roles) == 1 else {role: self._colocated[role] for role in roles}
        return function(subject, *args, **kwargs)
