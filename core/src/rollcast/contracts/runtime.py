"""The contract of runtimes: a runtime starts the processes of a group and carries calls to them.

A runtime that hosts workers builds a :class:`rollcast.WorkerHost` in each process and forwards calls to it.
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
    from rollcast.protocol.future import Cut  # importing it costs torch

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

#: Where a call's result goes; see :meth:`Runtime.call`.
Outcome = Literal["send", "keep", "drop"]
#: How a call ended that was cancelled; see :meth:`Runtime.cancel`.
Cancelled = Literal["ended", "interrupted", "unreachable"]


@config
class RuntimeConfig:
    """The keys of every ``runtime`` section; a runtime's own schema derives from this."""

    name: str = ""
    """Registry name of the runtime."""
    call_timeout_s: Seconds = 3600.0
    """Timeout of every blocking call in seconds."""
    launch_timeout_s: Seconds = 300.0
    """Timeout of placing and starting a worker group in seconds."""
    threads_per_worker: Positive | None = None
    """CPU threads per worker; null shares a node's cores evenly."""
    record: str | None = None
    """A method to record in `RUN_DIR/records`, such as `actor.update_actor:2` for its second call."""
    record_trajectories: bool = False
    """Write the rollouts of each step, as training gets them, to `RUN_DIR/rollouts`, for `trainer.replay`."""


@dataclass(frozen=True)
class RuntimeCapabilities:
    """Options of a group that a runtime honours.

    Attributes:
        runtime_env: processes start in :attr:`LaunchSpec.runtime_env`.
        detached: groups can outlive the process that started them.
        chained_calls: :meth:`Runtime.fetch` and the workers' stores take references of calls that have not ended, also
            inside other arguments. Handles to them then travel before the calls end.
        parallel_launch: :meth:`Runtime.launch` may be called from several threads at a time.
    """

    runtime_env: bool = False
    detached: bool = False
    chained_calls: bool = False
    parallel_launch: bool = False


@dataclass(frozen=True)
class HostInfo:
    """Where a host runs: node address, process id, and a port that it holds for a rendezvous.

    Attributes:
        control: the runtime's own way to reach the process during a call.
        cores: CPU cores of the node that the process may use.
    """

    node: str
    pid: int
    free_port: int
    control: Any = field(default=None, repr=False)
    cores: int = 1


@dataclass(frozen=True)
class Host:
    """One started process: the runtime's own handle, where it runs, and its place in the group."""

    handle: Any
    info: HostInfo
    context: WorkerContext = field(default_factory=WorkerContext)


@dataclass(frozen=True)
class CallFailure:
    """A failed call as it left the worker: all text, so that it always travels.

    Attributes:
        when: wall-clock seconds, to tell the first failure of a group from its consequences.
        cause: the exception itself if it can be pickled, else None.
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
    """Carries a :class:`CallFailure` from a worker's process to the controller."""

    def __init__(self, failure: CallFailure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return f"{self.failure.cause_type}: {self.failure.message}\n{self.failure.traceback}"


class CallFailed(RollcastError):
    """A rank's call failed; a runtime raises it, and the group turns it into a ``WorkerError``.

    Attributes:
        index: number of the awaited call that failed first.
        failure: the worker's own account; None if the process died or the deadline passed.
        detail: further facts, such as how the process died and its last output.
        timed_out: True if the deadline passed.
        cause_type: name of the error where there is no ``failure``.
        late: numbers of the calls that had not ended by then.
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
        """The worker's exception, if it could travel."""
        return self.failure.cause if self.failure else None


@dataclass(frozen=True)
class LaunchSpec:
    """A group to start.

    Attributes:
        name: of the group.
        roles: role → class with arguments; all live in every process of the group.
        env: environment variables of the processes, those of the roles included.
        threads: CPU threads a process; None shares the cores of a node evenly.
        runtime_env: runtime environment of the processes, those of the roles included.
        detached: the group outlives this process and is found again by its name.
        snapshot: returns the snapshot of plugins registered in this process, for :meth:`rollcast.WorkerHost.install`.
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
    """A detached group that was found again.

    Attributes:
        roles: role → class.
        hosts: by rank.
    """

    roles: Mapping[str, type]
    hosts: list[Host]


def cut_here(
    fetch: Callable[[Sequence[Any], float | None], list[Any]], cuts: Sequence[Cut], timeout: float | None
) -> list[Any]:
    """Fetch whole values, each once, and cut them in this process."""
    refs = {id(cut.ref): cut.ref for cut in cuts}
    found = dict(zip(refs, fetch(list(refs.values()), timeout), strict=True))
    return [cut.of(found[id(cut.ref)]) for cut in cuts]


class Store(Protocol):
    """Where a worker's process keeps results: the runtime's store of objects."""

    def put(self, value: Any) -> Any:
        """Store a value; return a reference that works in every process of the runtime."""

    def fetch(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        """Return the values of the references."""

    def fetch_rows(self, cuts: Sequence[Cut], timeout: float | None) -> list[Any]:
        """Return rows of stored batches, cut where they lie; by default they are fetched whole and cut here."""
        return cut_here(self.fetch, cuts, timeout)


class Recording(AbstractContextManager[None], Protocol):
    """A call that is being recorded; an exception raised inside is its outcome."""

    def end(self, result: Any) -> None:
        """Record the call's result."""


class Recorder(Protocol):
    """Listens to every call of a registered method."""

    def begin(self, group: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recording | None:
        """Start recording this call if it is the one requested; return the recording, else None."""


class Runtime(ABC):
    """Starts hosts, carries calls, stops what it started.

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
        """Build the runtime of a run; starts nothing.

        Args:
            config: an instance of ``config_schema``.
            processes: worker processes of all pools of the run.
            run_dir: run directory; None for a job without one.
        """

    @abstractmethod
    def nodes(self) -> list[NodeResources]:
        """Return the nodes of the cluster with their resources."""

    @abstractmethod
    def launch(self, pool: ResourcePool, spec: LaunchSpec, timeout: float) -> list[Host]:
        """Start a host for each rank of the pool, in rank order, and build its workers.

        Raises:
            ResourceError: the pool cannot be placed before the deadline (seconds); says what was missing.
            CallFailed: a worker's constructor raised.
        """

    def attach(self, name: str, timeout: float, roles: Mapping[str, type] | None = None) -> Attached:
        """Find a detached group that another process has started.

        Args:
            name: of the group.
            timeout: seconds within which every rank has to answer.
            roles: classes of the group, where they cannot be imported here under the names they had there.

        Raises:
            ResourceError: there is no such group, it has lost a rank, or its classes cannot be imported.
            CallFailed: a rank does not answer.
        """
        raise ResourceError(f"group {name!r} cannot be found again: {type(self).__name__} has no detached groups")

    @abstractmethod
    def call(self, host: Host, role: str, method: str, call: RankCall, outcome: Outcome = "send") -> Any:
        """Send one call; return a reference to its result at once.

        With outcome ``keep`` a DataProto that the method returns stays in the runtime's store, and the
        result is the :class:`~rollcast.protocol.future.StoredShard` that describes it. With ``drop``
        the result is None.

        Raises:
            DispatchError: an argument cannot be sent.
        """

    @abstractmethod
    def put(self, value: Any) -> Any:
        """Store a value that several calls share; return a reference that can stand for it in a call.

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
        """Return values that workers keep in the store, in order.

        Raises:
            WorkerError: a value is lost with the worker that kept it.
            WorkerTimeoutError: the deadline (seconds) passed.
        """

    def fetch_rows(self, cuts: Sequence[Cut], timeout: float | None) -> list[Any]:
        """Return rows of stored batches, in order; a runtime of several nodes cuts them where they lie.

        Errors are those of :meth:`fetch`, and ``DataProtoError`` for rows that a worker has damaged.
        """
        return cut_here(self.fetch, cuts, timeout)

    def wait_any(self, refs: Sequence[Any], timeout: float | None) -> list[int]:
        """Wait until one of the calls has ended; return the numbers of those that have, none after the deadline."""
        self.gather(refs[:1], timeout)
        return [0]

    def ready(self, refs: Sequence[Any]) -> bool:  # for those that override it
        """Return True if :meth:`gather` would not wait."""
        return True

    @abstractmethod
    def install_plugins(self, hosts: Sequence[Host], snapshot: bytes | None, timeout: float) -> None:
        """Replace the in-process registrations that the hosts know by a snapshot of the driver's.

        Raises:
            CallFailed: a host has died, or the deadline (seconds) passed.
        """

    @abstractmethod
    def cancel(self, refs: Sequence[Any], hosts: Sequence[Host]) -> list[Cancelled]:
        """Cancel calls that were sent to these hosts: those that wait do not start, those that run are interrupted.

        Code outside Python, such as a collective, is interrupted when it returns.

        Returns:
            For each call: ``ended`` if it had ended or will never start, ``interrupted`` if it was in the
            middle, ``unreachable`` if its host could not be asked.
        """

    def restart(self, hosts: Sequence[Host], pool: ResourcePool, spec: LaunchSpec, timeout: float) -> list[Host]:
        """Replace a group's processes, some of which may be dead, by new ones; arguments and errors as :meth:`launch`.

        Args:
            hosts: the processes that end.
        """
        self.stop(hosts)
        return self.launch(pool, spec, timeout)

    def lost(self, hosts: Sequence[Host]) -> dict[int, str]:
        """Return the hosts that are known to be dead: index → how they died. Never waits."""
        return {}

    def stacks(self, hosts: Sequence[Host]) -> list[str]:
        """Return for each host where its running call is, as lines of a traceback; empty where not known."""
        return [""] * len(hosts)

    def run_driver(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Run a function that drives worker groups in a process of the cluster; return its result.

        Interrupting the wait interrupts the function. What it prints appears here.

        Args:
            function: importable by its name where the process runs.
            args: can be pickled, as can the result.

        Raises:
            ResourceError: the runtime has no such processes.
            WorkerError: the process died.
            Exception: the function's own.
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
        """End everything that this runtime started; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


runtimes: Registry[type[Runtime]] = Registry(
    "rollcast.runtimes",
    subclass_of(Runtime),
    "runtime.name",
    description="hosts of workers, such as processes of this machine or of a cluster",
)
