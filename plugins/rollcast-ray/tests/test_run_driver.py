"""Functions that drive worker groups from a process of the cluster."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import driver_functions
import pytest

from rollcast.errors import WorkerError
from rollcast_ray.runtime import RayRuntime


@pytest.fixture(scope="module")
def runtime() -> Iterator[RayRuntime]:
    """A Ray whose processes inherit an ignored SIGINT, as from a job in the background of a shell."""
    with RayRuntime(num_cpus=1) as made:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            made.nodes()
        finally:
            signal.signal(signal.SIGINT, before)
        yield made


def test_it_runs_elsewhere_in_the_same_folder(
    runtime: RayRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert runtime.run_driver(driver_functions.tell_where, "file.txt") != os.getpid()
    assert (tmp_path / "file.txt").exists()


def test_its_error_is_raised_with_its_traceback(runtime: RayRuntime) -> None:
    with pytest.raises(ValueError, match="my own error") as caught:
        runtime.run_driver(driver_functions.fail)
    assert "driver_functions.py" in caught.value.__notes__[0]


def test_its_death_is_told(runtime: RayRuntime) -> None:
    with pytest.raises(WorkerError, match="the process of the training loop died"):
        runtime.run_driver(driver_functions.die)


def test_an_interrupt_reaches_it(runtime: RayRuntime, tmp_path: Path) -> None:
    def interrupt() -> None:
        deadline = time.monotonic() + 60.0
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        _thread.interrupt_main()

    # Under a job in the background of a shell this process ignores the signal too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            runtime.run_driver(driver_functions.wait_for_ever, str(tmp_path))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "stopped").exists()
