"""The contract of runtimes: what starts the processes of a group and carries calls to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollcast.controller.dispatch import RankCall
from rollcast.controller.hosting import CallFailure, HostInfo
from rollcast.controller.resource_pool import NodeResources, ResourcePool
from rollcast.controller.worker import ClassWithInitArgs
from rollcast.errors import RollcastError
from rollcast.plugins.registry import Registry, subclass_of

__all__ = ["CallFailed", "Host", "LaunchSpec", "Runtime", "runtimes"]


class CallFailed(RollcastError):
    """A rank's call failed; raised by a runtime for the group, which adds what it knows.

    Attributes:
        index: which of the waited-for calls failed first.
        failure: the worker's own account; None if the process died or the deadline passed.
        detail: what the runtime knows, such as how the process died and its last output.
        timed_out: the deadline passed.
        cause_type: name of what went wrong where there is no ``failure``.
    """

    def __init__(
        self,
        index: int,
        failure: CallFailure | None,
        detail: str = "",
        timed_out: bool = False,
        cause_type: str = "ProcessDied",
    ) -> None:
        super().__init__(index, failure, detail, timed_out, cause_type)
        self.index = index
        self.failure = failure
        self.detail = detail
        self.timed_out = timed_out
        self.cause_type = cause_type

    @property
    def cause(self) -> BaseException | None:
        """The worker's exception, if it could travel."""
        return self.failure.cause if self.failure else None


@dataclass(frozen=True)
class Host:
    """One started process: the runtime's own handle and where it runs."""

    handle: Any
    info: HostInfo


@dataclass(frozen=True)
class LaunchSpec:
    """A group to start.

    Attributes:
        name: of the group.
        roles: what lives in every process of it.
        env: environment variables of the processes.
        threads: CPU threads a process; None lets the runtime share the cores of a node evenly.
    """

    name: str
    roles: Mapping[str, ClassWithInitArgs[Any]]
    env: Mapping[str, str]
    threads: int | None = None


class Runtime(ABC):
    """Starts hosts, carries calls, stops what it started."""

    @abstractmethod
    def nodes(self) -> list[NodeResources]:
        """The nodes of the cluster and what each has in all."""

    @abstractmethod
    def launch(self, pool: ResourcePool, spec: LaunchSpec, timeout: float) -> list[Host]:
        """Start a host for each rank of the pool, in rank order, and build its workers.

        Raises:
            ResourceError: the pool cannot be placed before the deadline; says what was missing.
            CallFailed: a worker's constructor raised.
        """

    @abstractmethod
    def call(self, host: Host, role: str, method: str, call: RankCall, keep: bool = False) -> Any:
        """Send one call; returns a reference to its result at once.

        With ``keep`` a DataProto that the method returns stays in the runtime's store, and the result
        is the :class:`~rollcast.protocol.stored.StoredShard` that describes it.

        Raises:
            DispatchError: an argument cannot be sent.
        """

    @abstractmethod
    def put(self, value: Any) -> Any:
        """Store a value that several calls share; the reference can stand for it in a call.

        Raises:
            DispatchError: the value cannot be sent.
        """

    @abstractmethod
    def gather(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        """Wait for the results, in order.

        Raises:
            CallFailed: for the first call that failed, or when the deadline (seconds) passed.
        """

    @abstractmethod
    def fetch(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        """Values that workers keep in the store, in order.

        Raises:
            WorkerError: a value is lost with the worker that kept it.
            WorkerTimeoutError: the deadline (seconds) passed.
        """

    def ready(self, refs: Sequence[Any]) -> bool:
        """Whether :meth:`gather` would return without waiting."""
        return True

    @abstractmethod
    def install_parts(self, hosts: Sequence[Host], parts: bytes | None, timeout: float) -> None:
        """Make the driver's in-process registrations known to the hosts, in place of earlier ones.

        Raises:
            CallFailed: a host has died, or the deadline (seconds) passed.
        """

    @abstractmethod
    def cancel(self, refs: Sequence[Any]) -> None:
        """Give up calls that have not started; running ones end with their process."""

    @abstractmethod
    def stop(self, hosts: Sequence[Host]) -> None:
        """End the processes of a group."""

    @abstractmethod
    def shutdown(self) -> None:
        """End everything that this runtime started; may be called twice."""

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


runtimes: Registry[type[Runtime]] = Registry("rollcast.runtimes", subclass_of(Runtime), "runtime.name")
