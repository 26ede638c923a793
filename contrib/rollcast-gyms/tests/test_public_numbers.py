"""Numbers of public packages' environments reach the one check of rewards unchanged; the packages are stand-ins."""

from __future__ import annotations

import asyncio
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollcast_agents.contracts.renderer import Message
from rollcast_gyms.own_random import OwnRandom
from rollcast_gyms.reasoning_gym import ReasoningGym
from rollcast_gyms.textarena import TextArena
from rollcast_gyms.verifiers import Verifiers

ODD = [math.nan, "good", None, 1j, [1.0]]


def put_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("value", ODD, ids=str)
def test_an_odd_number_of_a_public_environment_is_unchanged(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    put_module(monkeypatch, "reasoning_gym")
    put_module(monkeypatch, "reasoning_gym.utils", extract_answer=lambda text: text)
    question = ReasoningGym()
    question._data = SimpleNamespace(score_answer=lambda answer, entry: value)

    game: Any = TextArena(game="x")
    game._env = SimpleNamespace(step=lambda action: (True, {}), close=lambda: ({game._player: value}, {}))
    game._random = OwnRandom(0)

    async def invoke(*arguments: Any) -> None: ...

    for name in ("verifiers", "verifiers.v1", "verifiers.v1.utils"):
        put_module(monkeypatch, name)
    put_module(monkeypatch, "verifiers.v1.utils.decorators", invoke=invoke)
    task: Any = Verifiers("x")
    task._task = SimpleNamespace(finalize=None, score=invoke)
    part = SimpleNamespace(value=value)
    task._trace = SimpleNamespace(stop=str, rewards={"part": part}, metrics={"seen": value}, reward=value)

    async def play() -> list[Any]:
        return [await question.step(Message("1")), await game.step(Message("1")), await task._end()]

    seen = asyncio.run(play())
    assert all(observation.reward is value for observation in seen)
    assert seen[2].components == {"part": value}
