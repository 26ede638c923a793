"""A plugin state that every test starts afresh."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from rollcast.plugins import discovery, inprocess, registry


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(inprocess, "_table", {})
    monkeypatch.setattr(inprocess, "_installed", None)
    monkeypatch.setattr(registry, "_registries", dict(registry._registries))
    before = set(sys.modules)
    discovery.refresh()
    yield
    for name in set(sys.modules) - before:
        # Only what lives in throwaway distributions; the names are ours.
        if name.startswith("tp_"):
            del sys.modules[name]
    monkeypatch.undo()
    discovery.refresh()


@pytest.fixture
def core_version(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Pretend that this version of the core is installed."""

    def pretend(version: str | None) -> None:
        monkeypatch.setattr("rollcast.plugins.discovery.find_core_version", lambda: version)

    return pretend
