"""Rendezvous of the ranks of a process group: a store that listens on a single address, and the groups' timeouts."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

__all__ = ["serve_store", "set_timeouts"]


def serve_store(host: str, port: int, timeout: timedelta, world_size: int | None = None) -> Any:
    """Start the store of a process group, listening on ``host`` only; torch's own store listens on every interface.

    Args:
        host: An address of this machine.
        port: Port to listen on; 0 for a free one.
        timeout: Time for which a client waits for a key.
        world_size: Number of clients, including this one, that the store waits for when it closes; None if unknown.

    Returns:
        A ``torch.distributed.TCPStore``.

    Raises:
        OSError: The address or the port is not free.
    """
    import torch.distributed as dist

    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, port), family=family, backlog=1024) as listener:
        stores: Any = dist  # the stubs lack the stores
        # From here on, the store owns and closes the file descriptor.
        return stores.TCPStore(
            host,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def set_timeouts(seconds: float) -> None:
    """Set the time that collectives of this process's groups may take, in seconds; later groups are not changed.

    NCCL's watchdog ends a process whose collective takes longer, 10 minutes by default, even if another rank has a
    reason to be late.
    """
    from torch.distributed import distributed_c10d

    world: Any = distributed_c10d._world
    for group in world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
