"""The host of a process's workers: the port that it holds for a rendezvous."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from rollcast import WorkerHost


def test_the_port_of_the_rendezvous_is_held_until_the_host_closes() -> None:
    host = WorkerHost()
    port = host.describe("here").free_port
    assert host.describe("here").free_port == port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    for _ in range(2):  # also after a process group has ended
        store = dist.TCPStore("127.0.0.1", port, 1, is_master=True)
        store.set("key", "value")
        assert store.get("key") == b"value"
        del store
    host.close()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("", port))
        other.listen()
