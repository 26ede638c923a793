"""The planners: branch and bound, HybridFlow's algorithms, and exhaustive search."""

from __future__ import annotations

from collections.abc import Sequence

from rollcast_automap.composition import find_generator, find_trained
from rollcast_automap.contract import BaseCostModel, BasePlanner, Prediction, Problem
from rollcast_automap.search.best import Best
from rollcast_automap.search.branch_search import BranchSearch
from rollcast_automap.search.exhaustive import Exhaustive
from rollcast_automap.search.search_space import list_partitions

__all__ = ["BranchAndBound", "Exhaustive", "HybridFlow"]


class BranchAndBound(BasePlanner):
    """Depth-first search with bounds that never cut off a better mapping; see :class:`BranchSearch`."""

    def plan(self, problem: Problem, cost_model: BaseCostModel, count: int = 1) -> Sequence[Prediction]:
        """Return up to ``count`` best mappings; see :class:`BasePlanner`."""
        best = Best(count)
        BranchSearch(problem, cost_model, best).run(list_partitions(problem))
        return best.list(problem)


class HybridFlow(BasePlanner):
    """Algorithms 1 and 2 of HybridFlow (EuroSys 2025, section 6).

    For every set partition and allocation, the parallelism with the shortest step is chosen (``auto_parallel``, cached
    by role and pool). The rollout shares the actor's devices, and generation never overlaps training. The paper chooses
    the parallelism of each role separately; here all roles of a pool are chosen together, because the fastest
    parallelism of one role may leave too little memory for the others.
    """

    def plan(self, problem: Problem, cost_model: BaseCostModel, count: int = 1) -> Sequence[Prediction]:
        """Return up to ``count`` best mappings; see :class:`BasePlanner`."""
        best = Best(count)
        alone = find_generator(problem) is None or find_trained(problem) is None
        shared = [(groups, mode) for groups, mode in list_partitions(problem) if alone or mode != "standalone"]
        BranchSearch(problem, cost_model, best).run(shared)
        return best.list(problem)
