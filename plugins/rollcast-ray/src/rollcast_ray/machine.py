"""The driver's machine: ports, memory, signals and folders that Ray depends on."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollcast.errors import ResourceError

__all__ = [
    "check_temp_dir",
    "default_object_store",
    "keeping_sigterm",
    "read_last_lines",
    "require_reachable",
]


def require_reachable(address: str, timeout: float = 10.0) -> None:
    """Try the port of an address (``host:port``, with or without a scheme); other forms pass.

    Raises:
        OSError: nobody answers within ``timeout`` seconds.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()


def read_last_lines(folder: Path, pid: int, count: int = 20) -> list[str]:
    """Return the last lines that a Ray worker's process wrote to its output files in ``folder``."""
    files = sorted(folder.glob(f"worker-*-{pid}.*"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    return [line for line in lines if not line.startswith(":")][-count:]  # Ray marks its own lines so


def default_object_store() -> int:
    """Return the bytes for an object store on this machine: 30 % of its memory, at most 4 GiB."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(memory * 0.3), 4 << 30)


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Restore an application's own handler of SIGTERM: ``ray.init`` replaces it by one that aborts."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


#: Path that Ray adds to the folder, up to the end of its longest socket's name; a socket's path has 107 bytes.
_LONGEST_SOCKET = "/ray/session_2000-01-01_00-00-00_000000_0000000/sockets/plasma_store"


def check_temp_dir() -> None:
    """Refuse a folder for temporary files with which Ray would wait for its workers without end.

    Raises:
        ResourceError: it is inside the virtual environment, or its path is too long for a socket.
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
