"""The environment ``textarena``: games of the public package of the same name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rollcast.errors import ConfigError
from rollcast_agents.contracts.environment import BaseEnvironment, Observation
from rollcast_agents.contracts.renderer import Message
from rollcast_agents.named import load_named
from rollcast_gyms.own_random import OwnRandom

__all__ = ["TextArena"]

#: Function from the game's text to an opponent's move.
Opponent = Callable[[str], str]
_WITHOUT_WRAPPERS = "-raw"


class TextArena(BaseEnvironment):
    """An environment of one game. Each reply is a move; the game's reward for the model's player comes at the end.

    A dataset row may have ``game``; otherwise the options provide it. ``seed`` determines what the game draws.

    Args:
        game: id of the game, such as ``GuessTheNumber-v0``.
        options: arguments of the game.
        players: number of players.
        player: index of the model's player, from 0.
        opponent: ``module:function`` that returns the move of any other player from the text that this player sees.
    """

    def __init__(
        self,
        game: str = "",
        options: Mapping[str, Any] | None = None,
        players: int = 1,
        player: int = 0,
        opponent: str | None = None,
    ) -> None:
        if not 0 <= player < players:
            raise ConfigError(
                f"agent.environment_kwargs.player is {player}; with {players} players it must be below that"
            )
        if players > 1 and opponent is None:
            raise ConfigError(
                "agent.environment_kwargs.opponent is missing: the module:function that plays the other players"
            )
        self._game, self._options, self._players, self._player = game, dict(options or {}), players, player
        self._opponent: Opponent | None = None
        if opponent is not None:
            self._opponent = load_named(opponent, "agent.environment_kwargs.opponent")
            if inspect.iscoroutinefunction(self._opponent):
                raise ConfigError(f"agent.environment_kwargs.opponent: {opponent} must not be an async function")
        self._env: Any = None
        self._random = OwnRandom(0)

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        name, seed = str(task.get("game") or self._game), int(task.get("seed", 0)) % 2**32
        self._random = OwnRandom(seed)
        return await self._random.run(lambda: self._begin(name, seed))

    async def step(self, message: Message) -> Observation:
        return await self._random.run(lambda: self._move(message.text))

    def _begin(self, name: str, seed: int) -> Observation:
        self._env = _make(name, self._options)
        try:
            self._env.reset(num_players=self._players, seed=seed)
        except AssertionError as error:
            raise ConfigError(
                f"agent.environment_kwargs: {name} cannot have players={self._players}: {error}"
            ) from error
        return self._seen(False, None)

    def _move(self, text: str) -> Observation:
        done, _ = self._env.step(action=text)
        # A game that ends at a limit of the run is not won, and does not need a reward function to score it.
        return self._seen(done, 0.0)

    def _seen(self, done: bool, reward: float | None) -> Observation:
        """Let the other players move until it is the model's turn or the game is over."""
        while not done:
            player, said = self._env.get_observation()
            if player == self._player or self._opponent is None:
                return Observation([{"role": "user", "content": self._text(said, player)}], reward=reward)
            done, _ = self._env.step(action=str(self._opponent(self._text(said, player))))
        rewards, info = self._env.close()
        own = info.get(self._player, {})
        metrics = {"invalid_move": float(bool(own.get("invalid_move")))}
        return Observation(reward=(rewards or {}).get(self._player, 0.0), done=True, metrics=metrics)

    def _text(self, said: Any, player: int) -> str:
        """Return the text that a player has not seen yet; its own moves are already in its conversation."""
        names = self._env.state.role_mapping
        lines = []
        for speaker, text, _ in said:
            if speaker == player:
                continue
            lines.append(text if speaker < 0 else f"[{names.get(speaker, f'Player {speaker}')}] {text}")
        return "\n".join(lines) or "It is your turn."


def _make(name: str, options: Mapping[str, Any]) -> Any:
    try:
        import textarena
    except ImportError as error:
        raise ConfigError(
            f'agent.environment=textarena needs the package textarena: pip install "rollcast-gyms[textarena]" ({error})'
        ) from error
    if not name:
        raise ConfigError("agent.environment=textarena needs agent.environment_kwargs.game, such as GuessTheNumber-v0")
    try:
        return textarena.make(name + _WITHOUT_WRAPPERS, **options)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"agent.environment_kwargs: textarena has no game {name!r} with {dict(options)}: {error}"
        ) from error
