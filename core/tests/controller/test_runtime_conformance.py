"""The runtime `local` passes the suite that third parties are given."""

from __future__ import annotations

from rollcast_testing import RuntimeSuite


class TestLocal(RuntimeSuite):
    name = "local"
    own_processes = False
    world_size = 1
