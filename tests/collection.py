"""Which tests run, and in which order.

Modules marked ``long`` run first, so that no worker is left alone with one of them at the end: ``--dist loadfile`` gives
whole modules to workers in the order of collection. Cases marked ``exhaustive`` repeat what another case checks with other
values; they run with ``ROLLCAST_ALL_CASES=1``.
"""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get("ROLLCAST_ALL_CASES"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)  # stable: modules stay whole
