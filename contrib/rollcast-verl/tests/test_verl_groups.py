"""What verl's worker groups gain on rollcast, in a process of its own, because the hook is for a whole process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")


@pytest.mark.timeout(600)
def test_calls_failures_and_colocation(tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("r")
    script = Path(__file__).with_name("use_groups.py")
    env = {**os.environ, "VERL_PLATFORM": "cpu", "RAY_TMPDIR": str(place), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rollcast_verl.run", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=place)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "all of it", f"{done.stdout}\n{done.stderr[-6000:]}"
