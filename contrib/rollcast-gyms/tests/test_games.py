"""Games of other packages: textarena and gem-llm. Run whole by the session ``tests_environments``."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

from rollcast.errors import ConfigError
from rollcast_agents.commands import validate_app
from rollcast_agents.contracts.renderer import Message
from rollcast_agents.testing import EnvironmentSuite
from rollcast_gyms.gem import Gem
from rollcast_gyms.own_random import OwnRandom
from rollcast_gyms.textarena import TextArena


def has(package: str) -> bool:
    """True if the package can be imported; it is asked elsewhere, for these packages are slow to import."""
    return subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, check=False).returncode == 0


needs_textarena = pytest.mark.skipif(not has("textarena"), reason="textarena is not installed")
needs_gem = pytest.mark.skipif(not has("gem"), reason="gem-llm is not installed")


@needs_textarena
class TestTextArena(EnvironmentSuite):
    name = "textarena"
    tasks: ClassVar = [{"game": "GuessTheNumber-v0", "seed": 3}, {"game": "TowerOfHanoi-v0", "seed": 1}]
    replies: ClassVar = ("", "[7]", "[A C]", "\ufffd", "#" * 10_000)


@needs_gem
class TestGem(EnvironmentSuite):
    name = "gem"
    tasks: ClassVar = [{"env": "game:GuessTheNumber-v0-easy", "seed": 3}, {"env": "game:Sokoban-v0-easy", "seed": 1}]
    replies: ClassVar = ("", "\\boxed{7}", "\\boxed{up}", "\ufffd", "#" * 10_000)


async def search(environment: Any, task: dict[str, Any], move: str, other: Any = None) -> list[float | None]:
    """Play a game of numbers by halving; return the rewards."""
    seen, low, high, rewards = await environment.reset(task), 1, 20, []
    while not seen.done:
        guess = (low + high) // 2
        if other is not None:
            await other()
        seen = await environment.step(Message(move.format(guess)))
        rewards.append(seen.reward)
        said = " ".join(message["content"] for message in seen.messages)
        low, high = (low, guess - 1) if re.search("is '?lower", said) else (guess + 1, high)
    return rewards


def numbers_of_gem() -> Gem:
    return Gem(options={"min_number": 1, "max_number": 20, "max_turns": 20})


GAMES = [
    pytest.param(TextArena, {"game": "GuessTheNumber-v0"}, "I say [{}].", marks=needs_textarena),
    pytest.param(numbers_of_gem, {"env": "game:GuessTheNumber-v0-easy"}, "I say \\boxed{{{}}}.", marks=needs_gem),
]


@pytest.mark.parametrize(("kind", "task", "move"), GAMES)
def test_a_game_is_won_and_depends_on_its_seed_alone(kind: Any, task: dict[str, Any], move: str) -> None:
    alone = [asyncio.run(search(kind(), {**task, "seed": seed}, move)) for seed in range(6)]
    assert all(rewards[-1] == 1 for rewards in alone)
    assert not any(reward for rewards in alone for reward in rewards[:-1])
    assert None not in [reward for rewards in alone for reward in rewards]  # a game that is cut off is lost
    assert len({len(rewards) for rewards in alone}) > 1

    async def together() -> list[list[float | None]]:
        async def disturb() -> None:
            random.random()
            np.random.rand()
            await asyncio.sleep(0.001 * random.random())

        plays = (search(kind(), {**task, "seed": seed}, move, disturb) for seed in range(6))
        return list(await asyncio.gather(*plays))

    random.seed(5)
    assert asyncio.run(together()) == alone


def prompts(tmp_path: Path, *rows: dict[str, Any]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "Play.", **row}) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("environment", "row", "unknown"),
    [
        pytest.param("textarena", {"game": "GuessTheNumber-v0"}, True, marks=needs_textarena),
        pytest.param("gem", {"env": "game:GuessTheNumber-v0-easy"}, True, marks=needs_gem),
        pytest.param("gem", {"env": "rg:leg_counting"}, False, marks=needs_gem),
    ],
)
def test_a_task_is_validated(environment: str, row: dict[str, Any], unknown: bool, tmp_path: Path) -> None:
    rows = [{**row, "seed": seed} for seed in range(3)]
    arguments = [prompts(tmp_path, *rows), f"agent.environment={environment}"]
    result = CliRunner().invoke(validate_app, arguments, catch_exceptions=False)
    assert f"3 rows checked with environment {environment}, 0 faults" in result.stdout
    assert ("no correct reply is known for 3 of them" in result.stdout) == unknown
    assert result.exit_code == 0


def test_calls_leave_the_global_generators_alone() -> None:
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), float(np.random.rand())
    random.seed(1)
    np.random.seed(1)

    async def draw() -> list[float]:
        own = OwnRandom(7)
        first = [await own.run(random.random), await own.run(np.random.rand)]
        with pytest.raises(ZeroDivisionError):
            await own.run(lambda: 1 / 0)
        return [*first, await own.run(random.random)]

    drawn = asyncio.run(draw())
    assert (random.random(), float(np.random.rand())) == expected
    state = random.Random(7)
    assert drawn == [state.random(), float(np.random.RandomState(7).rand()), state.random()]


@needs_textarena
def test_another_player_moves_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    def opponent(text: str) -> str:
        texts.append(text)
        return f"[{len(texts) + 2}]"

    monkeypatch.setattr("rollcast_gyms.textarena.load_named", lambda path, key: opponent)
    environment = TextArena("TicTacToe-v0", players=2, player=0, opponent="x:y")

    async def play() -> list[Any]:
        seen = [await environment.reset({"seed": 0})]
        for move in ("[0]", "[1]", "[2]"):
            seen.append(await environment.step(Message(move)))
        return seen

    start, one, two, end = asyncio.run(play())
    assert "Tic Tac Toe" in start.messages[0]["content"]
    assert not (one.done or two.done)
    assert "[3]" in one.messages[0]["content"]
    assert "[0]" not in one.messages[0]["content"]  # its own move is in its conversation already
    assert (end.done, end.reward, end.metrics) == (True, 1.0, {"invalid_move": 0.0})
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"players": 2}, r"agent\.environment_kwargs\.opponent is missing"),
        ({"player": 1}, r"agent\.environment_kwargs\.player is 1"),
        ({"players": 2, "opponent": "no_such_module:play"}, "no_such_module"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TextArena("TicTacToe-v0", **options)


@needs_textarena
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, r"agent\.environment_kwargs\.game"),
        ({"game": "Chess-v99"}, "has no game 'Chess-v99'"),
        ({"game": "GuessTheNumber-v0", "options": {"max_numbr": 3}}, "max_numbr"),
        ({"game": "TicTacToe-v0"}, "cannot have players=1"),
    ],
)
def test_a_game_that_cannot_begin_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asyncio.run(TextArena(**options).reset({"seed": 0}))


@needs_gem
@pytest.mark.parametrize(("env", "words"), [("", r"agent\.environment_kwargs\.env"), ("game:Nothing", "game:Nothing")])
def test_a_gem_that_cannot_begin_is_named(env: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asyncio.run(Gem(env).reset({"seed": 0}))
