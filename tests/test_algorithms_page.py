"""docs/algorithms.md: its tables name every part, and its tutorial is built, installed, tested and trained with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from rollcast.contracts.algorithm import advantages, kl_penalties, loss_aggregations, policy_losses
from rollcast.contracts.kl_controller import kl_controllers
from rollcast.testing import PolicyLossSuite

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"
_BLOCK = re.compile(r'^```(?:python|toml) title="(?P<file>[^"]+)"\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)
BLOCKS = {block["file"]: block["text"] for block in _BLOCK.finditer(PAGE.read_text())}


def section(title: str) -> str:
    return PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    ("title", "registry"),
    [
        ("Advantages", advantages),
        ("Policy losses", policy_losses),
        ("Loss aggregation", loss_aggregations),
        ("KL penalties", kl_penalties),
        ("KL penalties", kl_controllers),
    ],
)
def test_every_part_has_a_row(title: str, registry: object) -> None:
    rows = [line.split("|")[1] for line in section(title).splitlines() if line.startswith("|")]
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    ours = {name for name in registry.names() if registry.find(name).distribution == "rollcast-algorithms"}  # type: ignore[attr-defined]
    assert ours <= listed


class TestTheLossOfThePage(PolicyLossSuite):
    on_policy_gradient = False

    @pytest.fixture
    def policy_loss(self) -> object:
        namespace: dict[str, object] = {}
        exec(BLOCKS["centred_loss.py"], namespace)
        return namespace["centred"]


class Plugin:
    """A virtual environment that sees what is installed here, and the tutorial's package beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / "rollcast-maxdev"
        for name, text in BLOCKS.items():
            file = self.package / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        here = [sysconfig.get_path("purelib"), *(entry for entry in sys.path if entry.endswith("src"))]
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        site = folder / "venv" / "lib" / version / "site-packages"
        (site / "parent.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in here))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(self.package)]
        subprocess.run([*pip, *build], check=True, timeout=120)
        (wheel,) = folder.glob("rollcast_maxdev-*.whl")
        install = ["--python", str(self.python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
        subprocess.run([*pip, *install], check=True, timeout=120)

    def run(self, *command: str) -> str:
        environment = {**os.environ, "COLUMNS": "300", "OMP_NUM_THREADS": "1", "RAY_ADDRESS": ""}
        done = subprocess.run(
            [str(self.python), *command],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Plugin:
    return Plugin(tmp_path_factory.mktemp("maxdev"))


def test_the_tutorials_tests_pass(plugin: Plugin) -> None:
    out = plugin.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "rollcast-maxdev/tests")
    assert re.search(r"\d\d passed", out), out


def test_the_tutorials_estimator_trains(plugin: Plugin) -> None:
    plugin.run(
        *(
            "-m",
            "rollcast",
            "train",
            "recipe=quickstart",
            "runtime=local",
            "run_dir=runs/maxdev",
            "placement.n_gpus_per_node=1",
        ),
        *("trainer.warm_start=null", "model.random_init=true", "data.train_batch_size=8", "data.val_max_samples=8"),
        *("actor.ppo_mini_batch_size=4", "rollout.n=4", "trainer.export=false", "trainer.total_steps=1"),
        *("algorithm.adv_estimator=maxdev", "+algorithm.adv_kwargs.limit=2.0"),
    )
    rows = [json.loads(line) for line in (plugin.folder / "runs/maxdev/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
