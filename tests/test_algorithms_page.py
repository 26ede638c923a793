"""docs/algorithms.md: its tables name every part, and its tutorial is built, installed, tested and trained with."""

from __future__ import annotations

import re

import pytest
from page_packages import DOCS, PagePackage, titled_blocks
from run_commands import read_metrics

from rollcast.contracts.algorithm import advantages, kl_penalties, loss_aggregations, policy_losses
from rollcast_algorithms.kl_controllers import kl_controllers
from rollcast_testing import PolicyLossSuite

PAGE = "algorithms.md"


def section(title: str) -> str:
    return (DOCS / PAGE).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


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
        exec(titled_blocks(PAGE)["centred_loss.py"], namespace)
        return namespace["centred"]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> PagePackage:
    return PagePackage(PAGE, "rollcast-maxdev", tmp_path_factory.mktemp("maxdev"))


def test_the_tutorials_tests_pass(plugin: PagePackage) -> None:
    assert plugin.count_passed() >= 10


def test_the_tutorials_estimator_trains(plugin: PagePackage) -> None:
    plugin.rollcast(
        *("train", "recipe=quickstart", "runtime=local", "run_dir=runs/maxdev", "placement.n_gpus_per_node=1"),
        *("trainer.warm_start=null", "model.random_init=true", "data.train_batch_size=8", "data.val_max_samples=8"),
        *("actor.ppo_mini_batch_size=4", "rollout.n=4", "trainer.export=false", "trainer.total_steps=1"),
        *("algorithm.adv_estimator=maxdev", "algorithm.adv_kwargs.limit=2.0"),
    )
    rows = read_metrics(plugin.folder / "runs/maxdev")
    assert [row["step"] for row in rows] == [0, 1]
