"""Checks of a task without a model, by its environment or its reward."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast import build_section
from rollcast.contracts.command import track
from rollcast.contracts.reward import BaseReward, RewardResult, RewardSample, build_reward, finite_number
from rollcast.errors import ConfigError
from rollcast_agents.contracts.environment import BaseEnvironment
from rollcast_agents.contracts.renderer import Message
from rollcast_agents.environments.plain import build_environment
from rollcast_agents.schemas import AgentConfig
from rollcast_data.files import Row, read_files
from rollcast_data.prompts import find_ground_truth, ground_truth, other_columns
from rollcast_data.schemas import DataConfig
from rollcast_rewards.schemas import RewardConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["TaskReport", "validate_rows"]


@dataclass(frozen=True)
class TaskReport:
    """Result of a validation.

    Attributes:
        judge: name of the environment or reward that was checked.
        rows: number of rows checked.
        faults: row number in the file, from 1, and the problem.
        unknown: number of rows without a known correct reply.
    """

    judge: str
    rows: int
    faults: tuple[tuple[int, str], ...]
    unknown: int = 0


def validate_rows(prompts: Path, config: DictConfig, answer: str, limit: int) -> TaskReport:
    """Check the first rows of a file.

    Args:
        prompts: JSONL or Parquet file.
        config: sections ``agent``, ``data`` and ``reward``.
        answer: correct reply to a row, with ``{ground_truth}`` in place of its reference answer. If an environment
            knows its solution, that is used instead.
        limit: number of rows to check.

    Raises:
        DataError: a row has no prompt, or a reward has no reference answer to check.
        ConfigError: the environment or the reward does not accept its options.
    """
    agent: AgentConfig = build_section(AgentConfig, config.agent, "agent")
    data: DataConfig = build_section(DataConfig, config.data, "data")
    needs_truth = agent.environment is None
    check, judge = _reward_check(config) if needs_truth else _environment_check(agent)
    rows = read_files([prompts])[:limit]
    checked = [(row.number, *check(*_task(row, data, answer, needs_truth))) for row in track(rows, "rows")]
    faults = tuple((number, fault) for number, faults_of_row, _ in checked for fault in faults_of_row)
    return TaskReport(judge, len(rows), faults, sum(not is_known for _, _, is_known in checked))


#: Problems of a row, and True if a correct reply was known.
Checked = tuple[list[str], bool]
#: Checks a task with a correct reply; None if the row has none.
Check = Callable[[Mapping[str, Any], str | None], Checked]


def _ground_truth(row: Row, data: DataConfig) -> Any:
    """Return the row's reference answer.

    Raises:
        ConfigError: rows have none.
        DataError: this row has none.
    """
    if data.ground_truth_key is None:
        raise ConfigError("data.ground_truth_key is null; a task without reference answers cannot be checked")
    return ground_truth(row, data)


def _task(row: Row, data: DataConfig, answer: str, needs_truth: bool) -> tuple[dict[str, Any], str | None]:
    """Return a row in the form that loops and environments receive, and its correct reply."""
    truth = _ground_truth(row, data) if needs_truth else find_ground_truth(row, data)
    prompt = row.get(data.prompt_key, "data.prompt_key")
    others = other_columns(row, data)
    task = {
        "seed": row.number,
        "index": row.number - 1,
        **others,
        "ground_truth": truth,
        "data_source": str(row.find(data.data_source_key) or ""),
        "extra_info": others,
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt),
    }
    known = truth is not None or "{ground_truth}" not in answer
    return task, answer.replace("{ground_truth}", str(truth)) if known else None


# ---- rewards ----


def _reward_check(config: DictConfig) -> tuple[Check, str]:
    section: RewardConfig = build_section(RewardConfig, config.reward, "reward")
    try:
        reward = build_reward(section.name, section.reward_kwargs)
    except TypeError as error:
        raise ConfigError(f"reward.reward_kwargs do not fit reward {section.name!r}: {error}") from error
    return lambda task, answer: (list(_check_reward(reward, task, answer or "")), True), f"reward {section.name}"


def _check_reward(reward: BaseReward, task: Mapping[str, Any], answer: str) -> Iterator[str]:
    for reply, expected in ((answer, True), ("", False)):
        try:
            result = _scored(reward, task, reply)
        except Exception as error:  # noqa: BLE001  # a user's code may raise anything; the row gets the fault
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
        extra_info={**task["extra_info"], "messages": messages},
        raw_prompt=task["prompt"],
    )
    (value,) = reward.score_batch([sample])
    if not isinstance(value, float | int | RewardResult):
        value = asyncio.run(_awaited(value))
    return value if isinstance(value, RewardResult) else RewardResult(finite_number("score", value))


async def _awaited(value: Any) -> Any:
    return await value


# ---- environments ----


def _environment_check(agent: AgentConfig) -> tuple[Check, str]:
    build = functools.partial(build_environment, str(agent.environment), agent.environment_kwargs)
    build()  # a wrong option is a fault of the config, not of a row
    return functools.partial(_check_environment, build), f"environment {agent.environment}"


def _check_environment(build: Callable[[], BaseEnvironment], task: Mapping[str, Any], answer: str | None) -> Checked:
    try:
        begun, empty = asyncio.run(_play(build, task, [""]))
        again, replies = asyncio.run(_begin(build, task))
        if replies is None and answer is not None:
            replies = [answer]
        _, right = asyncio.run(_play(build, task, replies or ()))
    except Exception as error:  # noqa: BLE001  # a user's code may raise anything; the row gets the fault
        return [f"the environment raised {type(error).__name__}: {error}"], True
    faults = []
    if begun != again:
        faults.append("two episodes of the same task begin differently")
    if replies is not None and right < 1.0:
        shown = ", ".join(repr(reply) for reply in replies)
        faults.append(f"the reply {shown} has the reward {right:g}, not 1")
    if empty >= 1.0:
        faults.append(f"an empty reply has the reward {empty:g}")
    return faults, replies is not None


async def _begin(
    build: Callable[[], BaseEnvironment], task: Mapping[str, Any]
) -> tuple[list[Any], Sequence[str] | None]:
    """Return the first messages of an episode, and the replies that solve it, if known."""
    environment = build()
    try:
        begun = await environment.reset(task)
        return list(begun.messages), await environment.solution()
    finally:
        await environment.close()


def _number(reward: Any) -> float:
    return 0.0 if reward is None else finite_number("reward", reward)


async def _play(
    build: Callable[[], BaseEnvironment], task: Mapping[str, Any], replies: Sequence[str]
) -> tuple[list[Any], float]:
    """Return the first messages of an episode, and the sum of its rewards for the replies."""
    environment = build()
    try:
        seen = await environment.reset(task)
        begun, total = list(seen.messages), _number(seen.reward)
        for reply in replies:
            if seen.done:
                break
            seen = await environment.step(Message(reply))
            total += _number(seen.reward)
        return begun, total
    finally:
        await environment.close()
