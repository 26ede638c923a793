"""Health checks of the machine: shared memory, open files, disk, network."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.request import getproxies, proxy_bypass

from rollcast.contracts.health import BaseHealthCheck, Finding, HealthSetup, ok, problem, warning

__all__ = ["DiskCheck", "LimitsCheck", "NetworkCheck"]

GIB = 2**30
#: The size that Docker gives a container unless it is told otherwise, in bytes.
_DOCKERS_SHARED = 64 * 2**20
#: Free bytes below which a second process's buffers, or a data loader's batches, may not find room.
_LITTLE_SHARED = GIB
#: The soft limit of a usual login session; imports, sockets and log files of one run stay below it.
_FEWEST_FILES = 1024
#: Open files of a large run: each worker holds sockets to the others, and the driver to all of them.
_GOOD_FILES = 8192
#: Free bytes that a run's logs and metrics need at the least, and a number that the checkpoints of small models fill.
_LEAST_DISK, _LITTLE_DISK = GIB, 20 * GIB


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


class LimitsCheck(BaseHealthCheck):
    """Shared memory, and the number of files that a process may have open."""

    subject = "limits"
    #: Folder of shared memory, where tensors between processes are.
    shared = Path("/dev/shm")  # noqa: S108

    def run(self, setup: HealthSetup) -> Iterator[Finding]:
        """Look at the shared-memory folder and at the limit of open files."""
        if self.shared.is_dir():
            yield self._shared_memory()
        if os.name == "posix":
            yield self._open_files()

    def _shared_memory(self) -> Finding:
        room = os.statvfs(self.shared)
        size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
        space = f"{_size(free)} free of {_size(size)} in {self.shared}"
        bigger = f"start the container with --shm-size=16g (or --ipc=host), or: mount -o remount,size=16G {self.shared}"
        if size <= _DOCKERS_SHARED or free < _DOCKERS_SHARED:
            fix = bigger if size <= _DOCKERS_SHARED else f"delete what crashed processes left: ls -lt {self.shared}"
            return problem("shared memory", f"{space}; tensors between processes do not fit", fix)
        if free < _LITTLE_SHARED:
            return warning(
                "shared memory", space, f"{bigger}; crashed processes may have left files: ls -lt {self.shared}"
            )
        return ok("shared memory", space)

    def _open_files(self) -> Finding:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
        most = hard if hard != resource.RLIM_INFINITY else 65536
        fix = f"ulimit -n {min(max(_GOOD_FILES, most), 65536)}" + (
            "" if most >= _GOOD_FILES else " as root, or LimitNOFILE= of the service, or nofile in limits.conf"
        )
        if soft != resource.RLIM_INFINITY and soft < _GOOD_FILES:
            limits = f"a process may have {limit} files open (hard limit {hard if hard >= 0 else 'none'})"
            if soft < _FEWEST_FILES:
                return problem("open files", f"{limits}, which the sockets of workers and replicas exhaust", fix)
            return warning("open files", f"{limits}; a run with many workers needs {_GOOD_FILES}", fix)
        return ok("open files", f"a process may have {limit} files open")


class DiskCheck(BaseHealthCheck):
    """The folder of the run and that of temporary files: writable, with room."""

    subject = "disk"

    def run(self, setup: HealthSetup) -> Iterator[Finding]:
        """Write a small file into each folder and look at the free space."""
        yield self._look("run directory", Path(setup.get("run_dir", "runs")), "give another folder: run_dir=DIR")
        try:
            temporary = Path(tempfile.gettempdir())
        except FileNotFoundError as error:
            yield problem("temporary files", f"no folder can be written: {error}", "set TMPDIR to a writable folder")
            return
        yield self._look("temporary files", temporary, "set TMPDIR to a folder with room")

    def _look(self, name: str, folder: Path, elsewhere: str) -> Finding:
        there = folder.absolute()
        while not there.exists() and there != there.parent:
            there = there.parent
        if not there.is_dir():
            return problem(name, f"{folder} cannot be made, because {there} is a file", elsewhere)
        try:
            with tempfile.NamedTemporaryFile(dir=there, prefix=".rollcast-doctor-") as file:
                file.write(b"\0" * 4096)
                file.flush()
            usage = shutil.disk_usage(there)
            files = os.statvfs(there)
        except OSError as error:
            reason = error.strerror or str(error)
            return problem(
                name, f"{folder} cannot be written ({there}: {reason})", f"chmod or free {there}; or {elsewhere}"
            )
        space = f"{_size(usage.free)} free of {_size(usage.total)} for {folder}"
        if usage.free < _LEAST_DISK:
            return problem(name, space, f"free space on the disk of {there}; or {elsewhere}")
        if files.f_files and files.f_favail == 0:
            return problem(name, f"no more files can be made on the disk of {there}", f"delete files; or {elsewhere}")
        if usage.free < _LITTLE_DISK:
            return warning(name, f"{space}; checkpoints may fill it", f"free space; or {elsewhere}")
        return ok(name, space)


class NetworkCheck(BaseHealthCheck):
    """Ports on the loopback, the machine's own name, and proxies that would swallow requests to it."""

    subject = "network"

    def run(self, setup: HealthSetup) -> Iterator[Finding]:
        """Bind, connect and resolve; no packet leaves the machine but a look-up of its name."""
        yield self._loopback()
        yield self._name()
        schemes = [scheme for scheme in getproxies() if scheme in ("http", "https", "all")]
        if schemes and not proxy_bypass("127.0.0.1"):
            yield warning(
                "proxy",
                f"{', '.join(f'{scheme}_proxy' for scheme in schemes)} also catches requests to 127.0.0.1",
                "export no_proxy=localhost,127.0.0.1,$(hostname -i) NO_PROXY=localhost,127.0.0.1,$(hostname -i)",
            )

    def _loopback(self) -> Finding:
        try:
            with socket.create_server(("127.0.0.1", 0)) as server:
                with socket.create_connection(server.getsockname(), 5.0):
                    pass
                port = server.getsockname()[1]
        except OSError as error:
            fix = 'ip link set lo up; if every port is taken: sysctl -w net.ipv4.ip_local_port_range="1024 65535"'
            return problem("ports", f"no port of 127.0.0.1 can be bound and reached: {error}", fix)
        return ok("ports", f"free ports of 127.0.0.1 can be bound and reached, such as {port}")

    def _name(self) -> Finding:
        name = socket.gethostname()
        try:
            addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
        except OSError as error:
            fix = f"add the name to /etc/hosts: echo '127.0.1.1 {name}' >> /etc/hosts"
            return problem("host name", f"{name} cannot be resolved ({error}); process groups meet under it", fix)
        return ok("host name", f"{name} is {', '.join(addresses)}")
