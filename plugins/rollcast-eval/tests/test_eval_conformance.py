"""The commands pass the suite that third parties are given."""

from __future__ import annotations

from rollcast_testing import CommandSuite


class TestEval(CommandSuite):
    name = "eval"


class TestGenerate(CommandSuite):
    name = "generate"
