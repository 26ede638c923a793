"""What a composed configuration holds, and where each value is said to come from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rollcast.config import build_section, compose
from rollcast.config.overrides import format_override, parse_override
from rollcast.config.sources import flatten
from rollcast.config.validation import origin_of
from rollcast.errors import ConfigError
from rollcast.runtime.local import LocalRuntimeConfig

RECIPE = ["recipe=tp_recipe"]
RECIPE_FILE = "tp-task: recipe/tp_recipe.yaml"
TRAINER_FILE = "tp-task: trainer/tp_trainer.yaml"
quick = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # the fixtures only put a package on the path


def leaves(overrides: list[str], **options: object) -> dict[str, object]:
    return flatten(OmegaConf.to_container(compose(overrides, **options).config))


@pytest.mark.parametrize(
    ("key", "value", "origin"),
    [
        ("trainer.seed", 11, RECIPE_FILE),
        ("learner.limit", 3, RECIPE_FILE),
        ("learner.path", "runs/tp/model", RECIPE_FILE),
        ("run_dir", "runs/tp", RECIPE_FILE),
        ("learner.inner.rate", 0.25, TRAINER_FILE),
        ("trainer.name", "tp_trainer", TRAINER_FILE),
        ("learner.not_in_the_file", 7, "default of tp_task.schemas.Learner"),
        ("placement.nnodes", 1, "rollcast: config.yaml"),
        ("runtime.name", "ray", "rollcast-ray: runtime/ray.yaml"),
    ],
)
def test_value_and_origin(key: str, value: object, origin: str) -> None:
    composed = compose(RECIPE)
    assert OmegaConf.select(composed.config, key) == value
    assert composed.origins[key] == origin


def test_what_is_merged_last_is_the_origin() -> None:
    """The trainer's own file comes after its engine's, so it has the say on ``quick``."""
    composed = compose(RECIPE)
    assert composed.config.learner.quick is False
    assert composed.origins["learner.quick"] == TRAINER_FILE


def test_every_leaf_has_an_origin() -> None:
    composed = compose([*RECIPE, "reward.reward_kwargs.deep.er=1", "learner={limit: 4}"])
    for key in flatten(OmegaConf.to_container(composed.config)):
        assert origin_of(key, composed.origins) != "config", key


def test_override_wins_wherever_it_stands() -> None:
    for overrides in (["trainer.seed=5", *RECIPE], [*RECIPE, "trainer.seed=5"], [*RECIPE, "+trainer.seed=5"]):
        composed = compose(overrides)
        assert composed.config.trainer.seed == 5
        assert composed.origins["trainer.seed"] == f"override {overrides[-1 if overrides[0] in RECIPE else 0]!r}"


def test_last_override_wins() -> None:
    composed = compose([*RECIPE, "trainer.seed=5", "trainer.seed=6"])
    assert composed.config.trainer.seed == 6
    assert composed.origins["trainer.seed"] == "override 'trainer.seed=6'"


def test_override_reaches_interpolations() -> None:
    assert leaves([*RECIPE, "run_dir=elsewhere"])["learner.path"] == "elsewhere/model"


def test_override_of_a_section_is_the_origin_of_its_leaves() -> None:
    composed = compose([*RECIPE, "learner={limit: 4, inner: {rate: 1.5}}"])
    assert (composed.config.learner.limit, composed.config.learner.inner.rate) == (4, 1.5)
    assert composed.config.learner.path == "runs/tp/model"
    assert composed.origins["learner.inner.rate"].startswith("override")
    assert composed.origins["learner.inner.betas"] == TRAINER_FILE


def test_values_take_the_type_of_their_schema() -> None:
    composed = compose([*RECIPE, "learner.inner.rate=2", "trainer.seed='12'"])
    assert isinstance(composed.config.learner.inner.rate, float)
    assert composed.config.trainer.seed == 12


def test_choices() -> None:
    choices = compose([*RECIPE, "runtime=local", "tp_engine=large"]).choices
    assert {**choices, "trainer": "tp_trainer", "recipe": "tp_recipe", "runtime": "local"} == choices
    assert choices["tp_engine"] == "large"


@quick
@given(number=st.integers(-(2**40), 2**40), rate=st.floats(-1e6, 1e6, allow_nan=False))
def test_numbers_arrive_unchanged(number: int, rate: float) -> None:
    found = leaves([*RECIPE, f"trainer.seed={number}", f"learner.inner.rate={rate!r}"])
    assert found["trainer.seed"] == number
    assert found["learner.inner.rate"] == rate


text = st.text(st.characters(codec="utf-8", exclude_characters="$\r\n", exclude_categories=["Cc"]), max_size=30)


@settings(deadline=None)
@given(value=text)
def test_format_override_keeps_every_character(value: str) -> None:
    parsed = parse_override(format_override("trainer.note", value))
    assert (parsed.key, parsed.value) == ("trainer.note", value)


@quick
@given(value=text)
def test_formatted_text_arrives_unchanged(value: str) -> None:
    assert leaves([*RECIPE, format_override("trainer.note", value)])["trainer.note"] == value


def test_free_mapping_takes_any_key() -> None:
    overrides = ["reward.reward_kwargs.x=1", "reward.reward_kwargs.deep.er=[a,b]", "reward.reward_kwargs={y: 2}"]
    composed = compose([*RECIPE, *overrides])
    assert composed.config.reward.reward_kwargs == {"x": 1, "deep": {"er": ["a", "b"]}, "y": 2}
    assert composed.origins["reward.reward_kwargs.x"] == "override 'reward.reward_kwargs.x=1'"
    assert compose([*RECIPE, *overrides, "~reward.reward_kwargs.x"]).config.reward.reward_kwargs.keys() == {"deep", "y"}


# -- a folder of the user's ---------------------------------------------------------------------


def write(folder: Path, path: str, content: str) -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dedent(content))
    return file


def test_config_dir_adds_options(tmp_path: Path) -> None:
    recipe = "# @package _global_\ndefaults:\n  - tp_recipe\n  - _self_\ntrainer:\n  seed: 99\n"
    file = write(tmp_path / "my", "recipe/mine.yaml", recipe)
    composed = compose(["recipe=mine"], tmp_path / "my")
    assert composed.config.trainer.seed == 99
    assert composed.origins["trainer.seed"] == str(file)
    assert composed.config.learner.limit == 3
    assert composed.origins["learner.limit"] == RECIPE_FILE


def test_config_dir_stands_in_front_of_what_is_installed(tmp_path: Path) -> None:
    write(tmp_path / "my", "tp_engine/small.yaml", "# @package learner\nlimit: 123\n")
    trainer = ["trainer=tp_trainer", "learner.path=x", "~tp_engine"]
    assert compose(trainer, tmp_path / "my").config.learner.limit is None
    write(tmp_path / "my", "recipe/tp_recipe.yaml", "# @package _global_\nrun_dir: mine\n")
    assert compose(["recipe=tp_recipe"], tmp_path / "my").config.run_dir == "mine"


def test_config_dir_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        compose(RECIPE, tmp_path / "nowhere")


# -- by itself ----------------------------------------------------------------------------------


def test_core_has_few_keys_of_its_own() -> None:
    composed = compose()
    own = list(flatten(OmegaConf.to_container(composed.config)))
    assert 5 < len(own) < 60


def test_core_files_have_every_key_of_their_schemas() -> None:
    """Nothing in the core is set by a default that no file shows."""
    assert not [origin for origin in compose().origins.values() if origin.startswith("default of rollcast.")]


def test_surrounding_hydra_is_left_alone() -> None:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with initialize_config_module("rollcast.config.conf", version_base="1.3"):
        before = hydra_compose("config", ["runtime=local"])
        compose(RECIPE)
        assert hydra_compose("config", ["runtime=local"]) == before


def test_composing_imports_nothing_heavy() -> None:
    code = (
        "import sys; from rollcast.config import compose; compose(['runtime=local', 'run_dir=x']); "
        "print([name for name in ('torch', 'tensordict', 'ray', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_build_section() -> None:
    section = build_section(LocalRuntimeConfig, {"name": "local", "num_cpus": "3", "of_another_schema": 1})
    assert section == LocalRuntimeConfig(name="local", num_cpus=3)
    assert isinstance(section, LocalRuntimeConfig)
