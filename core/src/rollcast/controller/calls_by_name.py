"""Calls of a worker group that name the method, or bring a function."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Self

from rollcast.controller.dispatch import RankCall
from rollcast.controller.mesh import MeshInfo
from rollcast.controller.runtime import LaunchSpec, Runtime

if TYPE_CHECKING:
    from rollcast.protocol.future import DataProtoFuture

__all__ = ["CallsByName"]


class CallsByName(ABC):
    """What a :class:`WorkerGroup` can be asked beside its registered methods."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @abstractmethod
    def mesh(self, mesh_name: str) -> Sequence[MeshInfo]:
        """Each rank's place in the mesh."""

    @property
    @abstractmethod
    def roles(self) -> tuple[str, ...]:
        """The roles that this view sees."""

    @property
    @abstractmethod
    def role(self) -> str:
        """The role that this view calls."""

    @property
    @abstractmethod
    def launch_spec(self) -> LaunchSpec | None:
        """What the group was started with; None if it was attached to."""

    @property
    @abstractmethod
    def runtime(self) -> Runtime:
        """What carries the group's calls."""

    @abstractmethod
    def send(
        self,
        method: str,
        calls: Sequence[tuple[int, RankCall | None]],
        keep: bool = False,
        answering: Collection[int] | None = None,
    ) -> list[Any]:
        """Start calls on the given ranks."""

    @abstractmethod
    def receive(
        self, method: str, ranks: Sequence[int], refs: Sequence[Any], timeout: float | None = None
    ) -> list[Any]:
        """Wait for the results of :meth:`send`."""

    @abstractmethod
    def _first_role(self) -> Self:
        """The view of the first of the roles."""

    def execute_all(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method (registered or not) with the same arguments on all ranks; outputs by rank."""
        ranks = range(self.world_size)
        return self.receive(method, ranks, self.send(method, [(rank, RankCall(args, kwargs)) for rank in ranks]))

    execute_all_sync = execute_all

    def execute_all_async(self, method: str, /, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """:meth:`execute_all` that returns at once; ``get()`` of what it returns waits for the outputs."""
        return self._execute_later(method, range(self.world_size), RankCall(args, kwargs), list)

    def execute_rank_zero(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call any method on rank 0."""
        return self.receive(method, [0], self.send(method, [(0, RankCall(args, kwargs))]))[0]

    execute_rank_zero_sync = execute_rank_zero

    def execute_rank_zero_async(self, method: str, /, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """:meth:`execute_rank_zero` that returns at once; ``get()`` of what it returns waits for the output."""
        return self._execute_later(method, [0], RankCall(args, kwargs), lambda outputs: outputs[0])

    def _execute_later(
        self, method: str, ranks: Sequence[int], call: RankCall, collect: Callable[[list[Any]], Any]
    ) -> DataProtoFuture:
        from rollcast.protocol.future import DataProtoFuture

        refs = self.send(method, [(rank, call) for rank in ranks])
        return DataProtoFuture(
            lambda timeout: collect(self.receive(method, ranks, refs, timeout)),
            self.runtime.fetch,
            functools.partial(self.runtime.ready, refs),
        )

    def execute_func(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``function(worker, *args, **kwargs)`` on all ranks; outputs by rank.

        On a view of several roles the function gets a dict of role → worker in place of the worker. It
        may be a coroutine function, a lambda or a closure: it travels by cloudpickle.

        Raises:
            WorkerError: it raised.
        """
        return self._first_role().execute_all("run_function", function, self.roles, *args, **kwargs)

    def execute_func_rank_zero(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """:meth:`execute_func` on rank 0 alone.

        Raises:
            WorkerError: it raised.
        """
        return self._first_role().execute_rank_zero("run_function", function, self.roles, *args, **kwargs)
