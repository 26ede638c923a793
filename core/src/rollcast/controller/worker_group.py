"""Worker groups: call a method once, and it runs on every rank."""

from __future__ import annotations

import functools
import itertools
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from rollcast.contracts.dispatch import MeshInfo, RankCall, RankOutputs
from rollcast.contracts.pools import ResourcePool
from rollcast.contracts.runtime import CallFailed, Host, LaunchSpec, Outcome, Runtime
from rollcast.contracts.worker import ClassWithInitArgs, WorkerContext
from rollcast.controller.dispatch import Registered, iter_registered
from rollcast.errors import DispatchError, ResourceError, WorkerError, WorkerTimeoutError
from rollcast.plugins.inprocess import generation, snapshot

if TYPE_CHECKING:
    from rollcast.protocol.future import DataProtoFuture

__all__ = ["DEFAULT_TIMEOUT_S", "GroupMethod", "WorkerGroup"]

#: Default deadline of a blocking call, in seconds.
DEFAULT_TIMEOUT_S = 3600.0
#: Number of late ranks whose stacks an error shows.
_STACKS = 4
_counter = itertools.count()


class WorkerGroup:
    """One role's workers on all ranks of a pool; registered methods are called on the group.

    Args:
        resource_pool: how many processes, where.
        roles: one class, or role → class for workers that share each process.
        runtime: starts the processes.
        name: for messages; generated if empty.
        timeout: deadline of each blocking call, in seconds.
        launch_timeout: deadline of the start, in seconds.
        env: environment variables of the processes; a role's own are given with
            :meth:`ClassWithInitArgs.with_options`.
        threads: CPU threads a process; by default the node's cores are shared evenly.
        runtime_env: runtime environment of the processes, as Ray defines it; not every runtime has one.
        detached: the group and its reservation outlive this process; :meth:`attach` finds it again.

    A group of several roles is called through the views of :meth:`spawn`, or by role:
    ``group.actor.update_actor(batch)``.

    Raises:
        ResourceError: the pool cannot be placed.
        WorkerError: a constructor raised.
    """

    def __init__(
        self,
        resource_pool: ResourcePool,
        roles: ClassWithInitArgs[Any] | Mapping[str, ClassWithInitArgs[Any]],
        *,
        runtime: Runtime,
        name: str = "",
        timeout: float = DEFAULT_TIMEOUT_S,
        launch_timeout: float = 300.0,
        env: Mapping[str, str] | None = None,
        threads: int | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        detached: bool = False,
    ) -> None:
        by_role = dict(roles) if isinstance(roles, Mapping) else {"worker": roles}
        if not by_role:
            raise ResourceError("a worker group needs at least one role")
        if detached and not name:
            raise ResourceError("a detached group needs a name, by which it is found again")
        name = name or f"group{next(_counter)}"
        variables, process_env = _merged(name, by_role, env or {}, runtime_env or {})
        spec = LaunchSpec(name, by_role, variables, threads, process_env, detached, snapshot)
        known = generation()
        try:
            hosts = runtime.launch(resource_pool, spec, launch_timeout)
        except CallFailed as failed:
            where = (name, "+".join(by_role), "__init__", failed.index, None)
            raise _explain_failure(failed, *where) from failed.cause
        classes = {role: wrapped.cls for role, wrapped in by_role.items()}
        self._see(_Processes(runtime, name, classes, hosts, known, spec), tuple(by_role), timeout)

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        runtime: Runtime,
        roles: Mapping[str, type] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        attach_timeout: float = 60.0,
    ) -> Self:
        """Return a group that was started with ``detached=True``, possibly by another process.

        Args:
            name: of the group.
            runtime: of the same kind, joined to the same cluster.
            roles: its classes, where they cannot be imported here under the names they had there.
            timeout: deadline of each blocking call, in seconds.
            attach_timeout: seconds within which every rank has to answer.

        Raises:
            ResourceError: there is no such group, it has lost a rank, or its classes cannot be imported.
            WorkerError: a rank does not answer.
        """
        try:
            found = runtime.attach(name, attach_timeout, roles)
        except CallFailed as failed:
            raise _explain_failure(failed, name, "+".join(roles or ("*",)), "attach", failed.index, None) from None
        # Plugins of this process are sent with the first call; without any, the hosts keep theirs.
        shared = _Processes(runtime, name, dict(found.roles), found.hosts, generation=0)
        group = object.__new__(cls)
        group._see(shared, tuple(shared.roles), timeout)
        return group

    def _see(self, shared: _Processes, roles: tuple[str, ...], timeout: float) -> None:
        self._shared = shared
        self._roles = roles
        self._role = roles[0] if len(roles) == 1 else None
        self._timeout = timeout
        self._methods = self._bind()

    # -- properties ---------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._shared.hosts)

    @property
    def name(self) -> str:
        """The group's name."""
        return self._shared.name

    @property
    def role(self) -> str:
        """The role that this view calls.

        Raises:
            DispatchError: the group has several; take a view with :meth:`spawn`.
        """
        if self._role is None:
            raise DispatchError(
                f"{self.name} hosts several roles ({', '.join(self._roles)}): call methods through the views of spawn()"
            )
        return self._role

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that this view sees."""
        return self._roles

    @property
    def workers(self) -> Sequence[Host]:
        """The processes, by rank."""
        return tuple(self._shared.hosts)

    @property
    def contexts(self) -> Sequence[WorkerContext]:
        """Each rank's place in the group."""
        return tuple(host.context for host in self._shared.hosts)

    def mesh(self, mesh_name: str) -> Sequence[MeshInfo]:
        """Return each rank's place in the mesh; the workers are asked once.

        Raises:
            WorkerError: a worker has registered no such mesh.
        """
        key = (self.role, mesh_name)
        if key not in self._shared.meshes:
            self._shared.meshes[key] = self.execute_all("query_mesh", mesh_name)
        return self._shared.meshes[key]

    def __repr__(self) -> str:
        role = "+".join(self._roles)
        return f"{type(self).__name__}({self.name!r}, role={role!r}, world_size={self.world_size})"

    # -- views --------------------------------------------------------------------------------

    def spawn(self, roles: Iterable[str] | None = None) -> dict[str, WorkerGroup]:
        """Return a view for each role (all by default); the processes stay the same.

        Raises:
            DispatchError: the group does not host such a role.
        """
        return {role: self._view((role,), self._timeout) for role in self._hosted(roles)}

    def fuse(self, roles: Iterable[str] | None = None) -> Self:
        """Return one view of several roles (all by default): the inverse of :meth:`spawn`.

        Raises:
            DispatchError: the group does not host such a role.
        """
        return self._view(self._hosted(roles), self._timeout)

    def with_timeout(self, seconds: float) -> Self:
        """Return a view with another deadline for blocking calls."""
        return self._view(self._roles, seconds)

    def _hosted(self, roles: Iterable[str] | None) -> tuple[str, ...]:
        hosted = self._shared.roles
        wanted = tuple(dict.fromkeys(hosted if roles is None else roles))
        for role in wanted:
            if role not in hosted:
                raise DispatchError(f"{self.name} hosts no role {role!r}; it hosts {', '.join(hosted)}")
        if not wanted:
            raise DispatchError(f"a view of {self.name} needs a role; it hosts {', '.join(hosted)}")
        return wanted

    def _view(self, roles: tuple[str, ...], timeout: float) -> Self:
        view = object.__new__(type(self))
        view._see(self._shared, roles, timeout)
        return view

    def _bind(self) -> dict[str, GroupMethod]:
        if self._role is None:
            return {}
        cls = self._shared.roles[self._role]
        return {name: GroupMethod(self, name, function, entry) for name, function, entry in iter_registered(cls)}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        methods = self.__dict__.get("_methods", {})
        if name in methods:
            return methods[name]
        roles = self.__dict__.get("_roles", ())
        if len(roles) > 1 and name in roles:
            return self._view((name,), self._timeout)
        if len(roles) != 1:
            known = f"call it on a view: spawn()[{next(iter(roles), 'role')!r}].{name}"
        else:
            known = f"registered: {', '.join(methods)}"
        raise AttributeError(f"{self!r} has no method {name!r}; {known}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._methods, *(self._roles if self._role is None else ())})

    # -- calls --------------------------------------------------------------------------------

    @property
    def launch_spec(self) -> LaunchSpec | None:
        """The specification of the group; None if it was attached to."""
        return self._shared.spec

    @property
    def runtime(self) -> Runtime:
        """The runtime that carries the group's calls."""
        return self._shared.runtime

    def send(
        self,
        method: str,
        calls: Sequence[tuple[int, RankCall | None]],
        keep: bool = False,
        answering: Collection[int] | None = None,
    ) -> list[Any]:
        """Start calls on the given ranks; an object that several ranks get is stored once.

        Args:
            method: of the role that this view calls.
            calls: rank and call; None is left out.
            keep: the workers keep the DataProtos that they return, and return descriptions.
            answering: ranks whose results are wanted, all by default; the others return None.
        """
        shared = self._shared
        if shared.closed:
            raise WorkerError(f"{self.name} is shut down; {method} cannot be called on it")
        role = self.role
        self._refuse_if_lost(method)
        self._install_new_plugins()
        present = [(rank, call) for rank, call in calls if call is not None]
        values = _SharedValues([call for _, call in present], shared.runtime.put)
        refs: list[Any] = []
        try:
            for rank, call in present:
                silent = answering is not None and rank not in answering
                outcome: Outcome = "drop" if silent else "keep" if keep else "send"
                refs.append(shared.runtime.call(shared.hosts[rank], role, method, values.replace(call), outcome))
        except BaseException:
            # The calls that were sent would wait for the others in a collective.
            shared.runtime.cancel(refs, [shared.hosts[rank] for rank, _ in present[: len(refs)]])
            raise
        return refs

    def _install_new_plugins(self) -> None:
        shared, now = self._shared, generation()
        if shared.generation == now:
            return
        try:
            shared.runtime.install_plugins(shared.hosts, snapshot(), self._timeout)
        except CallFailed as failed:
            raise self._explained(failed, "install_plugins", range(self.world_size)) from failed.cause
        shared.generation = now

    def receive(
        self, method: str, ranks: Sequence[int], refs: Sequence[Any], timeout: float | None = None
    ) -> list[Any]:
        """Wait for the results of :meth:`send`.

        Raises:
            WorkerError: a rank failed; the calls of the others are cancelled.
        """
        shared = self._shared
        try:
            return shared.runtime.gather(refs, self._timeout if timeout is None else timeout)
        except CallFailed as failed:
            hosts = [shared.hosts[rank] for rank in ranks]
            failed.detail += self._where_they_are([ranks[index] for index in failed.late])
            shared.runtime.cancel(refs, hosts)
            raise self._explained(failed, method, ranks) from failed.cause

    def _where_they_are(self, late: Sequence[int]) -> str:
        """Return the stacks of the first of these ranks."""
        some = late[:_STACKS]
        stacks = self._shared.runtime.stacks([self._shared.hosts[rank] for rank in some])
        return "".join(
            f"\n  rank {rank} is at:\n" + textwrap.indent(stack, "    ")
            for rank, stack in zip(some, stacks, strict=True)
            if stack
        )

    @property
    def lost_ranks(self) -> list[int]:
        """The ranks whose processes are known to have died; a watch notices it within seconds."""
        return sorted(self._shared.runtime.lost(self._shared.hosts))

    def _refuse_if_lost(self, method: str) -> None:
        for rank, how in self.runtime.lost(self._shared.hosts).items():
            raise self._explained(CallFailed(rank, None, how), method, range(self.world_size))

    def _explained(self, failed: CallFailed, method: str, ranks: Sequence[int]) -> WorkerError:
        rank = ranks[failed.index]
        return _explain_failure(failed, self.name, self.role, method, rank, self._shared.hosts[rank])

    # -- calls by name -----------------------------------------------------------------------

    def execute_all(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method (registered or not) with the same arguments on all ranks; return the outputs by rank."""
        ranks = range(self.world_size)
        return self.receive(method, ranks, self.send(method, [(rank, RankCall(args, kwargs)) for rank in ranks]))

    execute_all_sync = execute_all

    def execute_all_async(self, method: str, /, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """Start :meth:`execute_all` and return a future of its outputs."""
        return self._execute_later(method, range(self.world_size), RankCall(args, kwargs), list)

    def execute_rank_zero(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call any method on rank 0 and return its output."""
        return self.receive(method, [0], self.send(method, [(0, RankCall(args, kwargs))]))[0]

    execute_rank_zero_sync = execute_rank_zero

    def execute_rank_zero_async(self, method: str, /, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """Start :meth:`execute_rank_zero` and return a future of its output."""
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
        """Run ``function(worker, *args, **kwargs)`` on all ranks; return the outputs by rank.

        On a view of several roles the function gets a dict of role → worker in place of the worker. It
        may be a coroutine function, a lambda or a closure: it travels by cloudpickle.

        Raises:
            WorkerError: the function raised.
        """
        return self._view(self._roles[:1], self._timeout).execute_all(
            "run_function", function, self.roles, *args, **kwargs
        )

    def execute_func_rank_zero(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """:meth:`execute_func` on rank 0 alone."""
        return self._view(self._roles[:1], self._timeout).execute_rank_zero(
            "run_function", function, self.roles, *args, **kwargs
        )

    # -- end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the group's processes; may be called twice, from any view."""
        if not self._shared.closed:
            self._shared.closed = True
            self._shared.runtime.stop(self._shared.hosts)


class GroupMethod:
    """A registered method, called on a group: dispatch, execute, collect.

    ``group.method(...)`` returns the result, ``group.method.remote(...)`` a handle to it at once.
    """

    def __init__(self, group: WorkerGroup, name: str, function: Callable[..., Any], entry: Registered) -> None:
        self._group = group
        self._entry = entry
        functools.update_wrapper(self, function, updated=())
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._entry.blocking:
            return self.remote(*args, **kwargs)
        finish, _ = self._start(args, kwargs, keep=False)
        return finish(None)

    def remote(self, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """Start the call and return a handle; the result stays with the workers until it is read."""
        from rollcast.protocol.future import DataProtoFuture

        finish, refs = self._start(args, kwargs, keep=True)
        runtime = self._group.runtime
        return DataProtoFuture(finish, runtime.fetch, functools.partial(runtime.ready, refs))

    def _start(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], keep: bool
    ) -> tuple[Callable[[float | None], Any], list[Any]]:
        """Send the calls; return a function that waits for the result, and the references that it waits for."""
        entry, group = self._entry, self._group
        recorder = group.runtime.recorder
        recording = recorder.begin(group, self.__name__, args, kwargs) if recorder is not None else None
        with recording or nullcontext(), self._named_in_errors():
            calls = entry.dispatch_mode.distribute(group, args, kwargs)
            ranks = [r for r in entry.execute_mode.ranks(group.world_size) if calls.per_rank[r] is not None]
            refs = group.send(self.__name__, [(r, calls.per_rank[r]) for r in ranks], keep, calls.answering)

        def finish(timeout: float | None) -> Any:
            with recording or nullcontext():
                outputs = group.receive(self.__name__, ranks, refs, timeout)
                if keep:
                    outputs = [_as_handle(output, group.runtime.fetch) for output in outputs]
                with self._named_in_errors():
                    found = RankOutputs(outputs, ranks, calls.state, entry.execute_mode.name)
                    result = entry.dispatch_mode.join(group, found)
                if recording is not None:
                    recording.end(result)
            return result

        return finish, refs

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        """Add the method's name to a mode's error; a mode does not know the method that it serves."""
        try:
            yield
        except DispatchError as error:
            error.add_note(f"in a call of {self!r}")
            raise

    def __repr__(self) -> str:
        return f"<method {self.__name__} of {self._group!r}>"


def _as_handle(output: Any, fetch: Any) -> Any:
    from rollcast.protocol.future import DataProtoFuture, StoredShard

    return DataProtoFuture.of_shard(output, fetch) if isinstance(output, StoredShard) else output


class _SharedValues:
    """Puts references in place of the values that several calls share.

    A value is stored when the first call that has it is sent, so that this rank works while the next
    value is stored.
    """

    def __init__(self, calls: Sequence[RankCall], put: Callable[[Any], Any]) -> None:
        large = [id(value) for call in calls for value in _values(call) if getattr(value, "nbytes", 0)]
        self._shared = {key for key, count in Counter(large).items() if count > 1}
        self._put = put
        self._stored: dict[int, Any] = {}

    def replace(self, call: RankCall) -> RankCall:
        """Return the call with references in place of shared values."""
        if not any(id(value) in self._shared for value in _values(call)):
            return call
        return RankCall(
            tuple(self._reference(value) for value in call.args),
            {key: self._reference(value) for key, value in call.kwargs.items()},
        )

    def _reference(self, value: Any) -> Any:
        if id(value) not in self._shared:
            return value
        if id(value) not in self._stored:
            self._stored[id(value)] = self._put(value)
        return self._stored[id(value)]


def _values(call: RankCall) -> tuple[Any, ...]:
    return (*call.args, *call.kwargs.values())


@dataclass
class _Processes:
    """The processes that all views of one group share.

    Attributes:
        generation: generation of this process's in-process plugins that the hosts know.
        meshes: role and mesh name → each rank's place.
    """

    runtime: Runtime
    name: str
    roles: dict[str, type]
    hosts: list[Host]
    generation: int
    spec: LaunchSpec | None = None
    meshes: dict[tuple[str, str], list[MeshInfo]] = field(default_factory=dict)
    closed: bool = False


def _explain_failure(
    failed: CallFailed, group: str, role: str, method: str, rank: int, host: Host | None
) -> WorkerError:
    """Return the error for a failed group call: where it failed first, why, and the last log lines."""
    failure = failed.failure
    node = failure.node if failure else (host.info.node if host else "unknown node")
    rank = failure.rank if failure else rank
    role = failure.role if failure else role
    where = f"{group}.{role}.{method} failed on rank {rank} (node {node})"
    if failed.timed_out:
        error: WorkerError = WorkerTimeoutError(f"{where}: {failed.detail}")
    elif failure is not None:
        lines = "".join(f"\n    {line}" for line in failure.log_lines)
        log = f"\n  last log lines of the worker:{lines}" if lines else ""
        error = WorkerError(f"{where}: {failure.cause_type}: {failure.message}{log}")
        error.cause_type = failure.cause_type
        error.remote_traceback = failure.traceback
        error.add_note(f"Traceback on rank {rank}:\n{failure.traceback.rstrip()}")
    else:
        error = WorkerError(f"{where}: {failed.detail}")
        error.cause_type = failed.cause_type
    error.group, error.role, error.method, error.rank, error.node = group, role, method, rank, node
    return error


def _merged(
    name: str,
    roles: Mapping[str, ClassWithInitArgs[Any]],
    env: Mapping[str, str],
    runtime_env: Mapping[str, Any],
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the environment variables and the runtime environment of processes that host these roles.

    Raises:
        ResourceError: two roles, which share a process, want different values.
    """

    def of_roles(kind: str, wishes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        source: dict[str, str] = {}
        for role, wish in wishes.items():
            for key, value in wish.items():
                if key in merged and merged[key] != value:
                    raise ResourceError(
                        f"roles {source[key]!r} and {role!r} of {name} share a process, but want {kind} {key} to "
                        f"be {merged[key]!r} and {value!r}; place them in different pools, or let them agree"
                    )
                merged[key], source[key] = value, role
        return merged

    wishes = {role: dict(cls.runtime_env) for role, cls in roles.items()}
    variables = {role: wish.pop("env_vars", {}) for role, wish in wishes.items()}
    merged = {**runtime_env, **of_roles("runtime_env", wishes)}
    env_vars = {**runtime_env.get("env_vars", {}), **of_roles("env_vars", variables)}
    process_env = {**merged, "env_vars": env_vars} if env_vars else merged
    return {**env, **of_roles("env", {role: cls.env for role, cls in roles.items()})}, process_env
