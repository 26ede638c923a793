"""docs/stages.md: its stage and estimator are built, installed, tested, planned and trained with."""

from __future__ import annotations

import json

import pytest
from page_packages import PagePackage
from run_commands import read_metrics

SMALL = (
    *("recipe=quickstart", "runtime=local", "run_dir=runs/hard", "placement.n_gpus_per_node=1"),
    *("trainer.warm_start=null", "model.random_init=true", "data.train_batch_size=8", "data.val_max_samples=8"),
    *("actor.ppo_mini_batch_size=4", "rollout.n=4", "trainer.export=false", "trainer.total_steps=1"),
    "algorithm.adv_estimator=hard",
)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> PagePackage:
    return PagePackage("stages.md", "rollcast-hard", tmp_path_factory.mktemp("hard"))


def test_the_pages_tests_pass(plugin: PagePackage) -> None:
    assert plugin.count_passed() >= 7


@pytest.mark.exhaustive
def test_the_plan_says_why_the_stage_is_there(plugin: PagePackage) -> None:
    plan = json.loads(plugin.rollcast("plan", "--json", *SMALL))
    assert plan["stages"]["difficulty"]["reason"] == "advantage reads difficulty"
    assert list(plan["stages"]).index("difficulty") < list(plan["stages"]).index("advantage")


def test_the_estimator_trains_on_the_column(plugin: PagePackage) -> None:
    plugin.rollcast("train", *SMALL)
    row = read_metrics(plugin.folder / "runs/hard")[-1]
    assert 0 <= row["reward/difficulty"] <= 1
    assert row["time/difficulty_s"] > 0
