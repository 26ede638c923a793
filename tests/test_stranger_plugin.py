"""The plugin of docs/write-a-plugin.md, built as a wheel outside the repository, installed and used."""

from __future__ import annotations

import json
import re

import pytest
from page_packages import PagePackage
from run_commands import read_metrics

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> PagePackage:
    folder = tmp_path_factory.mktemp("stranger")
    return PagePackage("write-a-plugin.md", "rollcast-stripes", folder, beside=("use_stripes.py",))


def test_code_is_about_thirty_lines(stranger: PagePackage) -> None:
    lines = (stranger.package / "src" / "rollcast_stripes.py").read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.strip().startswith(('"""', "import", "from", "#"))]
    assert len(code) <= 30


def test_parts_are_listed_and_load(stranger: PagePackage) -> None:
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


def test_mode_works_in_ray_workers(stranger: PagePackage) -> None:
    assert stranger.run("use_stripes.py").strip().splitlines()[-1] == "[0, 2, 4, 6, 8]"


@pytest.mark.exhaustive
def test_estimator_and_reward_are_named_in_a_command_line(stranger: PagePackage) -> None:
    stranger.rollcast(
        *("train", "recipe=quickstart", "runtime=ray", "run_dir=runs/stripes", "trainer.total_steps=2"),
        *("trainer.warm_start=null", "model.random_init=true", "data.train_batch_size=32", "data.val_max_samples=8"),
        *("actor.ppo_mini_batch_size=16", "rollout.n=16", "trainer.export=false"),
        *("algorithm.adv_estimator=centred", "reward.name=right_so_far"),
    )
    rows = read_metrics(stranger.folder / "runs/stripes")
    assert [row["step"] for row in rows] == [0, 1, 2]
    # Random answers get part of the digits right now and then, but none is right as a whole.
    assert any(0 < row["reward/max"] < 1 for row in rows[1:])


def test_suites_pass(stranger: PagePackage) -> None:
    assert stranger.count_passed() >= 10


def test_suites_fail_a_wrong_part(stranger: PagePackage) -> None:
    """The same suites over a mode that forgets to restore the order."""
    wrong = stranger.folder / "wrong"
    wrong.mkdir()
    (wrong / "test_wrong.py").write_text(
        "import pytest\n"
        "from rollcast.protocol import DataProto\n"
        "from rollcast.contracts.dispatch import dispatch_modes\n"
        "from rollcast_testing import DispatchSuite\n"
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
