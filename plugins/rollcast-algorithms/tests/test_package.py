"""What the distribution announces: entry points, configs, schemas; and what importing it costs."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import rollcast_algorithms
from rollcast.contracts.algorithm import AdvantageEstimator
from rollcast.plugins import find_registry
from rollcast_algorithms.schemas import AlgorithmConfig
from rollcast_testing import AdvantageSuite

ROOT = Path(__file__).parents[1]
CONF = Path(rollcast_algorithms.__file__).parent / "conf"
ENTRY_POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
PARTS = [(group, name) for group, names in ENTRY_POINTS.items() if group != "rollcast.configs" for name in names]


@pytest.mark.parametrize(("group", "name"), PARTS)
def test_every_announced_part_is_what_its_group_holds(group: str, name: str) -> None:
    importlib.import_module("rollcast.contracts.algorithm")
    module, _, attribute = ENTRY_POINTS[group][name].partition(":")
    part = getattr(importlib.import_module(module), attribute)
    assert find_registry(group).expect(part) is None


ESTIMATORS = sorted(ENTRY_POINTS["rollcast.advantages"])


def test_there_is_an_option_for_every_estimator() -> None:
    assert sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml")) == ESTIMATORS


@pytest.mark.parametrize("option", ESTIMATORS)
def test_every_option_names_its_estimator_and_nothing_else(option: str) -> None:
    path = CONF / "algorithm" / f"{option}.yaml"
    assert path.read_text().startswith("# @package algorithm\n")
    assert OmegaConf.to_container(OmegaConf.load(path)) == {"adv_estimator": option}


def test_the_config_package_announces_its_schema() -> None:
    from rollcast_algorithms import conf

    (schema,) = conf.SCHEMAS
    assert (schema.path, schema.group, schema.schema) == ("algorithm", "algorithm", AlgorithmConfig)


def test_the_package_schemas_and_configs_import_without_torch_or_ray() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['ray'] = sys.modules['tensordict'] = None\n"
        "import rollcast_algorithms, rollcast_algorithms.schemas, rollcast_algorithms.conf\n"
        "rollcast_algorithms.AlgorithmConfig\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_resolve() -> None:
    for name in rollcast_algorithms.__all__:
        assert getattr(rollcast_algorithms, name).__name__ == name
    assert set(rollcast_algorithms.__all__) <= set(dir(rollcast_algorithms))
    with pytest.raises(AttributeError, match="no attribute 'ppo'"):
        rollcast_algorithms.ppo  # noqa: B018


def test_the_readme_names_every_part() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [name for _, name in PARTS if f"`{name}`" not in readme] == []


def test_the_readmes_usage_runs(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    exec(readme_blocks()[0], namespace)
    assert "0.7071" in capsys.readouterr().out
    assert callable(namespace["loss_function"])


class TestTheReadmesEstimator(AdvantageSuite):
    @pytest.fixture
    def estimator(self) -> AdvantageEstimator:
        namespace: dict[str, Any] = {}
        exec(readme_blocks()[1], namespace)
        part: AdvantageEstimator = namespace["centred"]
        return part


def readme_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
