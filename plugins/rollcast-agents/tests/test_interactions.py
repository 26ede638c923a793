"""verl's interactions: their classes as environments, and the YAML files that name them."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest
from agent_tools import ScriptedEngine, make_renderer, make_session, user

from rollcast.errors import ConfigError
from rollcast_agents.contracts.agent_loop import AgentLoopSetup
from rollcast_agents.contracts.environment import environments
from rollcast_agents.environments.verl import VerlInteraction, load_interaction_config
from rollcast_agents.host import check_names
from rollcast_agents.loops.turns import EnvironmentLoop
from rollcast_agents.runner import Limits, RolloutRunner
from rollcast_agents.schemas import AgentConfig
from rollcast_agents.tools.box import ToolBox, ToolLimits

CONFIG = """
interaction:
  - name: guess
    class_name: old_interactions.GuessInteraction
    config: {hint: higher}
"""


class GuessInteraction:
    """As verl's users write them."""

    finished: ClassVar = []

    def __init__(self, config):
        self.name, self.hint, self.truths = config["name"], config["hint"], {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.truths[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        said = messages[-1]["content"]
        assert messages[-1]["role"] == "assistant"
        if said == self.truths[instance_id]:
            return True, "Right.", 1.0, {}
        return False, f"{self.hint} than {said}", 0.0, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        self.finished.append(instance_id)
        del self.truths[instance_id]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return make_renderer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def config(tmp_path, monkeypatch):
    GuessInteraction.finished.clear()
    monkeypatch.setitem(sys.modules, "old_interactions", SimpleNamespace(GuessInteraction=GuessInteraction))
    path = tmp_path / "interactions.yaml"
    path.write_text(CONFIG)
    return path


def roll(renderer, path, script, **kwargs):
    interactions = load_interaction_config(path)
    setup = AgentLoopSetup(AgentConfig(loop="environment"), ToolBox([], ToolLimits()), None)
    runner = RolloutRunner(EnvironmentLoop(setup), lambda: VerlInteraction(interactions), Limits())
    session = make_session(ScriptedEngine(renderer, script))
    task = {"prompt": [user("Guess.")], "extra_info": {"interaction_kwargs": kwargs}}
    (trajectory,) = asyncio.run(runner.run(task, session))
    return trajectory, interactions


def test_an_interaction_answers_scores_and_ends_the_rollout(renderer, config):
    trajectory, interactions = roll(renderer, config, ["3", "7"], name="guess", ground_truth="7")
    assert [message["content"] for message in trajectory.messages] == ["Guess.", "3", "higher than 3", "7"]
    assert trajectory.turn_rewards == {0: 0.0, 1: 1.0}
    assert trajectory.end == "done"
    assert len(GuessInteraction.finished) == 1
    assert interactions["guess"].truths == {}


def test_a_row_without_a_name_has_the_only_interaction(renderer, config):
    assert roll(renderer, config, ["7"], ground_truth="7")[0].turn_rewards == {0: 1.0}


def test_an_unknown_name_fails_its_rollout(renderer, config):
    trajectory, _ = roll(renderer, config, ["7"], name="other", ground_truth="7")
    assert trajectory.failure.boundary == "environment"
    assert "'other'" in trajectory.failure.message
    assert "guess" in trajectory.failure.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("interaction: 3", "no list"),
        ("interaction: [{}]", r"interaction\[0\]"),
        ("interaction: [{class_name: no_such_module.Interaction}]", "no_such_module"),
        (": [", "cannot be read"),
        (CONFIG + CONFIG.partition("interaction:")[2], "which another entry already uses"),
    ],
)
@pytest.mark.usefixtures("config")
def test_a_bad_file_is_named(tmp_path, text, words):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_interaction_config(path)


def test_a_run_has_one_world(config):
    both = AgentConfig(loop="environment", environment="mine", interaction_config_path=str(config))
    with environments.temporarily("mine", VerlInteraction), pytest.raises(ConfigError, match="both set"):
        check_names(both)
