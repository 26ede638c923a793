"""The runtime `simulated` and the command `new` pass the suites that third parties are given."""

from __future__ import annotations

from rollcast_testing import CommandSuite, RuntimeSuite


class TestSimulated(RuntimeSuite):
    name = "simulated"
    own_processes = False


class TestNew(CommandSuite):
    name = "new"
    sub_commands = (("plugin",),)
