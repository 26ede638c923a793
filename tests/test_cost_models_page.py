"""docs/cost-models.md: its cost model is built, installed, tested, and prices a mapping."""

from __future__ import annotations

import json

import pytest
from page_packages import PagePackage

SMALL = (
    *("recipe=quickstart", "runtime=local", "run_dir=runs/priced", "trainer.warm_start=null"),
    *("model.path=model", "model.random_init=true", "cluster.device=cpu", "cluster.devices_per_node=2"),
)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> PagePackage:
    return PagePackage("cost-models.md", "rollcast-prices", tmp_path_factory.mktemp("prices"))


def test_the_pages_tests_pass(plugin: PagePackage) -> None:
    assert plugin.count_passed() >= 6


def test_its_prices_make_a_mapping(plugin: PagePackage) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (plugin.folder / "model").mkdir()
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **sizes, **heads}
    (plugin.folder / "model" / "config.json").write_text(json.dumps(config))
    (best,) = json.loads(plugin.rollcast("map", "--json", "--count", "1", "--cost-model", "token_prices", *SMALL))
    assert best["stages"]["rollout"]["compute"] > best["stages"]["update_actor"]["compute"] > 0
    assert best["stages"]["weight_sync"]["communication"] == 1.0
