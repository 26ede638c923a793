"""``rollcast new``: each kind's package is built and installed, announces its plugin and passes its tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from page_packages import DOCS, titled_blocks
from run_commands import SMALL, Commands, read_metrics

from rollcast.errors import ConfigError
from rollcast_testing.new import create_package, describe_kinds

pytestmark = pytest.mark.long

KINDS = tuple(describe_kinds())


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package of each kind, ``rollcast-new-KIND``, all of which are installed in ``site``."""
    folder = tmp_path_factory.mktemp("new")
    for kind in KINDS:
        builder = WheelBuilder(str(create_package(kind, f"new_{kind}", folder)))
        list(builder.build(directory=str(folder / "wheels"), versions=["standard"]))
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder / "site"),
    ]
    subprocess.run([*install, *map(str, (folder / "wheels").glob("*.whl"))], check=True, timeout=120)
    return folder


def run(packages: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(packages / "site"), "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=packages, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(900)  # a minute on a quiet machine, several on a busy one
def test_their_tests_pass(packages: Path) -> None:
    folders = [f"rollcast-new-{kind.replace('_', '-')}/tests" for kind in KINDS]
    listed = run(packages, "pytest", "-q", "-p", "no:cacheprovider", "-rA", *folders)
    passed = {kind: len(re.findall(rf"^PASSED \S*test_new_{kind}\.py::", listed, re.MULTILINE)) for kind in KINDS}
    assert all(passed.values()), passed
    assert passed["engine"] > 40
    assert passed["rollout"] > 25


@pytest.mark.exhaustive
def test_the_engine_trains_a_model_without_weights(packages: Path) -> None:
    few = (
        "trainer.total_steps=1",
        "trainer.save_freq=-1",
        "data.val_files=[]",
        "rollout.n=2",
        "data.train_batch_size=4",
    )
    run(packages, "rollcast", "train", *SMALL, "runtime=local", "engine=new_engine", "run_dir=runs/engine", *few)
    (row,) = read_metrics(packages / "runs" / "engine")
    # The rollout generates with the engine's module.
    assert row["rollout/logprob_gap_max"] < 1e-4


def test_the_command_says_what_comes_next(rollcast: Commands) -> None:
    listed = rollcast.must_run("new", "--list").out
    assert set(KINDS) == {line.split()[0] for line in listed.splitlines()}
    page = (DOCS / "examples.md").read_text()
    command, shown = re.search(r"^rollcast (new .+)\n```\n\n```\n(.+?)```$", page, re.MULTILINE | re.DOTALL).groups()
    assert rollcast.must_run(*command.split()).out == shown
    refused = rollcast.run("new", "environment", "MyShop")
    assert (refused.code, "try my_shop" in refused.text) == (2, True), refused.text


@pytest.mark.parametrize(
    ("kind", "name", "complaint"),
    [
        ("reward", "twice", "rollcast-twice exists already"),
        ("rewrd", "other", "Did you mean 'reward'"),
        ("environment", "../shop", "cannot be named"),
        ("environment", "rollcast_shop", "try shop"),
        ("recipe", "class", "cannot be named"),
        ("recipe", "trainer", "rollcast_trainer is installed already"),
        ("reward", "exact_match", "rollcast-rewards has a plugin 'exact_match' in rollcast.rewards"),
    ],
)
def test_a_wrong_request_writes_nothing(kind: str, name: str, complaint: str, tmp_path: Path) -> None:
    readme = tmp_path / "rollcast-twice" / "README.md"
    readme.parent.mkdir()
    readme.write_text("mine")
    with pytest.raises(ConfigError, match=complaint):
        create_package(kind, name, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [readme]
    assert readme.read_text() == "mine"


@pytest.mark.parametrize(
    ("kind", "page", "name"), [("engine", "engines.md", "small"), ("rollout", "rollouts.md", "plain")]
)
def test_pages_show_the_templates(kind: str, page: str, name: str, tmp_path: Path) -> None:
    package = create_package(kind, name, tmp_path)
    shown = {file: text for file, text in titled_blocks(page).items() if file.startswith(("src/", "tests/"))}
    assert f"src/rollcast_{name}/{kind}.py" in shown
    for file, text in shown.items():
        assert (package / file).read_text() == text, file


def test_git_ignores_what_tools_write(tmp_path: Path) -> None:
    package = create_package("reward", "ignoring", tmp_path)
    subprocess.run(["git", "init", "-q", str(package)], check=True)
    for written in ("src/rollcast_ignoring/__pycache__/reward.pyc", "runs/first/metrics.jsonl", "dist/a.whl"):
        (package / written).parent.mkdir(parents=True, exist_ok=True)
        (package / written).touch()
    listed = subprocess.run(
        ["git", "-C", str(package), "status", "--porcelain", "--untracked-files=all"],
        capture_output=True,
        text=True,
        check=True,
    )
    files = {line.removeprefix("?? ") for line in listed.stdout.splitlines()}
    assert {"pyproject.toml", ".gitignore"} <= files
    assert not {each for each in files if each.startswith(("runs/", "dist/")) or "__pycache__" in each}


def test_they_announce_what_they_bring(packages: Path) -> None:
    listed = json.loads(run(packages, "rollcast", "plugins", "--json", "--check"))
    parts = listed["parts"] if isinstance(listed, dict) else listed
    for kind in KINDS:
        name = f"rollcast-new-{kind.replace('_', '-')}"
        rows = [part for part in parts if part["distribution"] == name]
        project = tomllib.loads((packages / name / "pyproject.toml").read_text())["project"]
        assert {row["group"] for row in rows} == set(project["entry-points"])
        assert {(row["name"], row["state"]) for row in rows} == {(f"new_{kind}", "ok")}


def test_the_page_lists_the_kinds() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| \[", (DOCS / "examples.md").read_text(), re.MULTILINE)
    assert dict(rows) == describe_kinds()
