import asyncio

from rollcast_agents.contracts.agent_loop import AgentLoopSetup
from rollcast_agents.testing import AgentLoopSuite, ScriptedSession
from rollcast_my_plugin import MyPlugin


class TestMyPlugin(AgentLoopSuite):
    name = "my_plugin"


def test_the_model_reads_its_first_answer():
    session = ScriptedSession(["five", "four"])
    task = {"prompt": [{"role": "user", "content": "2+2?"}]}
    outcome = asyncio.run(MyPlugin(AgentLoopSetup(config=None)).run(task, session, None))
    assert [message["content"] for message in session.prompts[1]][:2] == ["2+2?", "five"]
    assert outcome.messages[-1]["content"] == "four"
    assert outcome.metrics == {"changed": True}
