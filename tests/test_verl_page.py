"""docs/coming-from-verl.md: its code runs, and its tables are those of rollcast-verl."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import verl_keys
from page_packages import titled_blocks

PAGE = "coming-from-verl.md"


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    for file, text in titled_blocks(PAGE).items():
        (tmp_path / file).write_text(text)
    return tmp_path


def imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"coming_from_verl_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_code() -> None:
    page = verl_keys.PAGE.read_text()
    assert page == verl_keys.replaced(page), "run `python tests/verl_keys.py`"


def test_the_worker_that_was_moved_computes_the_same(modules: Path) -> None:
    assert imported(modules / "worker.py").run("simulated") == [0, 6, 12, 18, 24]


def test_the_dispatch_mode_that_was_moved_runs(modules: Path) -> None:
    from rollcast import ClassWithInitArgs, ResourcePool, WorkerGroup
    from rollcast.contracts.dispatch import dispatch_modes
    from rollcast.contracts.runtime import runtimes

    runtime = runtimes.get("simulated")()
    try:
        page = imported(modules / "every_other.py")
        group = WorkerGroup(ResourcePool([2]), ClassWithInitArgs(page.Squares), runtime=runtime)
        assert group.square([1, 2, 3, 4, 5]) == [1, 9, 25, 4, 16]
        assert page.NAMED.name == "every_other"
    finally:
        runtime.shutdown()
        dispatch_modes.unregister("every_other")


def test_the_reward_that_was_moved_scores(modules: Path) -> None:
    from rollcast.contracts.reward import RewardSample, build_reward

    options = {"path": f"{modules / 'my_rewards.py'}:compute_score", "bonus": 0.5}
    result = build_reward("function", options).score(RewardSample("", "it is 42", "42"))
    assert (result.score, result.correct, result.extra) == (1.5, True, {"length": 8.0})


def test_functions_of_a_user_become_plugins(modules: Path) -> None:
    from rollcast.contracts.algorithm import needs_of

    page = imported(modules / "my_plugin.py")
    assert needs_of(page.half_of_values).columns == {"values"}
    assert callable(page.twice)


def test_workers_of_verl_run_as_they_are(modules: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("verl")
    command = [sys.executable, "-m", "rollcast_verl.run", "verl_workers.py"]
    env = {**os.environ, "VERL_PLATFORM": "cpu", "RAY_TMPDIR": str(tmp_path_factory.mktemp("r"))}
    done = subprocess.run(command, cwd=modules, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "[0, 6, 12, 18, 24] {'rank': [0, 1]}"
