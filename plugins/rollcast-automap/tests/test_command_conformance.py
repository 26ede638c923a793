"""The commands pass the suite that third parties are given."""

from __future__ import annotations

from rollcast_testing import CommandSuite


class TestMap(CommandSuite):
    name = "map"


class TestPlan(CommandSuite):
    name = "plan"


class TestSimulate(CommandSuite):
    name = "simulate"
