"""The hook changes verl only where it is asked to, and only before verl's groups are imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, cwd=cwd)


def test_without_the_hook_verl_is_verls_and_afterwards_it_is_too_late() -> None:
    script = (
        "import rollcast_verl, rollcast_verl.algorithms, rollcast_verl.rewards\n"
        "from verl.single_controller.ray import RayWorkerGroup\n"
        "print(RayWorkerGroup.__module__)\n"
        "import rollcast_verl.hook\n"
    )
    done = run("-c", script)
    assert done.stdout.splitlines()[-1] == "verl.single_controller.ray.base"
    assert done.returncode == 1 and "import rollcast_verl.hook before it" in done.stderr


def test_a_script_runs_with_its_arguments_and_the_groups_of_rollcast(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, helper\nfrom verl.single_controller.ray import RayWorkerGroup\n"
        "from verl.single_controller.base import WorkerGroup\nfrom verl.single_controller.base.worker import Worker\n"
        "assert issubclass(RayWorkerGroup, WorkerGroup) and Worker.__module__.startswith('verl.')\n"
        "print(__name__, RayWorkerGroup.__module__, sys.argv[1:])\n"
    )
    (tmp_path / "helper.py").touch()
    done = run("-m", "rollcast_verl.run", str(script), "a=1", cwd=tmp_path.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "__main__ rollcast_verl.controller ['a=1']"


def test_the_command_says_how_it_is_used() -> None:
    done = run("-m", "rollcast_verl.run")
    assert done.returncode == 1 and "usage: python -m rollcast_verl.run SCRIPT" in done.stderr
