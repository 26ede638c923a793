"""A pytest plugin for verl's own tests: worker groups on rollcast, and four devices that exist for Ray only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollcast_verl.hook  # noqa: F401  # before verl is imported

# Ray joins a cluster that runs below the same folder, so each process of xdist has its own.
place = Path(os.environ["RAY_TMPDIR"]) / os.environ.get("PYTEST_XDIST_WORKER", "")
place.mkdir(exist_ok=True)
os.environ["RAY_TMPDIR"] = str(place)

#: Devices that the tests count; Ray assigns as many logical ones (RAY_OVERRIDE_RESOURCES).
DEVICES = 4


@pytest.fixture(autouse=True)
def logical_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the tests count logical devices, and end Ray after a test that failed before it did."""
    import ray
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: DEVICES)
    yield
    ray.shutdown()
