"""The cost model and the planners of this package under the conformance suites."""

from __future__ import annotations

from rollcast_automap.testing import CostModelSuite, PlannerSuite


class TestAnalyticalCosts(CostModelSuite):
    name = "analytical"


class TestBranchAndBound(PlannerSuite):
    name = "branch_and_bound"


class TestHybridFlow(PlannerSuite):
    name = "hybridflow"


class TestExhaustive(PlannerSuite):
    name = "exhaustive"
