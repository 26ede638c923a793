"""The command and the hooks pass the suites that third parties are given."""

from __future__ import annotations

from rollcast_testing import CommandSuite, HooksSuite


class TestProfile(CommandSuite):
    name = "profile"


class TestProfiling(HooksSuite):
    name = "profiling"
