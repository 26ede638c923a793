"""Users' code that exits, hangs, floods or forks costs its own rollout, and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from agent_tools import user, write_tokenizer
from misbehaving import World, look, look_async

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, RolloutSequence, SamplingParams
from rollcast_agents.contracts.environment import environments
from rollcast_agents.contracts.tool import tools
from rollcast_agents.contracts.trajectory import Trajectory
from rollcast_agents.host import AgentHost, HostSetup, Rollout
from rollcast_agents.schemas import AgentConfig
from rollcast_testing.misbehaviour import CASES, RAISES


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with (
        tools.temporarily("look", look),
        tools.temporarily("look_async", look_async),
        environments.temporarily("misbehaving", World),
    ):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def roll(folder: str, cases: list[str], tool: str = "", **config: Any) -> list[Trajectory]:
    host = AgentHost(HostSetup(AgentConfig(**config), folder, 4096))

    async def generate(rollout: Rollout, request: RolloutRequest) -> RolloutOutput:
        turn = int(request.request_id.rpartition("/")[2])
        call = json.dumps({"name": tool, "arguments": {"key": cases[rollout.number]}})
        text = f"<tool_call>{call}</tool_call>" if tool and turn == 0 else "done"
        ids = np.append(host.renderer.encode(text), host.renderer.stop_token_ids[0])
        sequence = RolloutSequence(ids.tolist(), [-0.5] * len(ids), "stop", [3] * len(ids))
        return RolloutOutput(request.request_id, [sequence], request.sampling)

    async def run() -> list[list[Trajectory]]:
        await host.start()
        rollouts = [
            Rollout(n, f"r{n}", f"g{n}", {"prompt": [user(f"look {n}")], "case": case}, n)
            for n, case in enumerate(cases)
        ]
        try:
            return await host.run(rollouts, generate, SamplingParams(max_tokens=200))
        finally:
            await host.close()

    return [found[0] for found in asyncio.run(run())]


GOOD = ["good"] * 4


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["environment", "tool", "program"])
def test_each_case_costs_its_own_rollout(folder: str, kind: str) -> None:
    config: dict[str, Any] = {
        "environment": {"loop": "environment", "environment": "misbehaving"},
        "tool": {"loop": "tool", "tools": {"look_async": {}}},
        "program": {"loop": "program", "program": "misbehaving:program", "timeout_s": 10.0},
    }[kind]
    cases = [*GOOD, *CASES, *GOOD]
    found = roll(
        folder,
        cases,
        "look_async" if kind == "tool" else "",
        environment_timeout_s=10.0,
        tool_timeout_s=10.0,
        memory_limit_mb=512,
        **config,
    )
    by_case = dict(zip(cases, found, strict=True))
    assert [each.failure for case, each in zip(cases, found, strict=True) if case == "good"] == [None] * 8
    for case in CASES:
        if kind == "tool" and case in RAISES:
            assert by_case[case].failure is None
            assert "look_async failed: " in by_case[case].extra["tool_failures"][0]
        else:
            assert (by_case[case].end, getattr(by_case[case].failure, "boundary", None)) == ("error", kind), case
