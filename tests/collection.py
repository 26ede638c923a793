"""Which tests run, and in which order.

Modules marked ``long`` run first, so that no worker is left alone with one of them at the end: ``--dist loadfile`` gives
whole modules to workers in the order of collection.

Cases that repeat what another case checks with other values, or that take a minute, run with ``ROLLCAST_ALL_CASES=1``
only: those marked ``exhaustive``, and of a parametrized test marked ``cases(count)`` all but ``count`` cases, spread evenly over the list.
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get("ROLLCAST_ALL_CASES"):
        repeated = {item for item in items if item.get_closest_marker("exhaustive")} | _beyond_count(items)
        config.hook.pytest_deselected(items=[item for item in items if item in repeated])
        items[:] = [item for item in items if item not in repeated]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)  # stable: modules stay whole


def _beyond_count(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases of tests marked ``cases`` that are not among the chosen ones."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("cases") and "[" in item.name:
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for mine in cases.values():
        marker = mine[0].get_closest_marker("cases")
        count = len(mine) if marker is None else min(int(marker.args[0]), len(mine))
        chosen = {mine[place * (len(mine) - 1) // max(count - 1, 1)] for place in range(count)}
        left_out |= set(mine) - chosen
    return left_out
