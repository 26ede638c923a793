"""The plugin of docs/write-a-plugin.md, built as a wheel outside the repository, installed and used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "write-a-plugin.md"
_BLOCK = re.compile(r'^```(?:python|toml) title="(?P<file>[^"]+)"\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)


class Stranger:
    """A virtual environment that sees what is installed here, and the plugin's package beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / "rollcast-stripes"
        for block in _BLOCK.finditer(PAGE.read_text()):
            place = folder if block["file"] == "use_stripes.py" else self.package
            file = place / block["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block["text"])
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.bin = folder / "venv" / "bin"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        here = [sysconfig.get_path("purelib"), *(entry for entry in sys.path if entry.endswith("src"))]
        site = folder / "venv" / "lib" / version / "site-packages"
        # addsitedir rather than a plain path: what is installed here may itself come by .pth files.
        (site / "parent.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in here))

    def run(self, *command: str, code: int = 0) -> str:
        environment = {**os.environ, "COLUMNS": "300", "OMP_NUM_THREADS": "1", "RAY_ADDRESS": ""}
        done = subprocess.run(
            [str(self.bin / "python"), *command],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def rollcast(self, *arguments: str) -> str:
        return self.run("-m", "rollcast", *arguments)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    made = Stranger(tmp_path_factory.mktemp("stranger"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(made.folder), str(made.package)]
    subprocess.run([*pip, *build], check=True, timeout=120)
    (wheel,) = made.folder.glob("rollcast_stripes-*.whl")
    install = ["--python", str(made.bin / "python"), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install], check=True, timeout=120)
    return made


def test_code_is_about_thirty_lines(stranger: Stranger) -> None:
    lines = (stranger.package / "src" / "rollcast_stripes.py").read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.strip().startswith(('"""', "import", "from", "#"))]
    assert len(code) <= 30


def test_parts_are_listed_and_load(stranger: Stranger) -> None:
    parts = json.loads(stranger.rollcast("plugins", "--json", "--check"))
    rows = [part for part in _rows(parts) if part["distribution"] == "rollcast-stripes"]
    assert {(row["group"], row["name"]) for row in rows} == {
        ("rollcast.dispatch_modes", "striped"),
        ("rollcast.advantages", "centred"),
        ("rollcast.rewards", "right_so_far"),
    }
    assert {row["version"] for row in rows} == {"1.0.0"}
    assert {row["state"] for row in rows} == {"ok"}


def _rows(report: object) -> list[dict[str, str]]:
    return report["parts"] if isinstance(report, dict) else report


def test_mode_works_in_ray_workers(stranger: Stranger) -> None:
    assert stranger.run("use_stripes.py").strip().splitlines()[-1] == "[0, 2, 4, 6, 8]"


def test_estimator_and_reward_are_named_in_a_command_line(stranger: Stranger) -> None:
    stranger.rollcast(
        *("train", "recipe=quickstart", "runtime=ray", "run_dir=runs/stripes", "trainer.total_steps=2"),
        *("trainer.warm_start=null", "model.random_init=true", "data.train_batch_size=32", "data.val_max_samples=8"),
        *("actor.ppo_mini_batch_size=16", "rollout.n=16", "trainer.export=false"),
        *("algorithm.adv_estimator=centred", "reward.name=right_so_far"),
    )
    rows = [json.loads(line) for line in (stranger.folder / "runs/stripes/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    # Random answers get part of the digits right now and then, but none is right as a whole.
    assert any(0 < row["reward/max"] < 1 for row in rows[1:])


def test_suites_pass(stranger: Stranger) -> None:
    out = stranger.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "rollcast-stripes/tests")
    assert re.search(r"\d\d+ passed", out), out


def test_suites_fail_a_wrong_part(stranger: Stranger) -> None:
    """The same suites over a mode that forgets to restore the order."""
    wrong = stranger.folder / "wrong"
    wrong.mkdir()
    (wrong / "test_wrong.py").write_text(
        "import pytest\n"
        "from rollcast.protocol import DataProto\n"
        "from rollcast.controller.dispatch import dispatch_modes\n"
        "from rollcast.testing import DispatchSuite\n"
        "from rollcast_stripes import Striped\n"
        "class Forgets(Striped):\n"
        "    name = 'forgets'\n"
        "    def collect(self, worker_group, outputs):\n"
        "        return DataProto.concat(list(outputs))\n"
        "dispatch_modes.register('forgets', Forgets)\n"
        "class TestForgets(DispatchSuite):\n"
        "    name = 'forgets'\n"
    )
    out = stranger.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "wrong", code=1)
    assert re.search(r"[1-9]\d* failed", out), out
