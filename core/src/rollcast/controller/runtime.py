"""The contract of runtimes: what starts the processes of a group and carries calls to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollcast.controller.dispatch import RankCall
from rollcast.controller.hosting import CallFailure, HostInfo, Outcome
from rollcast.controller.resource_pool import NodeResources, ResourcePool
from rollcast.controller.worker import ClassWithInitArgs, WorkerContext
from rollcast.errors import ResourceError, RollcastError
from rollcast.plugins import Registry, subclass_of

__all__ = ["Attached", "CallFailed", "Host", "LaunchSpec", "Recorder", "Recording", "Runtime", "runtimes"]


class CallFailed(RollcastError):
    """A rank's call failed; raised by a runtime for the group, which adds what it knows.

    Attributes:
        index: which of the waited-for calls failed first.
        failure: the worker's own account; None if the process died or the deadline passed.
        detail: what the runtime knows, such as how the process died and its last output.
        timed_out: the deadline passed.
        late: which calls had not ended by then.
        cause_type: name of what went wrong where there is no ``failure``.
    """

    def __init__(
        self,
        index: int,
        failure: CallFailure | None,
        detail: str = "",
        timed_out: bool = False,
        cause_type: str = "ProcessDied",
        late: Sequence[int] = (),
    ) -> None:
        super().__init__(index, failure, detail, timed_out, cause_type, late)
        self.index = index
        self.failure = failure
        self.detail = detail
        self.timed_out = timed_out
        self.cause_type = cause_type
        self.late = tuple(late)

    @property
    def cause(self) -> BaseException | None:
        """The worker's exception, if it could travel."""
        return self.failure.cause if self.failure else None


@dataclass(frozen=True)
class Host:
    """One started process: the runtime's own handle, where it runs, and its place in the group."""

    handle: Any
    info: HostInfo
    context: WorkerContext = field(default_factory=WorkerContext)


@dataclass(frozen=True)
class LaunchSpec:
    """A group to start.

    Attributes:
        name: of the group.
        roles: what lives in every process of it.
        env: environment variables of the processes, under those of the roles.
        threads: CPU threads a process; None lets the runtime share the cores of a node evenly.
        runtime_env: Ray's runtime environment of the processes, under those of the roles.
        detached: the group outlives this process, and is found again by its name.
    """

    name: str
    roles: Mapping[str, ClassWithInitArgs[Any]]
    env: Mapping[str, str]
    threads: int | None = None
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    detached: bool = False

    def merged_env(self) -> dict[str, str]:
        """The variables of the processes, those of the roles included.

        Raises:
            ResourceError: two roles, which share a process, want different values.
        """
        return {**self.env, **self._of_roles("env", {role: cls.env for role, cls in self.roles.items()})}

    def merged_runtime_env(self) -> dict[str, Any]:
        """The runtime environment of the processes, those of the roles included.

        Raises:
            ResourceError: two roles, which share a process, want different values.
        """
        wishes = {role: dict(cls.runtime_env) for role, cls in self.roles.items()}
        variables = {role: wish.pop("env_vars", {}) for role, wish in wishes.items()}
        merged = {**self.runtime_env, **self._of_roles("runtime_env", wishes)}
        env_vars = {**self.runtime_env.get("env_vars", {}), **self._of_roles("env_vars", variables)}
        return {**merged, "env_vars": env_vars} if env_vars else merged

    def _of_roles(self, what: str, wishes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        source: dict[str, str] = {}
        for role, wish in wishes.items():
            for key, value in wish.items():
                if key in merged and merged[key] != value:
                    raise ResourceError(
                        f"roles {source[key]!r} and {role!r} of {self.name} share a process, but want {what} {key} to "
                        f"be {merged[key]!r} and {value!r}; place them in different pools, or let them agree"
                    )
                merged[key], source[key] = value, role
        return merged


@dataclass(frozen=True)
class Attached:
    """A detached group that was found again.

    Attributes:
        roles: role → class.
        hosts: by rank.
    """

    roles: Mapping[str, type]
    hosts: list[Host]


class Recording(AbstractContextManager[None], Protocol):
    """A call that is being recorded; what is raised inside is its outcome."""

    def end(self, result: Any) -> None:
        """The call is over."""
        ...


class Recorder(Protocol):
    """Hears of calls; see :mod:`rollcast.controller.recording`."""

    def begin(self, group: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recording | None:
        """A call of the group is about to be made; gives what has to hear of its end, if it is recorded."""
        ...


class Runtime(ABC):
    """Starts hosts, carries calls, stops what it started.

    Attributes:
        recorder: hears of every call of a registered method, where a call is to be recorded.
    """

    recorder: Recorder | None = None

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

    def attach(self, name: str, timeout: float, roles: Mapping[str, type] | None = None) -> Attached:
        """Find a detached group that another process has started.

        Args:
            name: the group's.
            timeout: seconds within which every rank has to answer.
            roles: its classes, where they cannot be imported here under the names they had there.

        Raises:
            ResourceError: there is none of that name, it has lost a rank, or its classes cannot be
                imported here.
            CallFailed: a rank does not answer.
        """
        raise ResourceError(f"group {name!r} cannot be found again: {type(self).__name__} has no detached groups")

    @abstractmethod
    def call(self, host: Host, role: str, method: str, call: RankCall, outcome: Outcome = "send") -> Any:
        """Send one call; returns a reference to its result at once.

        With outcome ``keep`` a DataProto that the method returns stays in the runtime's store, and the
        result is the :class:`~rollcast.protocol.future.StoredShard` that describes it. With ``drop``
        the result is None.

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
    def install_plugins(self, hosts: Sequence[Host], parts: bytes | None, timeout: float) -> None:
        """Make the driver's in-process registrations known to the hosts, in place of earlier ones.

        Raises:
            CallFailed: a host has died, or the deadline (seconds) passed.
        """

    @abstractmethod
    def cancel(self, refs: Sequence[Any], hosts: Sequence[Host]) -> None:
        """Give up calls that were sent to these hosts: they do not start, or are interrupted.

        What runs outside of Python, such as a collective, is interrupted when it comes back.
        """

    def lost(self, hosts: Sequence[Host]) -> dict[int, str]:
        """Which of the hosts are known to be dead: index → how they died. Asks nobody, and waits for nothing."""
        return {}

    def stacks(self, hosts: Sequence[Host]) -> list[str]:
        """Where the calls that run on these hosts are, as lines of a traceback; empty where that is not known."""
        return [""] * len(hosts)

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


runtimes: Registry[type[Runtime]] = Registry(
    "rollcast.runtimes",
    subclass_of(Runtime),
    "runtime.name",
    description="hosts of workers, such as processes of this machine or of a cluster",
)
