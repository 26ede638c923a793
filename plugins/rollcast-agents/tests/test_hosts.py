"""Many rollouts in one process: bad ones among good ones, stragglers, turns that are generated together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_plugins import Look, World, block
from agent_tools import user, write_tokenizer

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, RolloutSequence, SamplingParams
from rollcast.errors import ConfigError, PluginNotFoundError
from rollcast_agents.contracts.agent_loop import agent_loops
from rollcast_agents.contracts.environment import environments
from rollcast_agents.contracts.tool import tools
from rollcast_agents.contracts.trajectory import Trajectory
from rollcast_agents.host import AgentHost, HostSetup, Rollout, check_names
from rollcast_agents.loops.turns import EnvironmentLoop
from rollcast_agents.schemas import AgentConfig, StragglersConfig
from rollcast_agents.threads import in_thread
from rollcast_agents.tools.box import build_tool
from rollcast_agents.training.collector import TurnCollector
from rollcast_agents.training.metrics import agent_metrics

BAD = {100: "hangs", 200: "raises", 300: "endless", 400: "dies", 500: "floods"}
CALL = '<tool_call>{"name": "look", "arguments": {"key": "k"}}</tool_call>'


class Loop(EnvironmentLoop):
    """The loop ``environment``, except where the task says otherwise."""

    async def run(self, task: Any, session: Any, environment: Any) -> Any:
        while task["kind"] == "endless":
            await asyncio.sleep(0.05)
        return await super().run(task, session, environment)


class Engine:
    """Answers each turn at once: one call, then a text."""

    def __init__(self, host: AgentHost) -> None:
        self.host = host
        self.sessions: dict[str, set[int]] = {}

    async def __call__(self, rollout: Rollout, request: RolloutRequest) -> RolloutOutput:
        turn = int(request.request_id.rpartition("/")[2])
        ids = np.append(self.host.renderer.encode(CALL if turn == 0 else "done"), self.host.renderer.stop_token_ids[0])
        random = np.random.default_rng(request.seed)
        log_probs = (-random.random(len(ids))).tolist()
        sequence = RolloutSequence(ids.tolist(), log_probs, "stop", [3] * len(ids))
        return RolloutOutput(request.request_id, [sequence], request.sampling)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with (
        tools.temporarily("look", Look),
        environments.temporarily("world", World),
        agent_loops.temporarily("mixed", Loop),
    ):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def roll(folder: str, kinds: list[str], engine: Any = Engine, **config: Any) -> list[list[Trajectory]]:
    settings = {"loop": "mixed", "environment": "world", "tools": {"look": {}}, **config}
    host = AgentHost(HostSetup(AgentConfig(**settings), folder, 4096))

    async def run() -> list[list[Trajectory]]:
        await host.start()
        rollouts = [
            Rollout(n, f"r{n}", f"g{n // 8}", {"prompt": [user(f"look {n}")], "kind": kind}, seed=n)
            for n, kind in enumerate(kinds)
        ]
        try:
            return await host.run(rollouts, engine(host), SamplingParams(max_tokens=200))
        finally:
            await host.close()

    return asyncio.run(run())


def what(trajectory: Trajectory) -> tuple[Any, ...]:
    probs = [segment.log_probs.tobytes() for segment in trajectory.segments if segment.log_probs is not None]
    return trajectory.token_ids.tobytes(), probs, trajectory.end, dict(trajectory.turn_rewards), trajectory.failure


def test_five_bad_ones_of_512_are_named_and_the_others_unaffected(folder: str) -> None:
    good = roll(folder, ["good"] * 512, max_concurrency=16)
    # Few at once, so that the clock of a good one runs for milliseconds.
    mixed = roll(
        folder,
        [BAD.get(number, "good") for number in range(512)],
        max_concurrency=16,
        tool_timeout_s=1.0,
        timeout_s=8.0,
        max_tool_response_length=200,
    )
    same = [number for number in range(512) if list(map(what, good[number])) == list(map(what, mixed[number]))]
    assert sorted(set(range(512)) - set(same)) == sorted(BAD)
    assert all(len(found) == 1 for found in mixed)
    bad = {kind: mixed[number][0] for number, kind in BAD.items()}
    assert bad["endless"].end == "timeout"
    assert bad["endless"].failure.boundary == "loop"
    assert (bad["dies"].end, bad["dies"].failure.boundary) == ("error", "environment")
    assert "the world ended" in bad["dies"].failure.message
    # A tool's failure is answered to the model, and the rollout goes on.
    for kind, said in (("hangs", "did not answer within 1 s"), ("raises", "KeyError"), ("floods", "100000 characters")):
        assert (bad[kind].end, bad[kind].failure) == ("done", None)
        (line,) = bad[kind].extra["tool_failures"]
        assert said in line
    metrics = agent_metrics([each for found in mixed for each in found])
    assert (metrics["agent/failures/loop"], metrics["agent/failures/environment"]) == (1, 1)
    # The endless one never came to a call.
    assert (metrics["agent/tool_failures"], metrics["agent/tool/look/calls"]) == (3, 511 / 512)


def test_a_tool_that_blocks_its_thread_keeps_nobody(folder: str) -> None:
    with tools.temporarily("look", block):
        (found,) = roll(folder, ["good"], tool_timeout_s=0.2)
    assert found[0].end == "done"
    assert "did not answer within 0.2 s" in found[0].extra["tool_failures"][0]


def test_stragglers_are_cancelled_with_what_they_sampled(folder: str) -> None:
    stragglers = StragglersConfig(share=0.125, grace_s=0.2)
    kinds = ["good", "good", "hangs", "good", "good", "good", "good", "good"]
    found = roll(folder, kinds, tool_timeout_s=3600.0, stragglers=stragglers)
    assert [each[0].end for each in found] == ["done"] * 2 + ["aborted"] + ["done"] * 5
    assert found[2][0].sampled_tokens > 0


def test_an_engine_that_fails_ends_one_rollout(folder: str) -> None:
    class Failing(Engine):
        async def __call__(self, rollout: Rollout, request: RolloutRequest) -> RolloutOutput:
            if rollout.number == 1:
                raise RuntimeError("out of memory")
            return await super().__call__(rollout, request)

    found = roll(folder, ["good"] * 3, Failing)
    assert [each[0].end for each in found] == ["done", "error", "done"]


def test_turns_of_all_rollouts_are_generated_together() -> None:
    batches: list[list[str]] = []
    waiting: list[str] = []

    async def generate(request: Any) -> Any:
        waiting.append(request)
        await asyncio.sleep(0)
        if waiting:
            batches.append(list(waiting))
            waiting.clear()
        return request

    async def rollout(collector: TurnCollector, number: int, turns: int) -> None:
        for turn in range(turns):
            # Rollouts come back in another order than they went.
            for _ in range(10 - number):
                await asyncio.sleep(0)
            await collector.generate(number, f"{number}.{turn}")  # type: ignore[arg-type]
        collector.leave()

    async def run() -> None:
        collector = TurnCollector(generate, wait_s=3600.0)
        for _ in range(3):
            collector.enter()
        await asyncio.gather(*(rollout(collector, number, turns) for number, turns in enumerate((1, 3, 2))))

    asyncio.run(run())
    assert batches == [["0.0", "1.0", "2.0"], ["1.1", "2.1"], ["1.2"]]


def test_a_slow_rollout_is_not_waited_for_longer_than_said() -> None:
    async def run() -> str:
        async def generate(request: Any) -> Any:
            return request

        collector = TurnCollector(generate, wait_s=0.01)
        collector.enter()
        collector.enter()  # never comes
        return await collector.generate(0, "first")  # type: ignore[arg-type, return-value]

    assert asyncio.run(run()) == "first"


def test_a_call_in_a_thread_has_its_context_and_its_error() -> None:
    async def run() -> None:
        assert await asyncio.gather(*(in_thread(pow, 2, n) for n in range(100))) == [2**n for n in range(100)]
        with pytest.raises(ZeroDivisionError):
            await in_thread(divmod, 1, 0)

    asyncio.run(run())


def test_a_tool_is_found_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def double(n: int) -> int:\n    '''Double.'''\n    return 2 * n\n")
    tool = build_tool("twice", {"path": f"{tmp_path / 'mine.py'}:double"})
    assert tool.schema["function"]["name"] == "twice"
    assert asyncio.run(tool.call(None, {"n": 4})).text == "8"  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"agent\.tools\.twice\.path=.*mine\.py:absent cannot be imported"):
        build_tool("twice", {"path": f"{tmp_path / 'mine.py'}:absent"})
    with pytest.raises(ConfigError, match=r"write file\.py:function or module:function"):
        build_tool("twice", {"path": "double"})


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("agent.loop", {"loop": "absent"}),
        ("agent.renderer", {"loop": "tool", "renderer": "absent"}),
        ("agent.environment", {"loop": "tool", "environment": "absent"}),
        ("agent.tools", {"loop": "tool", "tools": {"absent": {}}}),
    ],
)
def test_a_name_that_does_not_exist_is_refused_before_the_start(key: str, config: dict[str, Any]) -> None:
    with pytest.raises(PluginNotFoundError, match=key):
        check_names(AgentConfig(**config))
