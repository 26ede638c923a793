"""The command passes the suite that third parties are given."""

from __future__ import annotations

from rollcast_testing import CommandSuite


class TestRuns(CommandSuite):
    name = "runs"


class TestWatch(CommandSuite):
    name = "watch"
