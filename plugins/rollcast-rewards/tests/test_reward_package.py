from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import rollcast_rewards
from rollcast.contracts.reward import build_reward, reward_managers
from rollcast_rewards.schemas import RewardConfig

CONF = Path(rollcast_rewards.__file__).parent / "conf" / "reward"


@pytest.mark.parametrize(
    ("name", "manager", "options"),
    [
        ("code", "prime", {}),
        ("exact_match", "naive", {}),
        ("format", "naive", {}),
        ("function", "prime", {"path": "???"}),
        ("gsm8k", "naive", {}),
        ("http", "remote", {"url": "???"}),
        ("math", "prime", {}),
        ("multiple_choice", "naive", {}),
        ("trl", "prime", {"reward_funcs": "???"}),
        ("weighted_sum", "prime", {"rewards": "???"}),
    ],
)
def test_each_option_gives_the_keys_that_differ(name: str, manager: str, options: dict[str, str]) -> None:
    text = (CONF / f"{name}.yaml").read_text()
    assert text.startswith("# @package reward\n")
    given = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(given, dict)
    defaults = {"reward_manager": RewardConfig().reward_manager, "reward_kwargs": {}}
    assert {**defaults, **given} == {"name": name, "reward_manager": manager, "reward_kwargs": options}
    assert not [key for key, default in defaults.items() if given.get(key) == default]


def test_the_light_modules_import_nothing_heavy() -> None:
    code = (
        "import sys, rollcast_rewards, rollcast_rewards.schemas, rollcast_rewards.rules, rollcast_rewards.managers;"
        "sys.exit(', '.join({'torch', 'transformers', 'ray'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_parts_are_announced() -> None:
    from rollcast_rewards.conf import SCHEMAS

    assert [(each.path, each.group, each.schema) for each in SCHEMAS] == [("reward", "reward", RewardConfig)]
    assert reward_managers.get("naive").__name__ == "NaiveRewardManager"
    with pytest.raises(TypeError, match="takes no options"):
        build_reward("exact_match", {"strict": True})
