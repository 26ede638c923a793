"""``rollcast new``: each kind's package is built and installed, announces its plugin and passes its tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from page_packages import titled_blocks
from run_commands import Commands

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
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(folder / "site")]
    subprocess.run([*install, *map(str, (folder / "wheels").glob("*.whl"))], check=True, timeout=120)
    return folder


def run(packages: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(packages / "site"), "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=packages, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def test_their_tests_pass(packages: Path, tmp_path: Path) -> None:
    report = tmp_path / "passed.txt"
    folders = [f"rollcast-new-{kind.replace('_', '-')}/tests" for kind in KINDS]
    report.write_text(run(packages, "pytest", "-q", "-p", "no:cacheprovider", "-rA", "--durations=15", *folders))
    for kind in KINDS:
        assert f"test_new_{kind}.py::" in report.read_text(), f"{kind} has no test that passed"


def test_they_announce_what_they_bring(packages: Path) -> None:
    listed = json.loads(run(packages, "rollcast", "plugins", "--json", "--check"))
    parts = listed["parts"] if isinstance(listed, dict) else listed
    for kind in KINDS:
        name = f"rollcast-new-{kind.replace('_', '-')}"
        rows = [part for part in parts if part["distribution"] == name]
        project = tomllib.loads((packages / name / "pyproject.toml").read_text())["project"]
        assert {row["group"] for row in rows} == set(project["entry-points"])
        assert {(row["name"], row["state"]) for row in rows} == {(f"new_{kind}", "ok")}
