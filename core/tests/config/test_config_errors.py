"""Every mistake in a configuration says where it was made, which key it is about, and what would be right."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from rollcast.config import build_section, compose
from rollcast.config.overrides import explain_option
from rollcast.config.sources import find_options, find_sources
from rollcast.contracts.engine import ModelConfig
from rollcast.errors import ConfigError, PluginConflictError, PluginLoadError, PluginNotFoundError

RECIPE = "recipe=tp_recipe"


def refused(*overrides: str, config_dir: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, config_dir)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("trainer.sed=1", "did you mean 'trainer.seed'?"),
        ("+trainer.sed=1", "did you mean 'trainer.seed'?"),
        ("learner.inner.betsa=[1]", "did you mean 'learner.inner.betas'?"),
        ("trainr.seed=1", "did you mean 'trainer.seed'?"),
        ("seed=1", "did you mean 'trainer.seed'?"),
        ("rate=1", "did you mean 'learner.inner.rate'?"),
        ("trackrs=[]", "did you mean 'trackers'?"),
        ("trainer={sed: 1}", "did you mean 'trainer.seed'?"),
        ("~trainer.sed", "did you mean 'trainer.seed'?"),
        ("reward.reward_kwarg.x=1", "did you mean 'reward.reward_kwargs'?"),
    ],
)
def test_misspelt_key(override: str, nearest: str) -> None:
    message = refused(RECIPE, override)
    assert f"override {override!r}: there is no key" in message
    assert nearest in message


def test_unlike_any_key_lists_what_the_section_has() -> None:
    message = refused(RECIPE, "trainer.xyzzy=1")
    assert "did you mean" not in message
    assert "Keys of trainer: name, note, save_freq, seed." in message


def test_value_is_not_a_section() -> None:
    assert "'trainer.seed' is a value, not a section" in refused(RECIPE, "trainer.seed.x=1")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.seed=abc", "trainer.seed must be an integer, got 'abc'"),
        ("trainer.seed=1.5", "trainer.seed must be an integer, got 1.5"),
        ("trainer.seed=null", "trainer.seed must be an integer, got null"),
        ("trainer.seed=", "trainer.seed must be an integer, got ''"),
        ("learner.limit=[1]", "learner.limit must be an integer or null, got [1]"),
        ("learner.quick=maybe", "learner.quick must be true or false, got 'maybe'"),
        ("learner.inner.rate=fast", "learner.inner.rate must be a number, got 'fast'"),
        ("learner.inner.betas=0.9", "learner.inner.betas must be a list of 2 numbers, got 0.9"),
        ("learner.inner=5", "learner.inner must be a section with the keys rate, share, betas, got 5"),
        ("reward.reward_kwargs=5", "reward.reward_kwargs must be a mapping, got 5"),
        ("trackers=console", "trackers must be a list of strings, got 'console'"),
        ("run_dir=null", "run_dir must be a string, got null"),
        (
            "run_dir=s3://bucket/run",
            "run_dir must be a path on this machine, got the URL 's3://bucket/run'; mount the file system, or give a "
            "local path",
        ),
        ("runtime.num_cpus=two", "runtime.num_cpus must be an integer or null, got 'two'"),
        ("placement.nnodes=[1]", "placement.nnodes must be an integer, got [1]"),
        ("trainer.seed=true", "trainer.seed must be an integer, got True"),
        ("trainer.note=true", "trainer.note must be a string, got True"),
        ("placement.nnodes=0", "placement.nnodes must be at least 1, got 0"),
        ("runtime.call_timeout_s=-1", "runtime.call_timeout_s must be above 0, got -1"),
        ("trainer.save_freq=0", "trainer.save_freq must be -1 or at least 1, got 0"),
        ("trainer.save_freq=often", "trainer.save_freq must be -1 or an integer, got 'often'"),
        ("learner.mode=slow", "learner.mode must be one of eager, lazy, got 'slow'"),
        ("learner.inner.share=1.5", "learner.inner.share must be from 0 to 1, got 1.5"),
        ("learner.inner.betas=[1]", "learner.inner.betas must be a list of 2 numbers, got [1]"),
        ("critic.unit.size=0", "critic.unit.size must be at least 1, got 0"),
    ],
)
def test_ill_typed_value(override: str, says: str) -> None:
    assert refused(RECIPE, override) == f"override {override!r}: {says}"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("learner.inner.rate=nan", "learner.inner.rate must be a finite number, got nan"),
        ("learner.inner.rate=-inf", "learner.inner.rate must be a finite number, got -inf"),
        ("learner.inner.rate='nan'", "learner.inner.rate must be a finite number, got nan"),
        ("learner.inner.betas=[0.9,inf]", "learner.inner.betas[1] must be a finite number, got inf"),
        ("reward.reward_kwargs={a: [{b: nan}]}", "reward.reward_kwargs.a[0].b must be a finite number, got nan"),
        ("learner.cap=nan", "learner.cap must be "),
        ("learner.cap=-inf", "learner.cap must be "),
        ("critic.unit.radius=nan", "critic.unit.radius must be a finite number, got nan"),
    ],
)
def test_number_that_is_not_finite(override: str, says: str) -> None:
    assert refused(RECIPE, override).startswith(f"override {override!r}: {says}")


def test_infinity_where_it_has_a_meaning() -> None:
    config = compose([RECIPE, "learner.cap=inf", "reward.reward_kwargs.margin=inf"]).config
    assert config.learner.cap == config.reward.reward_kwargs.margin == math.inf


def test_number_that_is_not_finite_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [/recipe/tp_recipe, _self_]\nlearner: {inner: {rate: .nan}}\n"
    )
    message = refused("recipe=mine", config_dir=tmp_path)
    assert message.endswith("learner.inner.rate must be a finite number, got nan")
    assert "mine.yaml" in message


def test_ill_typed_element_of_a_list() -> None:
    message = refused(RECIPE, "learner.inner.betas=[0.9,x]")
    assert "override 'learner.inner.betas=[0.9,x]'" in message
    assert "learner.inner.betas" in message


def test_empty_run_dir() -> None:
    assert "run_dir is empty" in refused(RECIPE, "run_dir=")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.seed", "write key=value"),
        ("run_dir=a=b", "quote a value"),
        ("trainer.seed=1,2", "trainer.seed=[a,b]"),
        ("trainer.seed=choice(1,2)", "several values"),
    ],
)
def test_not_an_override(override: str, says: str) -> None:
    message = refused(RECIPE, override)
    assert repr(override) in message
    assert says in message


def test_quoting_as_the_message_says_works() -> None:
    assert compose([RECIPE, "run_dir='a=b'"]).config.run_dir == "a=b"


# -- config groups ------------------------------------------------------------------------------


def test_unknown_option_lists_options_and_the_nearest() -> None:
    message = refused("recipe=tp_recpie")
    assert message.startswith("recipe=tp_recpie: no installed plugin provides it; installed: ")
    assert "did you mean recipe=tp_recipe?" in message


def test_unknown_option_that_a_first_party_distribution_would_provide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcast.config.overrides.find_plugins", lambda group: ())  # as if it were not installed
    message = explain_option("engine", "megatron", ["fsdp"], broken=["one more line"])
    assert message.startswith("engine=megatron: no installed plugin provides it; installed: fsdp;")
    assert "pip install rollcast-megatron" in message
    assert message.endswith("\none more line")


def test_plugin_without_a_file_of_its_name(make_dist: Callable[..., Path]) -> None:
    make_dist("tp-own", {"rollcast.rollouts": {"tp_own": "tp_own:Rollout"}}, {"tp_own.py": "Rollout = object"})
    message = explain_option("rollout", "tp_own", ["hf"], broken=[])
    assert message.startswith("rollout=tp_own: tp-own 1.0 provides the plugin 'tp_own', but no installed package has a")
    assert "file rollout/tp_own.yaml" in message
    assert "set rollout.name=tp_own" in message


def test_key_that_names_an_option(make_dist: Callable[..., Path]) -> None:
    schema = """
        from typing import Annotated
        from rollcast.contracts.config import ConfigSchema, OptionOf, config

        @config
        class Warm:
            first: Annotated[str | None, OptionOf("recipe")] = None

        SCHEMAS = (ConfigSchema(path="tp_warm", schema=Warm),)
    """
    make_dist("tp-warm", {"rollcast.configs": {"warm": "tp_warm_conf"}}, {"tp_warm_conf/__init__.py": schema})
    assert compose([RECIPE, "tp_warm.first=tp_recipe"]).config.tp_warm.first == "tp_recipe"
    assert compose([RECIPE]).config.tp_warm.first is None
    message = refused(RECIPE, "tp_warm.first=tp_recpie")
    assert message.startswith(
        "override 'tp_warm.first=tp_recpie': tp_warm.first: recipe=tp_recpie: no installed plugin"
    )
    assert "did you mean recipe=tp_recipe?" in message


def test_options_are_those_of_every_source(tmp_path: Path) -> None:
    write(tmp_path / "my", "recipe/mine.yaml", MINE)
    assert find_options("tp_engine") == ["large", "small"]
    assert {"mine", "tp_recipe"} <= set(find_options("recipe", tmp_path / "my"))
    assert "mine" not in find_options("recipe")


@pytest.mark.parametrize("override", ["trainer=null", "trainer=[tp_trainer]", "trainer=3"])
def test_group_takes_one_name(override: str) -> None:
    message = refused(override)
    assert repr(override) in message
    assert "tp_trainer" in message


def test_group_that_nothing_chosen_has() -> None:
    message = refused("tp_engine=small")
    assert "'tp_engine'" in message
    assert "trainer=..." in message


def test_recipe_that_does_not_fit_the_trainer(task_plugin: Path) -> None:
    conf = task_plugin / "tp_task" / "conf"
    (conf / "trainer" / "tp_bare.yaml").write_text("# @package trainer\nname: tp_trainer\n")
    text = (conf / "recipe" / "tp_recipe.yaml").read_text()
    (conf / "recipe" / "tp_recipe.yaml").write_text(
        text.replace("tp_trainer", "tp_trainer\n  - override /tp_engine: large")
    )
    assert compose([RECIPE]).choices["tp_engine"] == "large"
    message = refused(RECIPE, "trainer=tp_bare")
    assert "tp-task: recipe/tp_recipe.yaml" in message
    assert "'tp_engine'" in message
    assert "trainer=tp_bare" in message


def test_no_trainer_is_said_where_keys_are_missing_for_it() -> None:
    assert "No trainer is chosen" in refused("learner.limit=1")
    assert "No trainer is chosen" not in refused(RECIPE, "learner.limt=1")


# -- files --------------------------------------------------------------------------------------


def write(folder: Path, path: str, content: str) -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return file


MINE = "# @package _global_\ndefaults:\n  - tp_recipe\n  - _self_\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (MINE + "trainer:\n  sed: 1\n", "there is no key 'trainer.sed'; did you mean 'trainer.seed'?"),
        (MINE + "trainer:\n  seed: many\n", "trainer.seed must be an integer, got 'many'"),
        (MINE + "learner:\n  path: ${nope}\n", "learner.path=${nope}: Interpolation key 'nope' not found"),
        (MINE.replace("tp_recipe", "tp_recipes"), "tp_recipes"),
        (MINE.replace("- _self_", "- override /trainer: tp_trianer\n  - _self_"), "tp_trianer"),
        (MINE + "trainer: [\n", "not YAML"),
    ],
)
def test_mistake_in_a_file_names_the_file(tmp_path: Path, content: str, says: str) -> None:
    file = write(tmp_path / "my", "recipe/mine.yaml", content)
    message = refused("recipe=mine", config_dir=tmp_path / "my")
    assert says in message
    assert str(file) in message


def test_unset_value() -> None:
    message = refused("trainer=tp_trainer")
    assert message.startswith("learner.path must be set; tp-task: trainer/tp_trainer.yaml leaves it open")
    assert "learner.path=..." in message


def test_value_that_a_file_leaves_open_is_not_filled_with_a_default(task_plugin: Path) -> None:
    file = task_plugin / "tp_task" / "conf" / "trainer" / "tp_trainer.yaml"
    file.write_text(file.read_text().replace('note: ""', "note: ???"))
    assert "trainer.note must be set" in refused(RECIPE)


def test_unset_value_may_be_left_open_for_looking_at_it() -> None:
    composed = compose(["trainer=tp_trainer"], allow_missing=True)
    from omegaconf import OmegaConf

    assert OmegaConf.is_missing(composed.config.learner, "path")


def test_value_that_refers_to_an_unset_one_is_unset() -> None:
    message = refused("trainer=tp_trainer", "trainer.note='${learner.path}/x'")
    assert "must be set" in message


@pytest.mark.parametrize("value", ["${nope}", "${oc.env:TP_NOT_THERE}", "${learner.nope}", "${run_dir}/${nope}"])
def test_broken_interpolation(value: str) -> None:
    override = f"learner.path={value}"
    assert refused(RECIPE, override).startswith(f"override {override!r}: {override}: ")


def test_section_that_lacks_a_mandatory_value_is_not_built() -> None:
    with pytest.raises(ConfigError, match=r"model\.path must be set; here\.yaml leaves it open"):
        build_section(ModelConfig, {"random_init": True}, "model", {"model": "here.yaml"})


# -- parts that keys name -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key", "asked", "near"),
    [
        ("reward.name=tp_rewrad", "reward.name", "tp_rewrad", "tp_reward"),
        ("trackers=[jsonl,consol]", "trackers", "consol", "console"),
        ("runtime.name=rya", "runtime.name", "rya", "ray"),
        ("trainer.name=tp_trainr", "trainer.name", "tp_trainr", "tp_trainer"),
    ],
)
def test_unknown_part(override: str, key: str, asked: str, near: str) -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        compose([RECIPE, override])
    message = str(caught.value)
    assert repr(asked) in message
    assert f"{key} (override {override!r})" in message
    assert f"Did you mean {near!r}?" in message


def test_part_that_two_distributions_claim(make_dist: Callable[..., Path]) -> None:
    make_dist("tp-other", {"rollcast.rewards": {"tp_reward": "tp_other:reward"}})
    with pytest.raises(PluginConflictError, match="tp-other") as caught:
        compose([RECIPE])
    assert "tp-task" in str(caught.value)
    assert "reward.name (tp-task: trainer/tp_trainer.yaml)" in str(caught.value)


def test_broken_part_is_found_by_loading_not_by_composing(make_dist: Callable[..., Path]) -> None:
    make_dist(
        "tp-broken",
        {"rollcast.rewards": {"tp_bad": "tp_broken:reward"}},
        {"tp_broken.py": "raise RuntimeError('half built')"},
    )
    composed = compose([RECIPE, "reward.name=tp_bad"])
    with pytest.raises(PluginLoadError, match="half built") as caught:
        composed.load_plugins()
    assert "reward.name (override 'reward.name=tp_bad')" in str(caught.value)
    compose([RECIPE, "trackers=[]"]).load_plugins()


# -- packages -----------------------------------------------------------------------------------


def test_broken_config_package_stops_nobody_else(
    make_dist: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    make_dist(
        "tp-broken",
        {"rollcast.configs": {"broken": "tp_broken_conf"}},
        {"tp_broken_conf/__init__.py": "import tp_not_there", "tp_broken_conf/recipe/theirs.yaml": "{}"},
    )
    with caplog.at_level(logging.WARNING):
        assert compose([RECIPE]).config.trainer.seed == 11
    assert "tp_broken_conf of tp-broken 1.0" in caplog.text
    message = refused("recipe=theirs")
    assert "recipe=theirs: no installed plugin provides it" in message
    assert "config package tp_broken_conf of tp-broken 1.0 cannot be used: ModuleNotFoundError" in message


def test_config_package_with_schemas_of_another_kind_is_left_out(make_dist: Callable[..., Path]) -> None:
    make_dist(
        "tp-odd",
        {"rollcast.configs": {"odd": "tp_odd_conf"}},
        {"tp_odd_conf/__init__.py": "SCHEMAS = ({'path': 'x'},)"},
    )
    (line,) = find_sources().broken
    assert "not a ConfigSchema" in line


def test_same_file_in_two_packages(make_dist: Callable[..., Path], tmp_path: Path) -> None:
    make_dist(
        "tp-twin",
        {"rollcast.configs": {"twin": "tp_twin_conf"}},
        {"tp_twin_conf/__init__.py": "", "tp_twin_conf/recipe/tp_recipe.yaml": "# @package _global_\nrun_dir: twin\n"},
    )
    message = refused(RECIPE)
    assert "recipe=tp_recipe is provided by" in message
    assert "tp-task" in message
    assert "tp-twin" in message
    # A file of the user's own decides.
    write(tmp_path / "my", "recipe/tp_recipe.yaml", "# @package _global_\nrun_dir: mine\n")
    assert compose([RECIPE], tmp_path / "my").config.run_dir == "mine"
    assert compose(["trainer=tp_trainer", "learner.path=x"]).config.run_dir != "twin"
