"""Health checks of Ray: its version, its folders, a cluster to join, and what earlier sessions left behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollcast.contracts.health import BaseHealthCheck, Finding, HealthSetup, ok, problem, warning
from rollcast.errors import ResourceError

__all__ = ["RayCheck"]

_GIB = 2**30
#: Ray's processes by which a session is known.
_PROCESSES = ("raylet", "gcs_server")
#: Bytes that a folder of sessions may take before it is worth a word.
_MUCH_LOG = 5 * _GIB
_STORE_MINIMUM = 75 * 2**20  # Ray's own
_NICENESS = "RAY_worker_niceness"


class RayCheck(BaseHealthCheck):
    """Ray on this machine, and the cluster that a run would join."""

    subject = "Ray"
    timeout_s = 120.0

    def run(self, setup: HealthSetup) -> Iterator[Finding]:
        """Import Ray, look at the folder and processes of its sessions, and connect to a cluster if one is named."""
        if setup.get("runtime.name", "ray") != "ray":
            return
        try:
            import ray
        except (ImportError, OSError) as error:
            fix = "pip install --force-reinstall ray, in the environment of rollcast-ray"
            yield problem("import", f"Ray cannot be imported: {error}", fix)
            return
        yield ok("import", f"Ray {ray.__version__}")
        yield self._folder()
        yield self._object_store(setup.get("runtime.object_store_memory"))
        address = setup.get("runtime.address") or os.environ.get("RAY_ADDRESS")
        if address:
            yield from self._cluster(ray, str(address))
        yield from self._left_behind()
        yield from self._niceness(bool(address))

    def _folder(self) -> Finding:
        from rollcast_ray.machine import check_temp_dir

        try:
            check_temp_dir()
        except ResourceError as error:
            return problem("folder", str(error), "export TMPDIR=/tmp, or another short folder outside the environment")
        return ok("folder", f"{tempfile.gettempdir()}/ray")

    def _object_store(self, asked: int | None) -> Finding:
        from rollcast_ray.machine import default_object_store

        size, shared = default_object_store(), Path("/dev/shm")  # noqa: S108  # where Ray keeps its objects
        message = f"an embedded Ray's object store would have {size / _GIB:.1f} GiB"
        if shared.is_dir() and asked is not None:
            room = os.statvfs(shared)
            free = room.f_bavail * room.f_frsize
            if asked > free:
                message = f"runtime.object_store_memory={asked} is more than the {free} bytes that {shared} has free"
                return problem("object store", f"{message}; Ray falls back to a slow disk", f"lower it below {free}")
        if size < _STORE_MINIMUM:
            fix = "more shared memory (container: --shm-size=16g), or delete what is left in /dev/shm"
            return problem("object store", f"{message}; Ray needs {_STORE_MINIMUM} bytes", fix)
        return ok("object store", message)

    def _cluster(self, ray: Any, address: str) -> Iterator[Finding]:
        from rollcast_ray.machine import require_reachable

        try:
            require_reachable(address)
            ray.init(address, log_to_driver=False, configure_logging=False)
        except (OSError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:400]
            fix = "ray status at the cluster's head; or unset RAY_ADDRESS and runtime.address for a Ray of this machine"
            if "ersion mismatch" in reason:
                fix = "install the cluster's versions of Python and Ray here, or this environment on every node"
            yield problem("cluster", f"the cluster at {address} cannot be joined: {reason}", fix)
            return
        nodes = [node for node in ray.nodes() if node["Alive"]]
        devices = int(ray.cluster_resources().get("GPU", 0))
        ray.shutdown()
        yield ok("cluster", f"{address}: {len(nodes)} nodes, {devices} GPUs, the same Python and Ray as here")

    def _left_behind(self) -> Iterator[Finding]:
        import psutil  # type: ignore[import-untyped]

        orphans: list[int] = []
        for process in psutil.process_iter(["name", "ppid", "uids", "pid"]):
            about = process.info
            # Ended drivers' processes, and those of `ray start`, have init for their parent.
            is_mine = about["uids"] is not None and about["uids"].real == os.getuid()
            if about["name"] in _PROCESSES and about["ppid"] == 1 and is_mine:
                orphans.append(about["pid"])
        if orphans:
            listed = ", ".join(map(str, orphans))
            numbers = " ".join(map(str, orphans))
            fix = f"kill {numbers} ends it (ray stop ends every Ray on this machine); RAY_ADDRESS=auto joins it"
            yield warning("sessions", f"a Ray without a driver runs here (processes {listed}) and holds memory", fix)
        folder = Path(tempfile.gettempdir()) / "ray"
        size = _size_of(folder)
        if size > _MUCH_LOG:
            fix = f"delete the folders of ended sessions: ls -d {folder}/session_*"
            yield warning("session files", f"{folder} takes {size / _GIB:.1f} GiB", fix)
        elif not orphans:
            yield ok("sessions", "none was left behind")

    def _niceness(self, joins: bool) -> Iterator[Finding]:
        value = os.environ.get(_NICENESS)
        # An embedded Ray sets it; a cluster has what its `ray start` was given.
        if joins and value is None:
            yield warning(
                "niceness",
                "a cluster's workers run at niceness 15 unless it was started otherwise; other processes starve them",
                "start the cluster with RAY_worker_niceness=0 ray start ..., and export it here",
            )


def _size_of(folder: Path) -> int:
    """Return the bytes of the files below a folder that can be read."""
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # a running session deletes files
                total += Path(top, name).lstat().st_blocks * 512
    return total
