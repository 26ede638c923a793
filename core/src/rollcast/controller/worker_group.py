"""Worker groups, on which one call of a method runs it on every rank."""

from __future__ import annotations

import functools
import itertools
import logging
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from rollcast.contracts.dispatch import Expected, MeshInfo, RankCall, RankOutputs
from rollcast.contracts.logs import log_environment
from rollcast.contracts.pools import ResourcePool
from rollcast.contracts.runtime import Attached, CallFailed, Host, LaunchSpec, Outcome, Runtime
from rollcast.contracts.worker import ClassWithInitArgs, WorkerContext
from rollcast.controller.arguments import is_batch, is_future
from rollcast.controller.calls import SharedValues, Unawaited, by_rank
from rollcast.controller.dispatch import Registered, iter_registered
from rollcast.errors import DispatchError, ResourceError, WorkerError, WorkerTimeoutError
from rollcast.plugins.inprocess import generation, snapshot

if TYPE_CHECKING:
    from rollcast.protocol._remote import Call, Fetch, RowMap
    from rollcast.protocol.future import DataProtoFuture

__all__ = ["DEFAULT_TIMEOUT_S", "GroupMethod", "WorkerGroup"]

logger = logging.getLogger(__name__)
W = TypeVar("W")
P = ParamSpec("P")

#: Default deadline of a blocking call, in seconds.
DEFAULT_TIMEOUT_S = 3600.0
#: Largest number of late ranks whose stacks an error shows.
_STACKS = 4
#: Largest number of ranks that an error lists.
_NAMED = 8
_counter = itertools.count()


class WorkerGroup:
    """The workers of a role on all ranks of a pool; registered methods can be called on the group.

    Args:
        resource_pool: pool of the group's processes.
        roles: one class, or role → class for workers that share each process.
        runtime: runtime that starts the processes.
        name: name of the group; generated if empty.
        timeout: deadline of each blocking call, in seconds.
        launch_timeout: deadline of the start, in seconds.
        env: environment variables of the processes; set those of a single role with
            :meth:`ClassWithInitArgs.with_options`.
        threads: CPU threads per process; by default the node's cores are divided evenly.
        runtime_env: runtime environment of the processes, as defined by Ray; not supported by every runtime.
        detached: True if the group and its reservation outlive this process; use :meth:`attach` to connect to it.

    Call the methods of a group with several roles through the views of :meth:`spawn`, or by role:
    ``group.actor.update_actor(batch)``.

    A failure that interrupts other ranks in the middle of a call *poisons* the group: their next collective could
    pair with the interrupted one, so every call is refused until :meth:`restart`.

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
        launched = _Launched(resource_pool, spec, launch_timeout)
        self._see(_Processes(runtime, name, classes, hosts, known, launched), tuple(by_role), timeout)

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
        """Attach to a group that was started with ``detached=True``, possibly by another process.

        Args:
            name: name of the group.
            runtime: runtime of the same kind, connected to the same cluster.
            roles: role → class, if the classes cannot be imported here under their original names.
            timeout: deadline of each blocking call, in seconds.
            attach_timeout: time in seconds within which every rank has to answer.

        Raises:
            ResourceError: there is no such group, it has lost a rank, or its classes cannot be imported.
            WorkerError: a rank does not answer.
        """
        try:
            attached = runtime.attach(name, attach_timeout, roles)
        except CallFailed as failed:
            raise _explain_failure(failed, name, "+".join(roles or ("*",)), "attach", failed.index, None) from None
        return cls.from_attached(attached, name, runtime=runtime, timeout=timeout)

    @classmethod
    def from_attached(
        cls, attached: Attached, name: str, *, runtime: Runtime, timeout: float = DEFAULT_TIMEOUT_S
    ) -> Self:
        """Return a group for the processes that a runtime attached to.

        Args:
            attached: processes by rank, and the classes of their roles.
            name: name of the group.
            runtime: runtime that sends the calls.
            timeout: deadline of each blocking call, in seconds.
        """
        # In-process plugins of this process are sent with the first call; if there are none, the hosts keep theirs.
        shared = _Processes(runtime, name, dict(attached.roles), attached.hosts, generation=0)
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
        """The role whose methods this view calls.

        Raises:
            DispatchError: the group has several roles; use a view from :meth:`spawn`.
        """
        if self._role is None:
            raise DispatchError(
                f"{self.name} hosts several roles ({', '.join(self._roles)}): call methods through the views of spawn()"
            )
        return self._role

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of this view."""
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
        """Return each rank's place in the mesh; the workers are queried only once.

        Raises:
            WorkerError: a worker has not registered the mesh.
        """
        key = (self.role, mesh_name)
        if key not in self._shared.meshes:
            self._shared.meshes[key] = self.execute_all("query_mesh", mesh_name)
        return self._shared.meshes[key]

    @property
    def meshes(self) -> Mapping[str, Sequence[MeshInfo]]:
        """The meshes queried so far: mesh name → each rank's place. :meth:`mesh` queries a mesh."""
        return {name: places for (role, name), places in self._shared.meshes.items() if role == self.role}

    def register_mesh(self, mesh_name: str, places: Sequence[MeshInfo] | None) -> None:
        """Set each rank's place in a mesh, for workers that do not register it; None to query the workers again.

        Raises:
            DispatchError: the number of places differs from the number of ranks.
        """
        if places is None:
            self._shared.meshes.pop((self.role, mesh_name), None)
            return
        if len(places) != self.world_size:
            raise DispatchError(
                f"mesh {mesh_name!r} of {self.name} has {len(places)} places, the group has {self.world_size} ranks; "
                "give one MeshInfo for each rank, in rank order"
            )
        self._shared.meshes[self.role, mesh_name] = list(places)

    @property
    def entries(self) -> Mapping[str, Registered]:
        """The registration of each method that can be called on this view, by name."""
        return {name: method.entry for name, method in self._methods.items()}

    def __repr__(self) -> str:
        role = "+".join(self._roles)
        return f"{type(self).__name__}({self.name!r}, role={role!r}, world_size={self.world_size})"

    # -- views --------------------------------------------------------------------------------

    def spawn(self, roles: Iterable[str] | None = None) -> dict[str, WorkerGroup]:
        """Return a view for each role (all by default) on the same processes.

        Raises:
            DispatchError: the group does not host such a role.
        """
        return {role: self._view((role,), self._timeout) for role in self._hosted(roles)}

    def fuse(self, roles: Iterable[str] | None = None) -> Self:
        """Return one view of several roles (all by default); the inverse of :meth:`spawn`.

        Raises:
            DispatchError: the group does not host such a role.
        """
        return self._view(self._hosted(roles), self._timeout)

    def with_timeout(self, seconds: float) -> Self:
        """Return a view with a different deadline for blocking calls."""
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
        """The specification of the group; None for an attached group."""
        launched = self._shared.launched
        return None if launched is None else launched.spec

    @property
    def runtime(self) -> Runtime:
        """The runtime that sends the group's calls."""
        return self._shared.runtime

    def send(
        self,
        method: str,
        calls: Sequence[tuple[int, RankCall | None]],
        keep: bool = False,
        answering: Collection[int] | None = None,
    ) -> list[Any]:
        """Start calls on the given ranks; an object sent to several ranks is stored once.

        Args:
            method: method of this view's role.
            calls: pairs of rank and call; None to leave the rank out.
            keep: True if the workers store returned DataProtos and return descriptions of them.
            answering: ranks whose results are needed; all by default. The other ranks return None.
        """
        shared = self._shared
        role = self.role
        shared.unawaited.report()
        self._refuse_if_unusable(method)
        self._install_new_plugins()
        present = [(rank, call) for rank, call in calls if call is not None]
        values = SharedValues([call for _, call in present], shared.runtime.put)
        refs: list[Any] = []
        try:
            for rank, call in present:
                silent = answering is not None and rank not in answering
                outcome: Outcome = "drop" if silent else "keep" if keep else "send"
                refs.append(shared.runtime.call(shared.hosts[rank], role, method, values.replace(call), outcome))
        except BaseException as error:
            # The calls already sent would wait for the missing ranks in a collective.
            sent = [rank for rank, _ in present[: len(refs)]]
            self._end_call(
                method, sent, refs, shared.hosts, f"could not be sent to every rank ({type(error).__name__})"
            )
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
        self,
        method: str,
        ranks: Sequence[int],
        refs: Sequence[Any],
        timeout: float | None = None,
        *,
        hosts: Sequence[Host] | None = None,
        give_up: bool = True,
    ) -> list[Any]:
        """Wait for the results of :meth:`send`.

        Args:
            method, ranks, refs: method and ranks passed to :meth:`send`, and the references that it returned.
            timeout: deadline in seconds; by default the view's.
            hosts: all processes of the group at the time of :meth:`send`; by default the current ones.
            give_up: True to cancel the calls if the deadline passes; False to let them continue, so that they can be
                awaited again.

        Raises:
            WorkerError: a rank failed; the calls of the others are cancelled, which may poison the group.
            WorkerTimeoutError: the deadline passed.
        """
        shared = self._shared
        hosts = shared.hosts if hosts is None else hosts
        if shared.poisoned and hosts is shared.hosts and not shared.runtime.ready(refs):
            raise self._refusal(method)
        try:
            return shared.runtime.gather(refs, self._timeout if timeout is None else timeout)
        except CallFailed as failed:
            where = ranks[failed.index]
            goes_on = failed.timed_out and not give_up
            if goes_on:
                failed.detail += ". The call goes on: wait for it again, or cancel() it"
            if failed.timed_out:
                failed.detail += self._where_they_are([(ranks[index], hosts[ranks[index]]) for index in failed.late])
            if not goes_on:
                died = failed.failure is None and failed.cause_type == CallFailed.DIED and len(refs) > 1
                why = "passed its deadline" if failed.timed_out else f"failed on rank {where}"
                failed.detail += self._end_call(method, ranks, refs, hosts, why, died)
            error = _explain_failure(failed, self.name, self.role, method, where, hosts[where])
            raise error from failed.cause

    def _cancel_call(self, method: str, ranks: Sequence[int], refs: Sequence[Any], hosts: Sequence[Host]) -> bool:
        """Cancel the calls of :meth:`send`; return True if one had not ended.

        Args:
            method, ranks, refs, hosts: see :meth:`receive`.
        """
        if self._shared.runtime.ready(refs):
            return False
        self._end_call(method, ranks, refs, hosts, "was cancelled")
        return True

    def _end_call(
        self,
        method: str,
        ranks: Sequence[int],
        refs: Sequence[Any],
        hosts: Sequence[Host],
        why: str,
        died: bool = False,
    ) -> str:
        """Cancel calls, and poison the group if a rank was interrupted; return text to append to the error message.

        Args:
            method, ranks, refs, hosts: see :meth:`receive`.
            why: reason for cancelling, for the error messages of later calls.
            died: True if a rank died during the call.
        """
        shared = self._shared
        ends = shared.runtime.cancel(refs, [hosts[rank] for rank in ranks])
        unreachable = [rank for rank, end in zip(ranks, ends, strict=True) if end == "unreachable"]
        left = [rank for rank, end in zip(ranks, ends, strict=True) if end in ("interrupted", "unreachable")]
        # A call on a single rank has no partner in a collective, and processes from before a restart are gone.
        if hosts is shared.hosts and not shared.poisoned and (died or (left and len(ranks) > 1)):
            in_call = (
                f" while {_name_ranks(left)} {'was' if len(left) == 1 else 'were'} in the middle of it" if left else ""
            )
            shared.poisoned = (
                f"{self.role}.{method} {why}{in_call}, and the ranks may disagree about which collective comes next"
            )
        if not unreachable:
            return ""
        where = ", ".join(f"{rank} (node {hosts[rank].info.node})" for rank in unreachable)
        message = f"could not be interrupted and may still run the call: rank {where}"
        logger.warning("%s.%s.%s: %s", self.name, self.role, method, message)
        return f"\n  {message}"

    def _where_they_are(self, late: Sequence[tuple[int, Host]]) -> str:
        """Return the stacks of the first few of these ranks."""
        some = late[:_STACKS]
        stacks = self._shared.runtime.stacks([host for _, host in some])
        return "".join(
            f"\n  rank {rank} is at:\n" + textwrap.indent(stack, "    ")
            for (rank, _), stack in zip(some, stacks, strict=True)
            if stack
        )

    @property
    def lost_ranks(self) -> list[int]:
        """The ranks whose processes are known to have died; a monitor detects a death within seconds."""
        return sorted(self._shared.runtime.lost(self._shared.hosts))

    @property
    def poisoned(self) -> str:
        """Reason why the group refuses calls until :meth:`restart`; empty if it accepts calls."""
        return self._shared.poisoned

    def _refuse_if_unusable(self, method: str) -> None:
        if self._shared.closed:
            raise WorkerError(f"{self.name} is shut down; {method} cannot be called on it")
        for rank, how in self.runtime.lost(self._shared.hosts).items():
            detail = f"{how}\n  the group can be called again after restart()"
            raise self._explained(CallFailed(rank, None, detail), method, range(self.world_size))
        if self._shared.poisoned:
            raise self._refusal(method)

    def _refusal(self, method: str) -> WorkerError:
        error = WorkerError(
            f"{self.name}.{self.role}.{method} is refused: {self._shared.poisoned}. The group is closed to "
            "calls until restart(), which rebuilds its processes"
        )
        error.group, error.role, error.method = self.name, self.role, method
        return error

    def _explained(self, failed: CallFailed, method: str, ranks: Sequence[int]) -> WorkerError:
        rank = ranks[failed.index]
        return _explain_failure(failed, self.name, self.role, method, rank, self._shared.hosts[rank])

    # -- typed calls --------------------------------------------------------------------------

    def submit(self, method: Callable[Concatenate[W, P], Any], *args: P.args, **kwargs: P.kwargs) -> DataProtoFuture:
        """Start a registered method, given as the function of the worker's class, and return a future of its result.

        Type checkers compare the arguments with the method's signature, and editors jump to it::

            values = group.submit(CriticWorker.compute_values, batch).select("values")

        Raises:
            DispatchError: the role of this view has no registered method of this name.
        """
        bound = self._methods.get(method.__name__)
        if bound is None:
            raise DispatchError(
                f"{self.name}: {method.__qualname__} is not a registered method of the role {self.role!r}, which has "
                f"{', '.join(self._methods) or 'none'}"
            )
        return bound.remote(*args, **kwargs)

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

        refs, hosts = self.send(method, [(rank, call) for rank in ranks]), self._shared.hosts
        return DataProtoFuture(
            lambda timeout: collect(self.receive(method, ranks, refs, timeout, hosts=hosts, give_up=False)),
            functools.partial(self.runtime.ready, refs),
            functools.partial(self._cancel_call, method, ranks, refs, hosts),
            refs,
        )

    def execute_func(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``function(worker, *args, **kwargs)`` on all ranks; return the outputs by rank.

        On a view of several roles, the function gets a dict role → worker instead of the worker. The function is sent
        with cloudpickle, so it may be a coroutine function, a lambda or a closure.

        Raises:
            WorkerError: the function raised.
        """
        return self._view(self._roles[:1], self._timeout).execute_all(
            "run_function", function, self.roles, *args, **kwargs
        )

    def execute_func_rank_zero(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run :meth:`execute_func` on rank 0 only; return its output."""
        return self._view(self._roles[:1], self._timeout).execute_rank_zero(
            "run_function", function, self.roles, *args, **kwargs
        )

    # -- end ----------------------------------------------------------------------------------

    def restart(self, timeout: float | None = None) -> None:
        """Replace all processes by new ones, with the same roles, arguments, pool and environment.

        Every view of the group calls the new processes. The new workers are in their initial state: loaded and
        trained state is lost, and results on the old workers can no longer be read.

        Args:
            timeout: deadline of the start in seconds; by default the group's ``launch_timeout``.

        Raises:
            ResourceError: the pool can no longer be placed; the group stays poisoned and can be restarted again.
            WorkerError: the group is shut down or was attached to, or a constructor raised.
        """
        shared = self._shared
        if shared.closed:
            raise WorkerError(f"{self.name} is shut down; start a new group")
        launched = shared.launched
        if launched is None:
            raise WorkerError(
                f"{self.name} was attached to, and the arguments of its workers are unknown here; "
                "restart it in the process that started it"
            )
        shared.poisoned = "its restart has failed"  # if one of the next lines raises
        known = generation()
        wait = launched.timeout if timeout is None else timeout
        try:
            shared.hosts = shared.runtime.restart(shared.hosts, launched.pool, launched.spec, wait)
        except CallFailed as failed:
            where = (self.name, "+".join(shared.roles), "__init__", failed.index, None)
            raise _explain_failure(failed, *where) from failed.cause
        shared.generation = known
        shared.meshes.clear()
        shared.poisoned = ""

    def shutdown(self) -> None:
        """End the group's processes; may be called more than once and from any view."""
        if not self._shared.closed:
            self._shared.closed = True
            self._shared.unawaited.report_all()
            self._shared.runtime.stop(self._shared.hosts)


class GroupMethod:
    """A registered method of a group; a call dispatches, executes and collects.

    ``group.method(...)`` returns the result; ``group.method.remote(...)`` returns a future of the result at once.
    """

    def __init__(self, group: WorkerGroup, name: str, function: Callable[..., Any], entry: Registered) -> None:
        self._group = group
        self._entry = entry
        functools.update_wrapper(self, function, updated=())
        self.__name__ = name

    @property
    def entry(self) -> Registered:
        """The arguments of the method's ``@register``."""
        return self._entry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._entry.blocking:
            return self.remote(*args, **kwargs)
        return self._start(args, kwargs, keep=False).finish(None, give_up=True)

    def remote(self, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """Start the call and return a future; the result stays on the workers until it is read."""
        from rollcast.protocol.future import DataProtoFuture

        started, group = self._start(args, kwargs, keep=True), self._group
        runtime = group.runtime
        ready = functools.partial(runtime.ready, started.refs)
        awaited: list[Callable[[], None]] = []

        def resolve(timeout: float | None) -> Any:
            try:
                return started.finish(timeout)
            finally:
                awaited[0]()

        future = DataProtoFuture(
            resolve,
            ready,
            started.cancel,
            refs=started.refs,
            rows=started.rows,
            by_rank=functools.partial(self._by_rank, started, lambda: awaited[0]()),  # noqa: PLW0108  # filled in below
        )
        name = f"{group.name}.{group.role}.{self.__name__}"
        awaited.append(group._shared.unawaited.watch(future, name, lambda: started.finish(0.0), ready))
        return future

    def _by_rank(
        self, started: _Started, awaited: Callable[[], None], timeout: float | None
    ) -> Iterator[tuple[int, Any]]:
        group = self._group
        awaited()
        end = time.monotonic() + (group._timeout if timeout is None else timeout)

        def receive(rank: int, ref: Any) -> Any:
            (output,) = group.receive(
                self.__name__, [rank], [ref], max(end - time.monotonic(), 0.0), hosts=started.hosts, give_up=False
            )
            return _bound(output, group.runtime.fetch_rows)

        return by_rank(
            started.ranks, started.refs, group.runtime.wait_any, receive, lambda: max(end - time.monotonic(), 0.0)
        )

    def _start(self, args: Sequence[Any], kwargs: Mapping[str, Any], keep: bool) -> _Started:
        """Dispatch the arguments and send the calls."""
        entry, group = self._entry, self._group
        args = [_argument(value) for value in args]
        kwargs = {key: _argument(value) for key, value in kwargs.items()}
        recorder = group.runtime.recorder
        recording = recorder.begin(group, self.__name__, args, kwargs) if recorder is not None else None
        with recording or nullcontext(), self._named_in_errors():
            calls = entry.dispatch_mode.distribute(group, args, kwargs)
            ranks = [r for r in entry.execute_mode.ranks(group.world_size) if calls.per_rank[r] is not None]
            lazy = keep and entry.rows == "same" and group.runtime.capabilities.chained_calls
            expected = entry.dispatch_mode.expect(group, calls) if lazy else None
            refs = group.send(self.__name__, [(r, calls.per_rank[r]) for r in ranks], keep, calls.answering)
            hosts = group._shared.hosts
            rows = _promised(expected, dict(zip(ranks, refs, strict=True)), group.runtime.fetch_rows)
        argument_calls = [call for value in (*args, *kwargs.values()) if is_batch(value) for call in value.calls()]

        def finish(timeout: float | None, give_up: bool = False) -> Any:
            try:
                outputs = group.receive(self.__name__, ranks, refs, timeout, hosts=hosts, give_up=give_up)
            except WorkerError as error:
                # A call that continues has no outcome yet.
                goes_on = isinstance(error, WorkerTimeoutError) and not give_up
                with (None if goes_on else recording) or nullcontext():
                    _raise_first_cause(argument_calls, error)
                    raise
            with recording or nullcontext():
                if keep:
                    outputs = [_bound(output, group.runtime.fetch_rows) for output in outputs]
                if rows is not None:
                    rows.take_results(refs, outputs)
                with self._named_in_errors():
                    outputs_of_ranks = RankOutputs(outputs, ranks, calls.state, entry.execute_mode.name)
                    result = entry.dispatch_mode.join(group, outputs_of_ranks)
                if recording is not None:
                    recording.end(result)
            return result

        cancel = functools.partial(group._cancel_call, self.__name__, ranks, refs, hosts)
        return _Started(finish, refs, cancel, ranks, hosts, rows)

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        """Add the method's name to a dispatch mode's error, because the mode does not know the method."""
        try:
            yield
        except DispatchError as error:
            error.add_note(f"in a call of {self!r}")
            raise

    def __repr__(self) -> str:
        return f"<method {self.__name__} of {self._group!r}>"


def _argument(value: Any) -> Any:
    """Return what stands for a future, and of a batch the references to the results of awaited calls."""
    value = value.argument() if is_future(value) else value
    return value.settled() if is_batch(value) and value.is_remote else value


def _promised(expected: Expected | None, refs: Mapping[int, Any], fetch: Fetch) -> RowMap | None:
    """Return the rows of a call's result that are known before the call ends; None if unknown."""
    if expected is None:
        return None
    from rollcast.protocol.future import promise

    return promise([refs[rank] for rank in expected.ranks], expected.rows, expected.taken, fetch)


def _raise_first_cause(calls: Sequence[Call], error: WorkerError) -> None:
    """Raise the error of a call whose result was an argument, which explains more than the consequence ``error``."""
    for call in calls:
        if call.done():
            try:
                call.wait()
            except WorkerError as first:
                raise first from error


def _bound(output: Any, fetch: Any) -> Any:
    return output.bound(fetch) if is_batch(output) else output


@dataclass(frozen=True)
class _Started:
    """A call of a registered method in flight.

    Attributes:
        finish: function that waits for the result for at most the given seconds.
        refs: references to the results of the ranks.
        cancel: function that cancels the call on all ranks.
        ranks: rank of each reference.
        hosts: all processes of the group at the time of the call.
        rows: rows of the result, which are known before the call ends; None if unknown.
    """

    finish: Callable[..., Any]
    refs: list[Any]
    cancel: Callable[[], bool]
    ranks: Sequence[int]
    hosts: Sequence[Host]
    rows: RowMap | None = None


@dataclass(frozen=True)
class _Launched:
    """The arguments of a group's start, used again for a restart.

    Attributes:
        pool: pool of the group.
        spec: specification of the group.
        timeout: deadline of the start, in seconds.
    """

    pool: ResourcePool
    spec: LaunchSpec
    timeout: float


@dataclass
class _Processes:
    """The state of a group that all its views share.

    Attributes:
        hosts: hosts by rank. A restart replaces the list object, so a call can tell whether its processes are current.
        generation: generation of this process's in-process plugins that is installed on the hosts.
        launched: arguments of the start; None if the group was attached to.
        meshes: role and mesh name → each rank's place.
        poisoned: reason why calls are refused; empty if calls are accepted.
    """

    runtime: Runtime
    name: str
    roles: dict[str, type]
    hosts: list[Host]
    generation: int
    launched: _Launched | None = None
    meshes: dict[tuple[str, str], list[MeshInfo]] = field(default_factory=dict)
    poisoned: str = ""
    closed: bool = False
    unawaited: Unawaited = field(default_factory=Unawaited)


def _name_ranks(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {some}{more}"


def _explain_failure(
    failed: CallFailed, group: str, role: str, method: str, rank: int, host: Host | None
) -> WorkerError:
    """Build the error for a failed group call, with the first failing rank, its error and its last log lines."""
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
    """Merge the environment variables and the runtime environments of roles that share processes.

    Raises:
        ResourceError: two roles request different values, or a variable is one that the runtime sets for each rank.
    """
    asked = [env, runtime_env.get("env_vars", {})]
    asked += [wish for cls in roles.values() for wish in (cls.env, cls.runtime_env.get("env_vars", {}))]
    if refused := sorted(WorkerContext().environment().keys() & {key for wish in asked for key in wish}):
        raise ResourceError(
            f"env of {name} sets {', '.join(refused)}, which the runtime sets for each rank from its place in the "
            "group; leave them out, and read self.rank, self.world_size and self.context in the worker"
        )

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
    return {**log_environment(), **env, **of_roles("env", {role: cls.env for role, cls in roles.items()})}, process_env
