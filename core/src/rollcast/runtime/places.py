"""What a runtime on Ray needs to know and does not ask Ray for."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollcast.controller.hosting import HostInfo
from rollcast.controller.runtime import LaunchSpec
from rollcast.controller.worker import WorkerContext

__all__ = ["build_contexts", "default_object_store", "keeping_sigterm", "read_last_lines", "require_reachable"]


def build_contexts(counts: Sequence[int], spec: LaunchSpec, infos: Sequence[HostInfo]) -> list[WorkerContext]:
    """A context for each rank; rank 0's node and free port are the rendezvous.

    Args:
        counts: processes on each node, in rank order.
        spec: the group.
        infos: the process of each rank.
    """
    places = [(local, count) for count in counts for local in range(count)]
    cores = os.cpu_count() or 1
    return [
        WorkerContext(
            rank=rank,
            world_size=len(infos),
            local_rank=local,
            local_world_size=count,
            master_addr=infos[0].node,
            master_port=infos[0].free_port,
            node=info.node,
            group=spec.name,
            threads=spec.threads or max(1, cores // count),
        )
        for rank, ((local, count), info) in enumerate(zip(places, infos, strict=True))
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
    """The last lines that a Ray worker's process wrote to its output files in ``folder``."""
    files = sorted(folder.glob(f"worker-*-{pid}.*"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    return [line for line in lines if not line.startswith(":")][-count:]  # Ray marks its own lines so


def default_object_store() -> int:
    """Bytes for an object store on this machine: 30 % of its memory, at most 4 GiB."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(memory * 0.3), 4 << 30)


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Let an application's own handler of SIGTERM stand: ``ray.init`` puts one in its place that aborts."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
