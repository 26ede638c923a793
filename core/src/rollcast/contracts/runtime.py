"""Contract of runtimes, which start the processes of a worker group and send calls to them.

A runtime builds a :class:`rollcast.WorkerHost` in each process and forwards calls to the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from rollcast.contracts.config import Positive, Seconds, config
from rollcast.contracts.dispatch import RankCall
from rollcast.contracts.pools import NodeResources, ResourcePool
from rollcast.contracts.worker import ClassWithInitArgs, WorkerContext
from rollcast.errors import ResourceError, RollcastError
from rollcast.plugins import Registry, subclass_of

if TYPE_CHECKING:
    from rollcast.protocol import Cut  # imports torch

__all__ = [
    "Attached",
    "CallFailed",
    "CallFailure",
    "Cancelled",
    "Host",
    "HostInfo",
    "LaunchSpec",
    "Outcome",
    "Recorder",
    "Recording",
    "Runtime",
    "RuntimeCapabilities",
    "RuntimeConfig",
    "Store",
    "WorkerRaised",
    "cut_here",
    "runtimes",
]

#: Destination of a call's result; see :meth:`Runtime.call`.
Outcome = Literal["send", "keep", "drop"]
#: Outcome of cancelling a call; see :meth:`Runtime.cancel`.
Cancelled = Literal["ended", "interrupted", "unreachable"]


@config
class RuntimeConfig:
    """Base schema of ``runtime`` sections; the schema of each runtime derives from this class."""

    name: str = ""
    """Registry name of the runtime."""
    call_timeout_s: Seconds = 3600.0
    """Timeout of every blocking call in seconds."""
    launch_timeout_s: Seconds = 300.0
    """Timeout for placing and starting a worker group in seconds."""
    threads_per_worker: Positive | None = None
    """CPU threads per worker; null to divide a node's cores evenly among its workers."""
    record: str | None = None
    """Method whose call is recorded in `RUN_DIR/records`, such as `actor.update_actor:2` for the second call."""
    record_trajectories: bool = False
    """Write the rollouts of each step, as passed to training, to `RUN_DIR/rollouts`, for `trainer.replay`."""


@dataclass(frozen=True)
class RuntimeCapabilities:
    """Features of a runtime.

    Attributes:
        runtime_env: True if processes start in :attr:`LaunchSpec.runtime_env`.
        detached: True if groups can outlive the process that started them.
        chained_calls: True if :meth:`Runtime.fetch` and the workers' stores accept references of running calls, also
            nested in other arguments. A future can then be passed on before its call ends.
        parallel_launch: True if :meth:`Runtime.launch` may be called from several threads at a time.
    """

    runtime_env: bool = False
    detached: bool = False
    chained_calls: bool = False
    parallel_launch: bool = False


@dataclass(frozen=True)
class HostInfo:
    """A host's node address, process id, and a port that it reserves for a rendezvous.

    Attributes:
        control: runtime-specific address for reaching the process during a call.
        cores: number of CPU cores of the node that the process may use.
    """

    node: str
    pid: int
    free_port: int
    control: Any = field(default=None, repr=False)
    cores: int = 1


@dataclass(frozen=True)
class Host:
    """One started process: the runtime's handle to it, its address, and its place in the group."""

    handle: Any
    info: HostInfo
    context: WorkerContext = field(default_factory=WorkerContext)


@dataclass(frozen=True)
class CallFailure:
    """A failed call as the worker reports it, as text so that it can always be pickled.

    Attributes:
        when: wall-clock time in seconds, used to tell the first failure of a group from its consequences.
        cause: the exception if it can be pickled, else None.
    """

    role: str
    method: str
    rank: int
    node: str
    when: float
    cause_type: str
    message: str
    traceback: str
    log_lines: tuple[str, ...]
    cause: BaseException | None = None


class WorkerRaised(RollcastError):
    """An error that carries a :class:`CallFailure` from a worker's process to the controller."""

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return f"{self.failure.cause_type}: {self.failure.message}\n{self.failure.traceback}"


class CallFailed(RollcastError):
    """A failed call of a rank. Runtimes raise it, and the worker group converts it to a ``WorkerError``.

    Attributes:
        index: index of the first awaited call that failed.
        failure: the worker's report; None if the process died or the deadline passed.
        detail: further facts, such as how the process died and its last output.
        timed_out: True if the deadline passed.
        cause_type: name of the error if there is no ``failure``.
        late: indices of the calls that had not ended by then.
    """

    #: ``cause_type`` of a process that died or cannot be reached.
    DIED: ClassVar[str] = "ProcessDied"

    def __init__(
        self,
        index: int,
        failure: CallFailure | None,
        detail: str = "",
        timed_out: bool = False,
        cause_type: str = DIED,
        late: Sequence[int] = (),
    ) -> None:
        super().__init__(index, failure, detail, timed_out, cause_type, late)
        self.index, self.failure, self.detail = index, failure, detail
        self.timed_out, self.cause_type, self.late = timed_out, cause_type, tuple(late)

    @property
    def cause(self) -> BaseException | None:
        """The worker's exception; None if it could not be pickled."""
        return self.failure.cause if self.failure else None


@dataclass(frozen=True)
class LaunchSpec:
    """The specification of a group to start.

    Attributes:
        name: name of the group.
        roles: role → worker class with arguments; every process of the group hosts all roles.
        env: environment variables of the processes, including those of the roles.
        threads: CPU threads per process; None to divide the cores of a node evenly.
        runtime_env: runtime environment of the processes, including those of the roles.
        detached: True if the group outlives this process and can be attached to by its name.
        snapshot: function that returns a snapshot of the plugins registered in this process, for
            :meth:`rollcast.WorkerHost.install`.
    """

    name: str
    roles: Mapping[str, ClassWithInitArgs[Any]]
    env: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    detached: bool = False
    snapshot: Callable[[], bytes | None] = lambda: None


@dataclass(frozen=True)
class Attached:
    """A detached group as another process finds it.

    Attributes:
        roles: role → worker class.
        hosts: hosts by rank.
    """

    roles: Mapping[str, type]
    hosts: list[Host]


def cut_here(
    fetch: Callable[[Sequence[Any], float | None], list[Any]], cuts: Sequence[Cut], timeout: float | None
) -> list[Any]:
    """Fetch whole values, each only once, and cut the requested rows in this process."""
    refs = {id(cut.ref): cut.ref for cut in cuts}
    values = dict(zip(refs, fetch(list(refs.values()), timeout), strict=True))
    return [cut.of(values[id(cut.ref)]) for cut in cuts]


class Store(Protocol):
    """The runtime's object store, in which a worker's process keeps results."""

    def put(self, value: Any) -> Any:
        """Store a value and return a reference that is valid in every process of the runtime."""

    def fetch(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        """Return the values of the references."""

    def fetch_rows(self, cuts: Sequence[Cut], timeout: float | None) -> list[Any]:
        """Return rows of stored batches, cut on the node that stores them; the default fetches whole batches."""
        return cut_here(self.fetch, cuts, timeout)


class Recording(AbstractContextManager[None], Protocol):
    """A call that is being recorded; an exception raised inside the context is recorded as its outcome."""

    def end(self, result: Any) -> None:
        """Record the call's result."""


class Recorder(Protocol):
    """A listener to every call of a registered method."""

    def begin(self, group: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recording | None:
        """Start recording this call if it is the one requested; return the recording, else None."""


class Runtime(ABC):
    """Base class of runtimes, which start hosts, send calls to them and stop them.

    Attributes:
        recorder: listener to the calls of all groups.
    """

    #: Dataclass of the ``runtime`` section, derived from ``RuntimeConfig``; importable without torch.
    config_schema: ClassVar[type[RuntimeConfig]] = RuntimeConfig
    capabilities: ClassVar[RuntimeCapabilities] = RuntimeCapabilities()
    recorder: Recorder | None = None

    @classmethod
    @abstractmethod
    def from_config(cls, config: Any, *, processes: int, run_dir: Path | None = None) -> Self:
        """Build the runtime of a run without starting any process.

        Args:
            config: ``runtime`` section, an instance of ``config_schema``.
            processes: number of worker processes in all pools of the run.
            run_dir: run directory; None for a job without one.
        """

    @abstractmethod
    def nodes(self) -> list[NodeResources]:
        """Return the nodes of the cluster with their resources."""

    @abstractmethod
    def launch(self, pool: ResourcePool, spec: LaunchSpec, timeout: float) -> list[Host]:
        """Start a host for each rank of the pool and build its workers; return the hosts in rank order.

        Raises:
            ResourceError: the pool cannot be placed within ``timeout`` seconds; names the missing resources.
            CallFailed: a worker's constructor raised.
        """

    def attach(self, name: str, timeout: float, roles: Mapping[str, type] | None = None) -> Attached:
        """Attach to a detached group that another process has started.

        Args:
            name: name of the group.
            timeout: time in seconds within which every rank has to answer.
            roles: role → worker class, if the classes cannot be imported here under their original names.

        Raises:
            ResourceError: there is no such group, it has lost a rank, or its classes cannot be imported.
            CallFailed: a rank does not answer.
        """
        raise ResourceError(f"group {name!r} cannot be found again: {type(self).__name__} has no detached groups")

    @abstractmethod
    def call(self, host: Host, role: str, method: str, call: RankCall, outcome: Outcome = "send") -> Any:
        """Send one call; return a reference to its result at once.

        With outcome ``keep``, the columns of a DataProto that the method returns stay in the runtime's store, and the
        result has remote columns. With ``drop``, the result is None.

        Raises:
            DispatchError: an argument cannot be serialized.
        """

    @abstractmethod
    def put(self, value: Any) -> Any:
        """Store a value that several calls share and return a reference that replaces the value in a call.

        Raises:
            DispatchError: the value cannot be serialized.
        """

    @abstractmethod
    def gather(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        """Wait for calls to end and return their results, in order.

        Raises:
            CallFailed: a call failed (the first one is reported), or ``timeout`` seconds passed.
        """

    @abstractmethod
    def fetch(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        """Return values that workers have stored, in order.

        Raises:
            WorkerError: a value was lost with the worker that stored it.
            WorkerTimeoutError: ``timeout`` seconds passed.
        """

    def fetch_rows(self, cuts: Sequence[Cut], timeout: float | None) -> list[Any]:
        """Return rows of stored batches, in order; a multi-node runtime cuts them on the node that stores them.

        Raises the errors of :meth:`fetch`, and ``DataProtoError`` if stored rows have changed.
        """
        return cut_here(self.fetch, cuts, timeout)

    def wait_any(self, refs: Sequence[Any], timeout: float | None) -> list[int]:
        """Wait until a call has ended; return the indices of all ended calls, none if ``timeout`` seconds passed."""
        self.gather(refs[:1], timeout)
        return [0]

    def ready(self, refs: Sequence[Any]) -> bool:  # for those that override it
        """Return True if :meth:`gather` would return at once."""
        return True

    @abstractmethod
    def install_plugins(self, hosts: Sequence[Host], snapshot: bytes | None, timeout: float) -> None:
        """Replace the in-process plugin registrations of the hosts by a snapshot of the driver's.

        Raises:
            CallFailed: a host has died, or ``timeout`` seconds passed.
        """

    @abstractmethod
    def cancel(self, refs: Sequence[Any], hosts: Sequence[Host]) -> list[Cancelled]:
        """Cancel calls sent to ``hosts``: queued calls do not start, and running calls are interrupted.

        A call inside native code, such as a collective, is interrupted when it returns to Python.

        Returns:
            For each call: ``ended`` if it had ended or will never start, ``interrupted`` if it was running,
            ``unreachable`` if its host did not respond.
        """

    def restart(self, hosts: Sequence[Host], pool: ResourcePool, spec: LaunchSpec, timeout: float) -> list[Host]:
        """Replace the processes of a group, dead or alive, by new ones.

        ``pool``, ``spec``, ``timeout`` and the errors are those of :meth:`launch`.

        Args:
            hosts: processes to end.
        """
        self.stop(hosts)
        return self.launch(pool, spec, timeout)

    def lost(self, hosts: Sequence[Host]) -> dict[int, str]:
        """Return the hosts known to be dead: index → cause of death. Never blocks."""
        return {}

    def stacks(self, hosts: Sequence[Host]) -> list[str]:
        """Return the traceback of the running call of each host, as text; empty if unknown."""
        return [""] * len(hosts)

    def run_driver(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Run a function that drives worker groups in a process of the cluster and return its result.

        Interrupting this call interrupts the function. The function's output is printed here.

        Args:
            function: function that can be imported by its name in the process.
            args: arguments; they and the result must be picklable.

        Raises:
            ResourceError: the runtime cannot start such a process.
            WorkerError: the process died.
            Exception: any exception of the function.
        """
        raise ResourceError(
            f"{type(self).__name__} cannot run the training loop in another process; set trainer.on_driver=true, or "
            "choose a runtime of a cluster"
        )

    @abstractmethod
    def stop(self, hosts: Sequence[Host]) -> None:
        """End the processes of a group."""

    @abstractmethod
    def shutdown(self) -> None:
        """End all processes that this runtime started; may be called more than once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


runtimes: Registry[type[Runtime]] = Registry(
    "rollcast.runtimes",
    subclass_of(Runtime),
    "runtime.name",
    description="runtimes that host workers, in processes of this machine or of a cluster",
)
