"""A run on its own Ray: what listens, and how it ends by signals and when Ray breaks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from trainer_tools import SmallTask

pytestmark = pytest.mark.long

#: Deadline in seconds of what takes about ten on an idle machine, the start of Ray included.
LONG_S = 240.0


def heed_signals() -> None:
    """Give a child the default handlers: a shell's background job ignores SIGINT, and nohup ignores SIGHUP."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start_run(small_task: SmallTask, run_dir: Path, runtime: str, *more: str) -> subprocess.Popen[str]:
    """A run in a process group of its own, after its first checkpoint."""
    changes = [
        "trainer.total_steps=100000",
        "trainer.save_freq=1",
        "trainer.test_freq=-1",
        "trainer.max_ckpt_to_keep=2",
    ]
    arguments = small_task.ppo(run_dir, *changes, f"runtime={runtime}", *more)
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("rollcast")), "train", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "", "COLUMNS": "400"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_signals,
    )
    try:
        wait_until(lambda: process.poll() is not None or (run_dir / "checkpoints" / "latest").exists())
        assert process.poll() is None, process.communicate()
    except BaseException:
        if process.poll() is None:
            kill_all(processes_of(process))
        raise
    return process


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]


def kill_all(processes: list[psutil.Process]) -> None:
    for each in processes:
        with suppress(psutil.NoSuchProcess):  # of a process whose id is another's by now, too
            each.kill()


def assert_ends(
    process: subprocess.Popen[str],
    act: Callable[[list[psutil.Process]], None],
    says: list[str],
    code: int = 2,
) -> None:
    """It exits with this code and these words, and no process of it is left."""
    all_of_it = processes_of(process)
    try:
        act(all_of_it)
        out, err = process.communicate(timeout=LONG_S)
        assert process.returncode == code, out + err
        for word in says:
            assert word in err, err
        assert "Traceback" not in out + err
        wait_until(lambda: not any(each.is_running() and each.status() != "zombie" for each in all_of_it))
    finally:
        kill_all(all_of_it)


def exhaustive(number: signal.Signals) -> Any:
    return pytest.param(number, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("number", [signal.SIGINT, exhaustive(signal.SIGTERM), exhaustive(signal.SIGHUP)])
def test_a_signal_ends_a_run_and_all_its_processes(
    small_task: SmallTask, tmp_path: Path, number: signal.Signals
) -> None:
    process = start_run(small_task, tmp_path / "run", "local")
    says = ["interrupted; the last checkpoint is", "checkpoints/step_"]
    assert_ends(process, lambda _: process.send_signal(number), says, 128 + number)


def test_nothing_listens_beyond_loopback_and_a_hangup_ends_it(small_task: SmallTask, tmp_path: Path) -> None:
    process = start_run(small_task, tmp_path / "run", "ray")

    def act(all_of_it: list[psutil.Process]) -> None:
        listening = [
            (each.name(), found.laddr.ip)
            for each in all_of_it
            for found in each.net_connections("inet")
            if found.status == psutil.CONN_LISTEN
        ]
        assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
        assert {address for _, address in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, listening
        process.send_signal(signal.SIGHUP)

    assert_ends(process, act, ["interrupted; the last checkpoint is"], 128 + signal.SIGHUP)


@pytest.mark.exhaustive
def test_replicas_listen_on_loopback_only(small_task: SmallTask, tmp_path: Path) -> None:
    replicas = [
        "rollout.mode=colocated",
        "rollout.weight_sync=collective",
        "rollout.replica.env={OMP_NUM_THREADS: '1'}",
    ]
    process = start_run(small_task, tmp_path / "run", "local", *replicas)

    def act(all_of_it: list[psutil.Process]) -> None:
        (replica,) = (each for each in all_of_it if "rollcast_serving.process" in each.cmdline())
        latest = tmp_path / "run" / "checkpoints" / "latest"
        first = latest.read_text()
        found = set()
        # Over a whole step, since the group that carries the weights listens only while it forms.
        while latest.read_text() == first and process.poll() is None:
            for each in all_of_it:
                connections = each.net_connections("inet")
                found |= {(each.pid, one.laddr) for one in connections if one.status == psutil.CONN_LISTEN}
        # One port for the run, one for agents.
        assert len([port for pid, port in found if pid == replica.pid]) >= 2
        assert {address.ip for _, address in found} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, found
        process.send_signal(signal.SIGHUP)

    assert_ends(process, act, ["interrupted; the last checkpoint is"], 128 + signal.SIGHUP)


@pytest.mark.parametrize("number", [exhaustive(signal.SIGINT), signal.SIGTERM, exhaustive(signal.SIGHUP)])
@pytest.mark.exhaustive
def test_a_signal_to_the_process_group_is_one_to_the_driver(
    small_task: SmallTask, tmp_path: Path, number: signal.Signals
) -> None:
    """Ray's own processes end with the group, and the driver's native threads may wait for them."""
    process = start_run(small_task, tmp_path / "run", "ray")
    says = ["interrupted; the last checkpoint is"]
    assert_ends(process, lambda _: os.killpg(process.pid, number), says, 128 + number)


@pytest.mark.exhaustive
def test_a_killed_gcs_is_named_with_the_last_checkpoint(small_task: SmallTask, tmp_path: Path) -> None:
    process = start_run(small_task, tmp_path / "run", "ray")

    def act(all_of_it: list[psutil.Process]) -> None:
        next(each for each in all_of_it if each.name() == "gcs_server").kill()

    assert_ends(process, act, ["gcs_server", "was killed by SIGKILL", "the last checkpoint is"])
