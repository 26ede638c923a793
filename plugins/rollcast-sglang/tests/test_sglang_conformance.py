from __future__ import annotations

import os
import signal
from typing import Any, ClassVar

import pytest

from rollcast.testing.rollout import RolloutSuite

psutil = pytest.importorskip("psutil")
pytest.importorskip("sglang")


def kill_scheduler(rollout: Any) -> None:
    """Kill the process that computes, which is not the one that answers HTTP."""
    (scheduler,) = [each for each in psutil.Process(rollout.server.pid).children() if "scheduler" in each.name()]
    os.kill(scheduler.pid, signal.SIGKILL)


class TestSglang(RolloutSuite):
    name = "sglang"
    rollout_config: ClassVar = {"max_running_requests": 64}
    lora_config: ClassVar = {"enable_lora": True, "max_lora_rank": 4}
    shared = True
    kill_engine = kill_scheduler
