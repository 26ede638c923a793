"""Checks of a task without a model: its environment, or its reward."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast import build_section
from rollcast.contracts.renderer import Message
from rollcast.contracts.reward import BaseReward, RewardResult, RewardSample, build_reward
from rollcast.errors import ConfigError
from rollcast_agents.environments.plain import build_environment
from rollcast_agents.schemas import AgentConfig
from rollcast_data.files import Row, read_files
from rollcast_data.schemas import DataConfig
from rollcast_rewards.schemas import RewardConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["TaskReport", "validate_rows"]


@dataclass(frozen=True)
class TaskReport:
    """Result of a validation.

    Attributes:
        judge: the environment or reward that was asked.
        rows: number of rows checked.
        faults: row of the file, from 1, and what is wrong with it.
    """

    judge: str
    rows: int
    faults: tuple[tuple[int, str], ...]


def validate_rows(prompts: Path, config: DictConfig, answer: str, limit: int) -> TaskReport:
    """Check the first rows of a file.

    Args:
        prompts: JSONL or Parquet file.
        config: sections ``agent``, ``data`` and ``reward``.
        answer: right reply to a row, with ``{ground_truth}`` in place of its reference answer.
        limit: number of rows to check.

    Raises:
        DataError: a row has no prompt or no reference answer.
        ConfigError: the environment or the reward does not take its options.
    """
    agent: AgentConfig = build_section(AgentConfig, config.agent, "agent")
    data: DataConfig = build_section(DataConfig, config.data, "data")
    check, judge = _environment_check(agent) if agent.environment is not None else _reward_check(config)
    rows = read_files([prompts])[:limit]
    faults = [
        (row.number, fault)
        for row in rows
        for fault in check(_task(row, data), answer.replace("{ground_truth}", str(_ground_truth(row, data))))
    ]
    return TaskReport(judge, len(rows), tuple(faults))


Check = Callable[[Mapping[str, Any], str], Iterator[str]]


def _ground_truth(row: Row, data: DataConfig) -> Any:
    if data.ground_truth_key is None:
        raise ConfigError("data.ground_truth_key is null; a task without reference answers cannot be checked")
    return row.get(data.ground_truth_key, "data.ground_truth_key")


def _task(row: Row, data: DataConfig) -> dict[str, Any]:
    """Return a row as loops and environments see it."""
    prompt = row.get(data.prompt_key, "data.prompt_key")
    nested = row.values.get("extra_info")
    return {
        "seed": row.number,
        "index": row.number - 1,
        **(nested if isinstance(nested, Mapping) else {}),
        "ground_truth": _ground_truth(row, data),
        "data_source": str(row.find(data.data_source_key) or ""),
        "extra_info": nested,
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt),
    }


# ---- rewards ----


def _reward_check(config: DictConfig) -> tuple[Check, str]:
    section: RewardConfig = build_section(RewardConfig, config.reward, "reward")
    try:
        reward = build_reward(section.name, section.reward_kwargs)
    except TypeError as error:
        raise ConfigError(f"reward.reward_kwargs do not fit reward {section.name!r}: {error}") from error
    return functools.partial(_check_reward, reward), f"reward {section.name}"


def _check_reward(reward: BaseReward, task: Mapping[str, Any], answer: str) -> Iterator[str]:
    for reply, expected in ((answer, True), ("", False)):
        try:
            result = _scored(reward, task, reply)
        except Exception as error:  # noqa: BLE001  # a stranger's code; its fault is the row's
            yield f"the reward raised {type(error).__name__} at {reply!r}: {error}"
            continue
        correct = result.score >= reward.max_score if result.correct is None else result.correct
        if correct != expected:
            said = "correct" if correct else "wrong"
            yield f"the reply {reply!r} is {said}, with score {result.score:g}; the answer is {task['ground_truth']!r}"


def _scored(reward: BaseReward, task: Mapping[str, Any], reply: str) -> RewardResult:
    messages = [*task["prompt"], {"role": "assistant", "content": reply}]
    sample = RewardSample(
        prompt=str(task["prompt"][-1].get("content", "")),
        response=reply,
        ground_truth=task["ground_truth"],
        data_source=task["data_source"],
        extra_info={**(task["extra_info"] or {}), "messages": messages},
    )
    (value,) = reward.score_batch([sample])
    if not isinstance(value, float | int | RewardResult):
        value = asyncio.run(_awaited(value))
    return value if isinstance(value, RewardResult) else RewardResult(float(value))


async def _awaited(value: Any) -> Any:
    return await value


# ---- environments ----


def _environment_check(agent: AgentConfig) -> tuple[Check, str]:
    build = functools.partial(build_environment, str(agent.environment), agent.environment_kwargs)
    build()  # a wrong option is the config's fault, not a row's
    return functools.partial(_check_environment, build), f"environment {agent.environment}"


def _check_environment(build: Callable[[], Any], task: Mapping[str, Any], answer: str) -> Iterator[str]:
    try:
        first, right = asyncio.run(_play(build, task, answer))
        second, empty = asyncio.run(_play(build, task, ""))
    except Exception as error:  # noqa: BLE001  # a stranger's code; its fault is the row's
        yield f"the environment raised {type(error).__name__}: {error}"
        return
    if first != second:
        yield "two episodes of the same task begin differently"
    if right < 1.0:
        yield f"the reply {answer!r} has the reward {right:g}, not 1"
    if empty >= 1.0:
        yield f"an empty reply has the reward {empty:g}"


async def _play(build: Callable[[], Any], task: Mapping[str, Any], reply: str) -> tuple[list[Any], float]:
    """Return the first messages of an episode, and the reward of one reply."""
    environment = build()
    try:
        begun = await environment.reset(task)
        seen = await environment.step(Message(reply))
        return list(begun.messages), float((begun.reward or 0.0) + (seen.reward or 0.0))
    finally:
        await environment.close()
