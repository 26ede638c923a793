"""Conformance suites of renderers, tools, environments and agent loops; they need ``rollcast-agents[testing]``.

Derive from a suite in a test module, name the plugin, and pytest finds the tests it inherits::

    from rollcast_agents.testing import EnvironmentSuite

    class TestCounter(EnvironmentSuite):
        name = "counter"
        tasks = [{"prompt": [], "start": 3}]
"""

from __future__ import annotations

from rollcast_agents.testing.environments import EnvironmentSuite
from rollcast_agents.testing.loops import AgentLoopSuite
from rollcast_agents.testing.renderers import RendererSuite
from rollcast_agents.testing.scripted import ScriptedSession
from rollcast_agents.testing.tools import ToolSuite

__all__ = ["AgentLoopSuite", "EnvironmentSuite", "RendererSuite", "ScriptedSession", "ToolSuite"]
