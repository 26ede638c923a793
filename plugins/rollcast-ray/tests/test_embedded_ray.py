"""The end of an embedded Ray that has broken; on processes that stand for Ray's."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
from ray._private import worker as ray_worker

from rollcast_ray.embedded import EmbeddedRay

TOLD = "its gcs_server (process {pid}) was killed by SIGKILL"


@pytest.fixture
def broken() -> Iterator[tuple[EmbeddedRay, str]]:
    """A Ray whose gcs_server was killed while its raylet lives; with the words that tell it."""
    names = ("gcs_server", "raylet")
    processes = {name: subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL) for name in names}
    embedded = EmbeddedRay()
    embedded.watch(processes)
    processes["gcs_server"].kill()
    processes["gcs_server"].wait()
    yield embedded, TOLD.format(pid=processes["gcs_server"].pid)
    assert processes["raylet"].poll() is not None


def test_a_break_that_nobody_has_met_is_told(broken: tuple[EmbeddedRay, str], caplog: pytest.LogCaptureFixture) -> None:
    embedded, told = broken
    with caplog.at_level(logging.ERROR, "rollcast_ray"):
        embedded.end(lambda: None)
    assert [record.getMessage() for record in caplog.records] == [
        f"the run's own Ray broke before it was stopped: {told}"
    ]
    assert not embedded.running


def test_an_error_on_its_way_tells_it_alone(broken: tuple[EmbeddedRay, str], caplog: pytest.LogCaptureFixture) -> None:
    embedded, _ = broken
    with caplog.at_level(logging.ERROR, "rollcast_ray"), pytest.raises(RuntimeError, match="mine"):
        try:
            raise RuntimeError("mine")
        finally:
            embedded.end(lambda: None)
    assert not caplog.records


def test_an_uncaught_error_waits_for_no_ray_that_is_gone(
    broken: tuple[EmbeddedRay, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded, _ = broken
    monkeypatch.setattr(sys, "excepthook", ray_worker.custom_excepthook)
    embedded.end(lambda: None)
    assert sys.excepthook is ray_worker.normal_excepthook
