"""Checks of the driver's machine: ports, memory, signals and folders that Ray depends on."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray

from rollcast.errors import ResourceError

__all__ = [
    "check_temp_dir",
    "default_object_store",
    "keeping_sigterm",
    "require_reachable",
    "require_same_cluster",
]


def require_reachable(address: str, timeout: float = 10.0) -> None:
    """Check that the port of an address (``host:port``, with or without a scheme) is open; skip other forms.

    Raises:
        OSError: nothing answers within ``timeout`` seconds.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()


def require_same_cluster(address: str, running: str) -> None:
    """Check that an address is that of the Ray cluster that this process has already joined.

    Args:
        address: requested address. Forms without host and port, such as ``auto``, match any cluster.
        running: ``host:port`` of the running Ray.

    Raises:
        ResourceError: the addresses differ.
    """
    if "://" in address or address in ("auto", "local"):
        return
    (host, port), (its_host, its_port) = (
        text.rsplit(":", 1) if ":" in text else (text, "") for text in (address, running)
    )
    if port == its_port and _addresses(host) & _addresses(its_host):
        return
    raise ResourceError(
        f"runtime.address (or RAY_ADDRESS) is {address}, but this process has already joined Ray at {running}; "
        "leave the address out to use that Ray, or call ray.shutdown() first"
    )


def _addresses(host: str) -> set[str]:
    """Return the addresses of a host; for a loopback address, return all addresses of this machine."""
    names = [host.strip("[]")]
    if names[0] in ("localhost", "127.0.0.1", "::1"):
        names += ["127.0.0.1", ray.util.get_node_ip_address()]
    free = set(names)
    for name in names:
        with suppress(OSError):
            free |= {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    return free


def default_object_store() -> int:
    """Return the default object store size in bytes: 30 % of the memory, at most 90 % of the free shared memory.

    In a container, the memory is the container's limit.
    """
    wanted = int(_memory_limit() * 0.3)
    shared = Path("/dev/shm")  # noqa: S108  # Ray's object store
    if not shared.is_dir():
        return wanted
    room = os.statvfs(shared)
    return min(wanted, int(room.f_bavail * room.f_frsize * 0.9))


def _memory_limit() -> int:
    """Return the memory of this machine or container in bytes."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup v2, then v1
        with suppress(OSError, ValueError):
            limits.append(int((Path("/sys/fs/cgroup") / file).read_text()))
    return min(limits)


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Restore the application's SIGTERM handler, which ``ray.init`` replaces by one that aborts."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


#: The longest path of a socket that Ray creates below the folder. A socket's full path is limited to 107 bytes.
_LONGEST_SOCKET = "/ray/session_2000-01-01_00-00-00_000000_0000000/sockets/plasma_store"


def check_temp_dir() -> None:
    """Check the folder for temporary files; with an unsuitable one, Ray would wait forever for its workers.

    Raises:
        ResourceError: the folder is inside the virtual environment, or its path is too long for a socket.
    """
    folder = Path(tempfile.gettempdir()).resolve()
    if sys.prefix != sys.base_prefix and folder.is_relative_to(Path(sys.prefix).resolve()):
        reason = f"is inside the virtual environment {sys.prefix}"
    elif len(os.fsencode(f"{folder}{_LONGEST_SOCKET}")) > 107:
        reason = "has too long a path for the sockets that Ray puts there"
    else:
        return
    raise ResourceError(
        f"Ray cannot keep its files in {folder} (from TMPDIR), which {reason}. Set TMPDIR to a short folder outside"
    )
