"""Workers: classes whose registered methods run on every rank of a group."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from rollcast.contracts.dispatch import MeshInfo
from rollcast.contracts.worker import WorkerContext
from rollcast.controller.dispatch import check_registered_methods, register
from rollcast.errors import DispatchError

__all__ = ["Worker"]


_NOWHERE = WorkerContext()
_current: contextvars.ContextVar[WorkerContext] = contextvars.ContextVar("rollcast_worker_context")
_siblings: contextvars.ContextVar[Mapping[str, Worker]] = contextvars.ContextVar("rollcast_worker_siblings")


@contextmanager
def hosting(context: WorkerContext, siblings: Mapping[str, Worker]) -> Iterator[None]:
    """Set the context of the workers that are built inside the block."""
    place, others = _current.set(context), _siblings.set(siblings)
    try:
        yield
    finally:
        _current.reset(place)
        _siblings.reset(others)


class Worker:
    """Base class of workers, which run on the ranks of a worker group.

    :attr:`context` is set before ``__init__`` runs, whether or not a subclass calls ``super().__init__``. A worker
    that is built outside a group is rank 0 of 1.

    Example::

        class Doubler(Worker):
            @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
            def double(self, data: DataProto) -> DataProto:
                return data.with_columns({"x": data["x"] * 2})
    """

    #: True to run coroutine methods concurrently with other calls, in an event loop with its own thread. False to run
    #: them one after the other in the thread of all other calls, for a worker that computes in coroutines: a second
    #: thread makes torch start a second team of threads. On Ray, a cancelled call in a process with concurrent
    #: coroutines ends at its next line of Python; without them, a sleep is interrupted too.
    concurrent_async: ClassVar[bool] = True

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
        """This worker's place in its group."""
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
        """All workers of this process by role, including this one."""
        return self._colocated

    def register_mesh(
        self, mesh_name: str, dp_rank: int, is_collect: bool = True, coords: Mapping[str, int] | None = None
    ) -> None:
        """Register the data-parallel shard that this rank computes in the mesh ``mesh_name``.

        Args:
            mesh_name: name of the mesh, as used by dispatch modes.
            dp_rank: index of the data-parallel shard; equal on all ranks of a model-parallel group.
            is_collect: True if this rank's output is part of the result; set it on exactly one rank of a
                model-parallel group.
            coords: coordinates along the model-parallel dimensions, such as ``{"tp": 1, "pp": 0}``, for dispatch
                modes that distinguish these dimensions.

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
        """Return this rank's place in the mesh; called once by the group.

        Raises:
            DispatchError: no mesh with this name is registered.
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
        """Write the state that is needed to replay a recorded call; the default writes nothing.

        Called on every rank before the recorded call. The files of all ranks are merged into one folder, so files with
        the same name must have the same content on all ranks.

        Args:
            folder: existing empty folder on this rank's node; each rank has its own.
        """

    def replay_state(self, folder: str) -> None:
        """Restore the state for a recorded call in a new worker; the inverse of :meth:`record_state`.

        Args:
            folder: folder with the files of :meth:`record_state`, possibly written by a different number of ranks.
        """

    def run_function(self, function: Callable[..., Any], roles: Sequence[str], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function with this worker, or with a dict role → worker if there are several roles."""
        subject: Any = self if len(roles) == 1 else {role: self._colocated[role] for role in roles}
        return function(subject, *args, **kwargs)
