"""What a composed configuration holds, and where each value is said to come from."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from dataclasses import field
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import ReadonlyConfigError

from rollcast.config import build_section, compose
from rollcast.config.overrides import format_override, parse_override
from rollcast.config.sections import origin_of, place_schemas
from rollcast.contracts.config import ConfigSchema, OnAccelerator, config, flatten
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
        ("trackers", ["console", "jsonl", "report"], "rollcast: config.yaml"),
        ("placement.nnodes", 1, "default of rollcast.contracts.sections.PlacementConfig"),
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


def test_interpolation_reaches_a_default() -> None:
    assert leaves([*RECIPE, "trainer.note=${learner.not_in_the_file}"])["trainer.note"] == "7"


@pytest.mark.parametrize(
    ("overrides", "key", "value", "origin"),
    [
        (["~learner.limit"], "learner.limit", None, "default of tp_task.schemas.Learner"),
        (["~learner.not_in_the_file"], "learner.not_in_the_file", 7, "default of tp_task.schemas.Learner"),
        (["learner.limit=9", "~learner.limit"], "learner.limit", None, "default of tp_task.schemas.Learner"),
        (["~learner.limit", "learner.limit=9"], "learner.limit", 9, "override 'learner.limit=9'"),
        (["~learner.inner"], "learner.inner.rate", 0.5, "default of tp_task.schemas.Inner"),
        (["~learner.inner", "learner.inner.rate=2"], "learner.inner.rate", 2.0, "override 'learner.inner.rate=2'"),
    ],
)
def test_removed_key_has_its_default(overrides: list[str], key: str, value: object, origin: str) -> None:
    composed = compose([*RECIPE, *overrides])
    assert OmegaConf.select(composed.config, key) == value
    assert composed.origins[key] == origin


def test_the_tree_is_read_only() -> None:
    composed = compose(RECIPE)
    with pytest.raises(ReadonlyConfigError):
        composed.config.trainer.seed = 1
    composed.plain()["trainer"]["seed"] = 1
    assert composed.config.trainer.seed == 11


# -- sections that host a group -----------------------------------------------------------------


def test_section_like_another_has_its_values() -> None:
    composed = compose([*RECIPE, "learner.unit.radius=3"])
    assert composed.config.critic.unit == {"name": "round", "size": 1, "radius": 3.0}
    assert composed.origins["critic.unit.radius"] == "as learner.unit.radius"
    assert composed.origins["critic.unit.size"] == "as learner.unit.size"


def test_section_like_another_keeps_its_own_values() -> None:
    composed = compose([*RECIPE, "learner.unit.radius=3", "learner.unit.size=4", "critic.unit.size=5"])
    assert composed.config.critic.unit == {"name": "round", "size": 5, "radius": 3.0}
    assert composed.origins["critic.unit.size"] == "override 'critic.unit.size=5'"


def test_name_decides_which_schema_a_section_follows() -> None:
    composed = compose([*RECIPE, "learner.unit.size=4", "critic.unit.name=square", "critic.unit.side=1"])
    assert composed.config.critic.unit == {"name": "square", "size": 2, "side": 1.0}
    assert composed.config.learner.unit == {"name": "round", "size": 4, "radius": 0.5}
    with pytest.raises(ConfigError, match=r"there is no key 'critic.unit.radius'.*Keys of critic.unit: name, side"):
        compose([*RECIPE, "critic.unit.name=square", "critic.unit.radius=1"])


def test_choice_of_the_group_decides_for_all_sections() -> None:
    composed = compose([*RECIPE, "tp_unit=square"])
    assert composed.config.learner.unit == composed.config.critic.unit == {"name": "square", "size": 2, "side": 0.25}


def test_name_without_a_schema_follows_the_choice() -> None:
    unit = compose([*RECIPE, "learner.unit.name=home_made", "learner.unit.radius=3"]).config.learner.unit
    assert unit == {"name": "home_made", "size": 1, "radius": 3.0}


def test_recipe_tunes_one_option_without_breaking_another(tmp_path: Path) -> None:
    recipe = (
        "# @package _global_\ndefaults:\n  - tp_recipe\n"
        "  - optional /tp_tune: ${choice:tp_unit}\n  - _self_\ntrainer:\n  seed: 99\n"
    )
    write(tmp_path / "my", "recipe/mine.yaml", recipe)
    write(tmp_path / "my", "tp_tune/round.yaml", "# @package learner.unit\nradius: 8\n")
    assert compose(["recipe=mine"], tmp_path / "my").config.learner.unit.radius == 8.0
    square = compose(["recipe=mine", "tp_unit=square"], tmp_path / "my").config.learner.unit
    assert square == {"name": "square", "size": 2, "side": 0.25}


def test_keys_of_a_replaced_option_are_left_out_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = "# @package _global_\ndefaults:\n  - tp_recipe\n  - _self_\nlearner:\n  unit: {size: 6, radius: 8}\n"
    write(tmp_path / "my", "recipe/mine.yaml", recipe)
    folder = tmp_path / "my"
    assert compose(["recipe=mine"], folder).config.learner.unit == {"name": "round", "size": 6, "radius": 8.0}
    assert caplog.text == ""
    with caplog.at_level(logging.INFO):
        square = compose(["recipe=mine", "tp_unit=square"], folder)
    assert square.config.learner.unit == {"name": "square", "size": 6, "side": 0.25}
    assert "learner.unit.radius" not in square.origins
    (note,) = [each.getMessage() for each in caplog.records]
    assert note == f"left out learner.unit.radius of {folder}/recipe/mine.yaml: tp_unit=square has no such key"
    named = compose(["recipe=mine", "learner.unit.name=square"], folder).config.learner.unit
    assert named == {"name": "square", "size": 6, "side": 0.25}
    # What the user typed has to fit.
    with pytest.raises(ConfigError, match=r"override 'learner.unit.radius=3': there is no key 'learner.unit.radius'"):
        compose(["recipe=mine", "tp_unit=square", "learner.unit.radius=3"], folder)
    with pytest.raises(ConfigError, match=r"there is no key 'learner.unit.radius'"):
        compose(["recipe=mine", "tp_unit=square", "learner.unit={radius: 3}"], folder)
    # A recipe whose own choice does not fit its keys has a mistake.
    write(folder, "recipe/wrong.yaml", recipe.replace("  - _self_", "  - override /tp_unit: square\n  - _self_"))
    with pytest.raises(ConfigError, match=r"wrong.yaml: there is no key 'learner.unit.radius'"):
        compose(["recipe=wrong"], folder)


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
@given(value=text.filter(lambda value: value != "???"))  # OmegaConf's word for a value that is still to be set
def test_formatted_text_arrives_unchanged(value: str) -> None:
    assert leaves([*RECIPE, format_override("trainer.note", value)])["trainer.note"] == value


def test_free_mapping_takes_any_key() -> None:
    overrides = ["reward.reward_kwargs.x=1", "reward.reward_kwargs.deep.er=[a,b]", "reward.reward_kwargs={y: 2}"]
    composed = compose([*RECIPE, *overrides])
    assert composed.config.reward.reward_kwargs == {"x": 1, "deep": {"er": ["a", "b"]}, "y": 2}
    assert composed.origins["reward.reward_kwargs.x"] == "override 'reward.reward_kwargs.x=1'"
    assert compose([*RECIPE, *overrides, "~reward.reward_kwargs.x"]).config.reward.reward_kwargs.keys() == {"deep", "y"}
    assert compose([*RECIPE, "trainer_kwargs.beta=0.1"]).config.trainer_kwargs == {"beta": 0.1}


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


def test_neither_import_nor_help_loads_pydantic() -> None:
    code = (
        "import sys, rollcast.contracts.engine, rollcast.contracts.sections, rollcast.cli.app\n"
        "assert 'pydantic' not in sys.modules; from rollcast import compose; compose(['run_dir=x']); "
        "assert 'pydantic' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_instances_are_frozen() -> None:
    section = build_section(LocalRuntimeConfig, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        section.name = "local"  # type: ignore[misc]


def test_closed_section_refuses_unknown_keys() -> None:
    with pytest.raises(ConfigError, match=r"no key 'runtime.num_cpu'; did you mean 'runtime.num_cpus'"):
        build_section(LocalRuntimeConfig, {"num_cpu": 1}, "runtime", closed=True)


def test_build_section() -> None:
    section = build_section(LocalRuntimeConfig, {"name": "local", "num_cpus": "3", "of_another_schema": 1})
    assert section == LocalRuntimeConfig(name="local", num_cpus=3)
    assert isinstance(section, LocalRuntimeConfig)


# -- defaults by device -------------------------------------------------------------------------


@config
class _Inner:
    """A section within a section."""

    wide: Annotated[bool, OnAccelerator(True, "lanes are free")] = False
    """Use all lanes."""


@config
class _Task:
    """A section with defaults by device."""

    dtype: Annotated[str | None, OnAccelerator("bf16", "speed")] = None
    """Dtype."""
    packs: Annotated[bool, OnAccelerator(True, "no padding", lambda given: not given.get("shares"))] = False
    """Pack rows."""
    shares: bool = False
    """Share prompts, which excludes packing."""
    inner: _Inner = field(default_factory=_Inner)
    """A section."""
    absent: _Inner | None = None
    """A section that is null by default."""


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cpu", {}, (None, False, False)),
        ("abacus", {}, ("bf16", True, True)),
        ("abacus", {"dtype": "fp32", "packs": False, "inner": {"wide": False}}, ("fp32", False, False)),
        ("abacus", {"dtype": None}, (None, True, True)),
        ("abacus", {"shares": True}, ("bf16", False, True)),
        ("abacus", {"shares": False}, ("bf16", True, True)),
    ],
)
def test_a_default_follows_the_device_unless_the_key_is_set(
    device: str, given: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    sections = place_schemas([ConfigSchema(path="task", schema=_Task)], {}, {})
    tree: dict[str, Any] = {"task": given}
    origins: dict[str, str] = {}
    sections.fill(tree, origins, lambda: device)
    task = tree["task"]
    assert (task["dtype"], task["packs"], task["inner"]["wide"]) == expected
    assert task["absent"] is None
    if device == "abacus" and "dtype" not in given:
        assert origins["task.dtype"] == "default on abacus: speed"


def test_no_device_is_looked_for_where_no_default_depends_on_it() -> None:
    def forbidden() -> str:
        raise AssertionError("the device was looked for")

    place_schemas([], {}, {}).fill({}, {}, forbidden)
    tree = {"task": {"dtype": "x", "packs": True, "inner": {"wide": True}}}
    place_schemas([ConfigSchema(path="task", schema=_Task)], {}, {}).fill(tree, {}, forbidden)
