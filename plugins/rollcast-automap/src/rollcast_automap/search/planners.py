"""Planners: branch and bound, HybridFlow's algorithms, and every mapping."""

from __future__ import annotations

from collections.abc import Sequence

from rollcast.contracts.mapping import BaseCostModel, BasePlanner, Prediction, Problem
from rollcast_automap.composition import find_generator, find_trained
from rollcast_automap.search.best import Best
from rollcast_automap.search.branch_search import BranchSearch
from rollcast_automap.search.exhaustive import Exhaustive
from rollcast_automap.search.search_space import list_partitions

__all__ = ["BranchAndBound", "Exhaustive", "HybridFlow"]


class BranchAndBound(BasePlanner):
    """Depth-first search with bounds that cut off no better mapping; see :class:`BranchSearch`."""

    def plan(self, problem: Problem, cost_model: BaseCostModel, count: int = 1) -> Sequence[Prediction]:
        """Return up to ``count`` best mappings; see :class:`BasePlanner`."""
        best = Best(count)
        BranchSearch(problem, cost_model, best).run(list_partitions(problem))
        return best.list(problem)


class HybridFlow(BasePlanner):
    """Algorithms 1 and 2 of HybridFlow (EuroSys 2025, section 6).

    Every set partition with every allocation gets the parallelism with the least time of a step (``auto_parallel``,
    cached by role and pool); the rollout shares the actor's devices, and generation never overlaps training. Where the
    paper chooses the parallelism of each role by itself, all roles of a pool are chosen together, so that a fast
    parallelism that leaves no memory for the others hides no slower one that does.
    """

    def plan(self, problem: Problem, cost_model: BaseCostModel, count: int = 1) -> Sequence[Prediction]:
        """Return up to ``count`` best mappings; see :class:`BasePlanner`."""
        best = Best(count)
        alone = find_generator(problem) is None or find_trained(problem) is None
        shared = [(groups, mode) for groups, mode in list_partitions(problem) if alone or mode != "standalone"]
        BranchSearch(problem, cost_model, best).run(shared)
        return best.list(problem)
