"""The engine of docs/engines.md: built, installed beside everything else, and held to its suite."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "engines.md"
_BLOCK = re.compile(r'^```\w+ title="(?P<file>[^"]+)"\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)


class Installed:
    """The page's package, installed in a folder that PYTHONPATH names."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "rollcast-small"
        for block in _BLOCK.finditer(PAGE.read_text()):
            file = self.package / block["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block["text"])
        (self.package / "src" / "rollcast_small" / "__init__.py").touch()
        site = folder / "site"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
        subprocess.run([*pip, "--no-build-isolation", "--target", site, self.package], check=True)
        sources = [entry for entry in sys.path if entry.endswith("src")]
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(site), *sources])}

    def run(self, *command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=self.package,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("small"))


def test_passes_the_suite(installed: Installed) -> None:
    summary = installed.run("pytest", "-q", "-p", "no:cacheprovider", "tests").splitlines()[-1]
    passed = re.search(r"(\d+) passed", summary)
    assert passed is not None
    assert int(passed[1]) > 40, summary
    assert "failed" not in summary
