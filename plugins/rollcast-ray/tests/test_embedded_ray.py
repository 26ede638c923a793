"""The end of an embedded Ray that has broken; on processes that stand for Ray's."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
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


STUCK = """
import sys, threading, time
from rollcast.cli import app
from rollcast_ray.embedded import EmbeddedRay
import atexit

embedded = EmbeddedRay()
embedded._leaving = threading.Thread(target=time.sleep, args=(600,), daemon=True)  # stands for Ray's native threads
embedded._leaving.start()
atexit.register(embedded._exit_if_stuck)
{ends}
"""
IN_COMMAND = "app.build_app = lambda: lambda prog_name: {}\napp.main()"


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (IN_COMMAND.format("sys.exit(143)"), 143),
        (IN_COMMAND.format("sys.exit()"), 0),
        (IN_COMMAND.format("sys.exit('no model')"), 1),
        (IN_COMMAND.format("1 / 0"), 1),
        ("", 2),
    ],
    ids=["interrupted", "done", "refused", "bug", "no command"],
)
def test_a_stuck_ray_keeps_the_exit_code_of_the_command(ends: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK.format(ends=ends)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr


KILLED = """
import sys, time
from rollcast_ray.runtime import RayRuntime

RayRuntime(num_cpus=1).nodes()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.exhaustive
def test_nothing_of_a_killed_owner_lives_longer_than_ten_seconds() -> None:
    owner = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert owner.stdout is not None
        assert "ready" in owner.stdout.readline()
        # Ray's agents appear a moment after its start.
        deadline = time.monotonic() + 60
        while len(family := psutil.Process(owner.pid).children(recursive=True)) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(2.0)
    finally:
        owner.kill()
        owner.wait()
    assert psutil.wait_procs(family, timeout=10.0)[1] == []
