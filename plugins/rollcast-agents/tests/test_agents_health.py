"""The health check of chat templates."""

from __future__ import annotations

import numpy as np
from agent_tools import CHATML, FORGETFUL, make_renderer, write_tokenizer

from rollcast.contracts.health import HealthSetup
from rollcast_agents.health import RendererCheck, judge_prefix
from rollcast_testing import HealthCheckSuite


class TestRenderer(HealthCheckSuite):
    name = "renderer"
    configs = ({"model": {"path": "/nowhere"}},)


def setup(path, **agent):
    return HealthSetup({"model": {"path": path}, "agent": agent})


def test_a_template_that_keeps_prefixes(tmp_path):
    (found,) = RendererCheck().run(setup(write_tokenizer(tmp_path, CHATML)))
    assert found.state == "ok"
    assert "kept every token" in found.message


def test_a_template_that_drops_earlier_thinking(tmp_path):
    (found,) = RendererCheck().run(setup(write_tokenizer(tmp_path, FORGETFUL)))
    assert (found.name, found.state) == ("prefix", "warning")
    assert "in 2 of 18 conversations" in found.message
    assert "<think>" in found.message
    assert "agent.renderer=library" in found.fix


def test_a_renderer_that_changes_tokens_is_a_problem(tmp_path):
    renderer = make_renderer(tmp_path)
    keep = renderer.extend
    renderer.extend = lambda ids, *more: None if (found := keep(ids, *more)) is None else np.roll(found, 1)
    found = judge_prefix("mine", renderer)
    assert found.state == "problem"
    assert "mine changes tokens" in found.message


def test_a_template_that_refuses_a_conversation(tmp_path):
    renderer = make_renderer(tmp_path, "{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in judge_prefix("mine", renderer).message


def test_a_model_without_a_template_matters_to_agents_only(tmp_path):
    path = write_tokenizer(tmp_path, None)
    assert [each.state for each in RendererCheck().run(setup(path))] == ["warning"]
    assert [each.state for each in RendererCheck().run(setup(path, loop="tool"))] == ["problem"]
