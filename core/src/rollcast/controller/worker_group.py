"""Worker groups: call a method once, and it runs on every rank."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Self

from rollcast.controller.calls_by_name import CallsByName
from rollcast.controller.decorator import iter_registered
from rollcast.controller.dispatch import RankCall
from rollcast.controller.group_hosts import GroupHosts, explain_failure
from rollcast.controller.group_method import GroupMethod
from rollcast.controller.hosting import Outcome
from rollcast.controller.mesh import MeshInfo
from rollcast.controller.resource_pool import ResourcePool
from rollcast.controller.runtime import CallFailed, Host, LaunchSpec, Runtime
from rollcast.controller.sharing import SharedValues
from rollcast.controller.worker import ClassWithInitArgs, WorkerContext
from rollcast.errors import DispatchError, ResourceError, WorkerError

__all__ = ["DEFAULT_TIMEOUT_S", "GroupMethod", "WorkerGroup"]

#: Deadline of a blocking call where nothing else is said, in seconds.
DEFAULT_TIMEOUT_S = 3600.0
#: Of how many late ranks an error shows where they are.
_STACKS = 4
_counter = itertools.count()


class WorkerGroup(CallsByName):
    """One role's workers on all ranks of a pool; registered methods are called on the group.

    Args:
        resource_pool: how many processes, where.
        roles: what lives in each process: one class, or role → class for colocated workers.
        runtime: what starts the processes.
        name: for messages; made up if empty.
        timeout: deadline of each blocking call, in seconds.
        launch_timeout: deadline of the start, in seconds.
        env: environment variables of the processes; a role's own are given with
            :meth:`ClassWithInitArgs.with_options`.
        threads: CPU threads a process; by default the node's cores are shared evenly.
        runtime_env: Ray's runtime environment of the processes.
        detached: the group and its reservation outlive this process; :meth:`attach` finds it again.

    A group of several roles is called through the views that :meth:`spawn` gives, or by role:
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
        spec = LaunchSpec(
            name or f"group{next(_counter)}", by_role, dict(env or {}), threads, dict(runtime_env or {}), detached
        )
        self._see(GroupHosts.launch(runtime, resource_pool, spec, launch_timeout), tuple(by_role), timeout)

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
        """A group that was started with ``detached=True``, perhaps by another process; ranks are the same.

        Args:
            name: as it was given there.
            runtime: of the same kind, joined to the same cluster.
            roles: its classes, where they cannot be imported here under the names they had there.
            timeout: deadline of each blocking call, in seconds.
            attach_timeout: seconds within which every rank has to answer.

        Raises:
            ResourceError: there is no such group, it has lost a rank, or its classes cannot be imported.
            WorkerError: a rank does not answer.
        """
        shared = GroupHosts.attach(runtime, name, attach_timeout, roles)
        group = object.__new__(cls)
        group._see(shared, tuple(shared.roles), timeout)
        return group

    def _see(self, shared: GroupHosts, roles: tuple[str, ...], timeout: float) -> None:
        self._shared = shared
        self._roles = roles
        self._role = roles[0] if len(roles) == 1 else None
        self._timeout = timeout
        self._methods = self._bind()

    # -- what it is ---------------------------------------------------------------------------

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
        """Where each rank stands."""
        return tuple(host.context for host in self._shared.hosts)

    def mesh(self, mesh_name: str) -> Sequence[MeshInfo]:
        """Each rank's place in the mesh, asked of the workers once.

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
        """A view for each role (all by default); the processes stay the same.

        Raises:
            DispatchError: the group does not host such a role.
        """
        return {role: self._view((role,), self._timeout) for role in self._hosted(roles)}

    def fuse(self, roles: Iterable[str] | None = None) -> Self:
        """One view of several roles (all by default), from any view of them: the inverse of :meth:`spawn`.

        Raises:
            DispatchError: the group does not host such a role.
        """
        return self._view(self._hosted(roles), self._timeout)

    def with_timeout(self, seconds: float) -> Self:
        """The same group with another deadline for blocking calls."""
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

    def _first_role(self) -> Self:
        return self._view(self._roles[:1], self._timeout)

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
        """What the group was started with; None if it was attached to."""
        return self._shared.spec

    @property
    def runtime(self) -> Runtime:
        """What carries the group's calls."""
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
            keep: the workers keep the DataProtos that they return, and describe them.
            answering: ranks whose results are wanted, all by default; the others give None.
        """
        shared = self._shared
        if shared.closed:
            raise WorkerError(f"{self.name} is shut down; {method} cannot be called on it")
        role = self.role
        self._refuse_if_lost(method)
        try:
            shared.install_new_parts(self._timeout)
        except CallFailed as failed:
            raise self._explained(failed, "install_plugins", range(self.world_size)) from failed.cause
        present = [(rank, call) for rank, call in calls if call is not None]
        values = SharedValues([call for _, call in present], shared.runtime.put)
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
        """Where the calls of the first of these ranks are."""
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
        shared = self._shared
        for rank, how in shared.runtime.lost(shared.hosts).items():
            raise self._explained(CallFailed(rank, None, how), method, range(self.world_size))

    def _explained(self, failed: CallFailed, method: str, ranks: Sequence[int]) -> WorkerError:
        rank = ranks[failed.index]
        return explain_failure(failed, self.name, self.role, method, rank, self._shared.hosts[rank])

    # -- end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the group's processes; may be called twice, from any view."""
        if not self._shared.closed:
            self._shared.closed = True
            self._shared.runtime.stop(self._shared.hosts)
