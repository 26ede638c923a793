"""The processes of a group, which all its views share; and the one error for a call that failed there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollcast.controller.mesh import MeshInfo
from rollcast.controller.resource_pool import ResourcePool
from rollcast.controller.runtime import CallFailed, Host, LaunchSpec, Runtime
from rollcast.errors import WorkerError, WorkerTimeoutError
from rollcast.plugins.inprocess import generation, snapshot

__all__ = ["GroupHosts", "explain_failure"]


class GroupHosts:
    """The processes that all views of one group share.

    Args:
        runtime: carries calls to them.
        name: of the group.
        roles: role → class.
        hosts: by rank.
        parts_generation: which of this process's registrations the hosts know.
    """

    def __init__(
        self, runtime: Runtime, name: str, roles: Mapping[str, type], hosts: Sequence[Host], parts_generation: int
    ) -> None:
        self.runtime = runtime
        self.name = name
        self.roles = dict(roles)
        self.hosts = list(hosts)
        self.meshes: dict[tuple[str, str], list[MeshInfo]] = {}
        self.closed = False
        self.spec: LaunchSpec | None = None
        self.parts_generation = parts_generation

    @classmethod
    def launch(cls, runtime: Runtime, pool: ResourcePool, spec: LaunchSpec, timeout: float) -> GroupHosts:
        """Start a group.

        Raises:
            ResourceError: the pool cannot be placed.
            WorkerError: a constructor raised.
        """
        known = generation()
        try:
            hosts = runtime.launch(pool, spec, timeout)
        except CallFailed as failed:
            raise explain_failure(
                failed, spec.name, "+".join(spec.roles), "__init__", failed.index, None
            ) from failed.cause
        made = cls(runtime, spec.name, {role: wrapped.cls for role, wrapped in spec.roles.items()}, hosts, known)
        made.spec = spec
        return made

    @classmethod
    def attach(cls, runtime: Runtime, name: str, timeout: float, roles: Mapping[str, type] | None) -> GroupHosts:
        """Find a detached group.

        Raises:
            ResourceError: it cannot be found.
            WorkerError: a rank does not answer.
        """
        try:
            found = runtime.attach(name, timeout, roles)
        except CallFailed as failed:
            raise explain_failure(failed, name, "+".join(roles or ("*",)), "attach", failed.index, None) from None
        # What was registered here is sent with the first call; where nothing was, nothing is taken away.
        return cls(runtime, name, found.roles, found.hosts, parts_generation=0)

    def install_new_parts(self, timeout: float) -> None:
        """Send what was registered in-process since the last call."""
        now = generation()
        if self.parts_generation != now:
            self.runtime.install_plugins(self.hosts, snapshot(), timeout)
            self.parts_generation = now


def explain_failure(
    failed: CallFailed, group: str, role: str, method: str, rank: int, host: Host | None
) -> WorkerError:
    """The one error for a failed group call: where it failed first, why, and the last log lines."""
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
