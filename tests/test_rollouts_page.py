"""The rollout of docs/rollouts.md: built, installed beside everything else, and held to its suite; then trained with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "rollouts.md"
_BLOCK = re.compile(r'^```\w+ title="(?P<file>[^"]+)"\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)


class Installed:
    """The page's package, installed in a folder that PYTHONPATH names."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "rollcast-plain"
        for block in _BLOCK.finditer(PAGE.read_text()):
            file = self.package / block["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block["text"])
        (self.package / "src" / "rollcast_plain" / "__init__.py").touch()
        site = folder / "site"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
        subprocess.run([*pip, "--no-build-isolation", "--target", site, self.package], check=True)
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(site), *_sources()])}

    def run(self, *command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=self.package,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
        return done.stdout


def _sources() -> list[str]:
    """Source folders, where the distributions are installed from those."""
    return [entry for entry in sys.path if entry.endswith("src")]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("plain"))


def test_passes_the_suite(installed: Installed) -> None:
    summary = installed.run("pytest", "-q", "-p", "no:cacheprovider", "tests").splitlines()[-1]
    passed = re.search(r"(\d+) passed", summary)
    assert passed is not None
    assert int(passed[1]) > 25, summary
    assert "failed" not in summary


def test_trains(installed: Installed, tmp_path: Path) -> None:
    settings = [
        *("recipe=quickstart", "runtime=local", "rollout.n=2", "trainer.total_steps=1", "trainer.save_freq=-1"),
        *("data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "data.val_files=[]", "trainer.warm_start=null"),
    ]
    first, second = tmp_path / "first", tmp_path / "second"
    installed.run("rollcast", "train", *settings, f"run_dir={first}", "model.random_init=true")
    installed.run("rollcast", "train", *settings, f"run_dir={second}", "rollout=plain", f"model.path={first}/export")
    (row,) = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    assert row["rollout/logprob_gap_max"] < 1e-4
    assert row["sync/canary_gap"] < 1e-4
