"""The guides whose code is a few lines: run-from-python.md and tiny-models.md, run as they stand; recipes.md composed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_packages import DOCS, titled_blocks

from rollcast import compose
from rollcast.errors import ConfigError


def run(page: str, file: str, folder: Path) -> str:
    (folder / file).write_text(titled_blocks(page)[file])
    done = subprocess.run([sys.executable, file], cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_a_run_from_python(tmp_path: Path) -> None:
    page = "run-from-python.md"
    assert run(page, "first_run.py", tmp_path).splitlines()[-1].startswith("2 runs/from_python 0.")
    looked = run(page, "look.py", tmp_path)
    assert [int(step) for step in re.findall(r"\((\d)", looked)] == [0, 1, 2]
    shown = re.search(r"```text\n(.+?)```", (DOCS / page).read_text(), re.DOTALL)[1]
    assert run(page, "look_at_keys.py", tmp_path) == shown
    assert "step 1/1" in run(page, "own_estimator.py", tmp_path)


def test_a_small_model(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    listed, layers = run("tiny-models.md", "make_small.py", tmp_path).splitlines()
    assert "config.json" in listed
    assert "safetensors" not in listed
    assert int(layers) <= 2


def test_recipes_compose(tmp_path: Path) -> None:
    for file, text in titled_blocks("recipes.md").items():
        target = tmp_path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    short = compose(["recipe=short"], tmp_path / "mine").config
    assert (short.algorithm.adv_estimator, short.trainer.total_steps) == ("rloo", 30)
    shorter = compose(["recipe=shorter"], tmp_path / "mine").config
    assert (shorter.algorithm.adv_estimator, shorter.trainer.total_steps, shorter.rollout.n) == ("grpo", 10, 4)


def test_a_plus_changes_nothing() -> None:
    plain, plus, double = (
        compose(["recipe=quickstart", f"{sign}algorithm.adv_kwargs.limit=2.0"]).plain() for sign in ("", "+", "++")
    )
    assert plain == plus == double
    assert plain["algorithm"]["adv_kwargs"] == {"limit": 2.0}


def test_a_warm_start_of_ones_own_is_in_a_package(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\ndefaults:\n  - quickstart_warmup\n")
    with pytest.raises(ConfigError, match="mine"):
        compose(["recipe=quickstart", "trainer.warm_start=mine"], tmp_path)
