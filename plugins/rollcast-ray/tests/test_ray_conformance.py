"""The runtime and the command pass the suites that third parties are given."""

from __future__ import annotations

from rollcast_testing import CommandSuite, RuntimeSuite


class TestRay(RuntimeSuite):
    name = "ray"
    options = {"num_cpus": 8}  # noqa: RUF012


class TestReplay(CommandSuite):
    name = "replay"
