from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollcast.contracts.rollout import RolloutSetup
from rollcast.errors import ConfigError, RolloutError
from rollcast_sglang.rollout import SglangRollout
from rollcast_sglang.schemas import SglangRolloutConfig
from rollcast_testing.tiny import tiny_model_folder

psutil = pytest.importorskip("psutil")
pytest.importorskip("sglang")

PARENT = """
import sys, time
from rollcast.contracts.rollout import RolloutSetup
from rollcast_sglang.rollout import SglangRollout
from rollcast_sglang.schemas import SglangRolloutConfig
rollout = SglangRollout(RolloutSetup(SglangRolloutConfig(), sys.argv[1], 0, 0, 2))
print(rollout.server.pid, flush=True)
time.sleep(600)
"""


def members(group: int) -> list[int]:
    """Processes of a group that still run."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except ProcessLookupError:
            continue
    return found


def wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + 60
    while members(group):
        assert time.monotonic() < deadline, f"processes {members(group)} are left"
        time.sleep(0.2)


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "tiny")
    with subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        deadline = time.monotonic() + 120
        while len(members(group)) < 3:  # itself, a scheduler and a detokenizer at least
            assert time.monotonic() < deadline, "the server started no processes"
            time.sleep(0.2)
        os.kill(parent.pid, signal.SIGKILL)
    wait_until_gone(group)


@pytest.mark.exhaustive
def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "tiny")
    config = SglangRolloutConfig(attention_backend="no_such_backend")
    rollout = SglangRollout(RolloutSetup(config, str(folder), seed=0, pad_token_id=0, eos_token_id=2))
    group = rollout.server.pid
    try:
        with pytest.raises(RolloutError, match="no_such_backend"):
            asyncio.run(rollout.check_health())
    finally:
        rollout.close()
    wait_until_gone(group)
    with pytest.raises(RolloutError):
        asyncio.run(rollout.check_health())


def test_a_wrong_key_starts_nothing(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "tiny")
    config = SglangRolloutConfig(engine_kwargs={"shedule_policy": "fcfs"})
    with pytest.raises(ConfigError, match=r"engine_kwargs\.shedule_policy .*did you mean schedule_policy"):
        SglangRollout(RolloutSetup(config, str(folder), seed=0, pad_token_id=0, eos_token_id=2))
