"""The code of docs/rewards.md and docs/trackers.md, run as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from page_packages import DOCS, titled_blocks
from run_commands import SMALL, Commands, read_metrics

from rollcast.contracts.reward import RewardSample, build_reward, build_reward_manager

RUN = ("train", *SMALL, "runtime=local", "trainer.total_steps=2", "run_dir=run")


def test_functions_from_files(rollcast: Commands) -> None:
    (rollcast.folder / "my_rewards.py").write_text(titled_blocks("rewards.md")["my_rewards.py"])
    path = "reward.reward_kwargs.path=my_rewards.py:brief"
    rollcast.must_run(*RUN, "reward=function", path, "reward.reward_kwargs.limit=10", "trainer.export=true")
    rows = read_metrics(rollcast.folder / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["reward/errors"] == 0 for row in rows[1:])

    (rollcast.folder / "graded.py").write_text(titled_blocks("rewards.md")["graded.py"])
    judge = ("judge.enable=true", "judge.model.path=run/export", "judge.rollout={name: hf}")
    graded = ("reward=function", "reward.reward_kwargs.path=graded.py:polite", "reward.reward_manager=naive")
    rollcast.must_run(*RUN, "run_dir=judged", "trainer.total_steps=1", "data.val_files=[]", *graded, *judge)
    (row,) = read_metrics(rollcast.folder / "judged")
    assert row["judge/replies"] > 0
    assert 1 <= row["judge/reply_tokens"] <= 4


def test_functions_of_verl_and_trl(tmp_path: Path) -> None:
    for name in ("verl_rewards.py", "trl_rewards.py"):
        (tmp_path / name).write_text(titled_blocks("rewards.md")[name])
    samples = [
        RewardSample("52917304=", "01234579", "01234579", extra_info={"answer": "01234579"}),
        RewardSample("10=", " 01", "01", extra_info={"answer": "01"}),
    ]
    options: dict[str, dict[str, Any]] = {
        "verl": {"path": f"{tmp_path}/verl_rewards.py", "scale": 2.0},
        "batch": {"path": f"{tmp_path}/verl_rewards.py", "name": "compute_scores"},
        "trl": {
            "reward_funcs": [f"{tmp_path}/trl_rewards.py:{name}" for name in ("accuracy", "only_long")],
            "reward_weights": [1.0, 0.2],
        },
    }
    found = {}
    for name, given in options.items():
        manager = build_reward_manager("naive", build_reward("trl" if name == "trl" else "function", given))
        found[name] = manager(samples)
        manager.close()
    assert [result.score for result in found["verl"]] == [2.0, 0.0]
    assert [result.score for result in found["batch"]] == [1.0, 0.0]
    assert [result.score for result in found["trl"]] == [1.2, 1.0]
    assert found["trl"][0].extra == {"accuracy": 1.0, "only_long": 1.0, "only_long/longest": 8.0}
    assert found["trl"][1].extra == {"accuracy": 1.0, "only_long": None, "only_long/longest": 8.0}


@pytest.fixture
def brief(rollcast: Commands) -> Commands:
    source = titled_blocks("rewards.md")["rollcast_brief.py"]
    rollcast.install("rollcast-brief", "rollcast_brief", source, "[rollcast.rewards]\nbrief = rollcast_brief:Brief\n")
    return rollcast


def test_a_reward_in_a_package(brief: Commands) -> None:
    brief.must_run(*RUN, "reward.name=brief", "reward.reward_kwargs.limit=4")
    rows = read_metrics(brief.folder / "run")
    assert all(0 < row["reward/beyond"] <= 6 for row in rows[1:])
    refused = brief.run(*RUN, "run_dir=other", "reward.name=brief", "reward.reward_kwargs.limit=0")
    assert refused.code == 2
    assert "reward.reward_kwargs.limit is 0" in refused.text


def test_its_suite(brief: Commands) -> None:
    tests = brief.folder / "tests"
    tests.mkdir()
    (tests / "test_brief.py").write_text(titled_blocks("rewards.md")["test_brief.py"])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        cwd=brief.folder,
        env={**os.environ, **brief.environment()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d\d passed", done.stdout), done.stdout


def test_a_tracker_in_a_package(rollcast: Commands) -> None:
    source = titled_blocks("trackers.md")["rollcast_bell.py"]
    rollcast.install("rollcast-bell", "rollcast_bell", source, "[rollcast.trackers]\nbell = rollcast_bell:Bell\n")
    rollcast.must_run(*RUN, "trackers=[console,bell]", "tracker_kwargs.bell.file=checkpoints.txt")
    (line,) = (rollcast.folder / "run" / "checkpoints.txt").read_text().splitlines()
    assert line.startswith("step 2: ")
    assert line.endswith("step_2")


def test_the_tables_name_every_part(rollcast: Commands) -> None:
    listed = json.loads(rollcast.must_run("plugins", "--json").out)
    parts = listed["parts"] if isinstance(listed, dict) else listed
    pages = {
        "rollcast.rewards": "rewards.md",
        "rollcast.reward_managers": "rewards.md",
        "rollcast.trackers": "trackers.md",
    }
    found = 0
    for part in parts:
        ours = part["distribution"] in ("rollcast-report", "rollcast-rewards")
        if ours and part["group"] in pages:
            found += 1
            assert f"| `{part['name']}` |" in (DOCS / pages[part["group"]]).read_text(), part
    assert found == 25
