"""Run the modules that take longest first, so that no worker is left alone with one of them at the end.

A module says so with ``pytestmark = pytest.mark.long``. Used with ``--dist loadfile``, which gives whole modules to
workers in the order of collection.
"""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)  # stable: modules stay whole
