"""One rollout from task to trajectories: limits, attribution of failures, clean shutdown."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rollcast.contracts.reward import MAX_REWARD, finite_number
from rollcast.errors import EnvironmentFailed, RendererError, RequestError, RolloutError, SessionEnded
from rollcast_agents.code_processes import RemoteEnvironment
from rollcast_agents.contracts.agent_loop import BaseAgentLoop, Outcome
from rollcast_agents.contracts.environment import BaseEnvironment, Observation
from rollcast_agents.contracts.renderer import Message
from rollcast_agents.contracts.tool import BaseTool
from rollcast_agents.contracts.trajectory import Boundary, End, Failure, Trajectory
from rollcast_agents.ended import ProcessEnded
from rollcast_agents.environments.plain import PlainEnvironment
from rollcast_agents.session import RecordingSession

__all__ = ["GuardedEnvironment", "Limits", "ProgramFailed", "RolloutRunner"]

logger = logging.getLogger(__name__)
T = TypeVar("T")
#: Largest magnitude of a metric that is not trained on; sums of many stay finite.
_MAX_METRIC = 1e100


class ProgramFailed(Exception):
    """A user's program ended with an error."""


@dataclass(frozen=True)
class Limits:
    """Limits of one rollout.

    Attributes:
        rollout_s: maximum seconds of the loop; None for no limit.
        environment_s: maximum seconds of one call to the environment.
        close_s: maximum seconds for closing the environment.
    """

    rollout_s: float | None = None
    environment_s: float = 60.0
    close_s: float = 10.0


class GuardedEnvironment(BaseEnvironment):
    """An environment wrapper that attributes failures: exceptions and timeouts are raised as EnvironmentFailed.

    Args:
        inner: the environment.
        limits: limits of its calls.
    """

    def __init__(self, inner: BaseEnvironment, limits: Limits) -> None:
        self._inner, self._limits = inner, limits
        self._name = inner.class_name if isinstance(inner, RemoteEnvironment) else type(inner).__name__
        own = inner.tools if isinstance(inner, PlainEnvironment | RemoteEnvironment) else None
        #: Methods of a plain environment as tools; None for other environments.
        self.tools: Mapping[str, BaseTool] | None = own

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        return await self._guard("reset", self._inner.reset(task), self._limits.environment_s)

    async def step(self, message: Message) -> Observation:
        return await self._guard("step", self._inner.step(message), self._limits.environment_s)

    async def done_early(self) -> bool:
        """Return True if a plain environment's episode is over after a tool call."""
        if not isinstance(self._inner, PlainEnvironment | RemoteEnvironment) or self.tools is None:
            return False
        return await self._guard("is_done", self._inner.done_early(), self._limits.environment_s)

    async def close(self) -> None:
        await self._guard("close", self._inner.close(), self._limits.close_s)

    async def _guard(self, what: str, call: Awaitable[T], seconds: float) -> T:
        name = self._name
        try:
            async with asyncio.timeout(seconds) as limit:
                return await call
        except TimeoutError as error:
            if limit.expired():
                raise EnvironmentFailed(f"{name}.{what} did not answer within {seconds:g} s") from None
            raise EnvironmentFailed(f"{name}.{what} raised TimeoutError: {error}") from error
        except ProcessEnded:
            raise
        except Exception as error:  # a user's code
            raise EnvironmentFailed(f"{name}.{what} raised {type(error).__name__}: {error}") from error


class RolloutRunner:
    """Runner of one loop for many rollouts; a failure ends only its own rollout, never the batch.

    Args:
        loop: loop of the run.
        make_environment: returns a new environment, or builds it when awaited; None if the run has none.
        limits: limits of each rollout.
    """

    def __init__(
        self,
        loop: BaseAgentLoop,
        make_environment: Callable[[], BaseEnvironment | Awaitable[BaseEnvironment]] | None,
        limits: Limits,
    ) -> None:
        self._loop, self._make_environment, self._limits = loop, make_environment, limits

    async def run(self, task: Mapping[str, Any], session: RecordingSession) -> list[Trajectory]:
        """Run one rollout; return its trajectories, at least one if anything was sampled.

        A cancelled rollout closes its environment and ends with ``aborted``; the cancellation is re-raised.

        Raises:
            ProcessEnded: the process that the rollout shared ended, perhaps by another one's fault.
        """
        failure: Failure | None = None
        try:
            outcome, failure = await self._outcome(task, session)
        except (asyncio.CancelledError, ProcessEnded):
            session.close("aborted")
            raise
        session.close(outcome.end)
        if outcome.end in ("error", "timeout") or not outcome.messages:
            # The loop did not return an outcome of its own.
            outcome = replace(outcome, messages=outcome.messages or list(session.messages))
            outcome = replace(outcome, metrics={**session.metrics(), **outcome.metrics})
        outcome, problem = _with_finite_numbers(outcome)
        failure = failure or problem
        trajectories = [_finished(trajectory, outcome, session, failure) for trajectory in session.trajectories()]
        return trajectories or [
            _finished(Trajectory((), session.group_id, session.session_id, outcome.end), outcome, session, failure)
        ]

    async def _outcome(self, task: Mapping[str, Any], session: RecordingSession) -> tuple[Outcome, Failure | None]:
        try:
            async with asyncio.timeout(self._limits.rollout_s) as limit:
                return await self._run(task, session), None
        except SessionEnded as ended:
            return Outcome(_end(ended.end)), None
        except TimeoutError as error:
            if limit.expired():
                where: Boundary = "engine" if session.is_waiting else "loop"
                return Outcome("timeout"), Failure(where, f"the rollout took longer than {self._limits.rollout_s:g} s")
            return Outcome("error"), Failure("loop", f"TimeoutError: {error}")
        except (Exception, SystemExit) as error:  # of the engine or a stranger's code: it ends this rollout alone
            if isinstance(error, ProcessEnded) and not error.is_final:
                raise
            text = str(error) if isinstance(error, ProcessEnded) else f"{type(error).__name__}: {error}"
            failure = Failure(_boundary(error), text)
            logger.warning("rollout %s failed in the %s: %s", session.session_id, failure.boundary, failure.message)
            return Outcome("error"), failure

    async def _run(self, task: Mapping[str, Any], session: RecordingSession) -> Outcome:
        environment = await self._environment()
        try:
            return await self._loop.run(task, session, environment)
        finally:
            if environment is not None:
                await asyncio.shield(_closed(environment))

    async def _environment(self) -> GuardedEnvironment | None:
        if self._make_environment is None:
            return None
        try:
            async with asyncio.timeout(self._limits.environment_s):
                built = self._make_environment()
                return GuardedEnvironment(await built if inspect.isawaitable(built) else built, self._limits)
        except ProcessEnded:
            raise
        except Exception as error:  # a user's constructor may raise anything
            raise EnvironmentFailed(f"the environment could not be built: {type(error).__name__}: {error}") from error


async def _closed(environment: BaseEnvironment) -> None:
    try:
        await environment.close()
    except ProcessEnded as error:
        logger.debug("an environment needs no close: %s", error)
    except EnvironmentFailed as error:
        logger.warning("an environment could not be closed: %s", error)


def _boundary(error: BaseException) -> Boundary:
    if isinstance(error, ProcessEnded):
        return error.boundary
    kinds: tuple[tuple[type[Exception] | tuple[type[Exception], ...], Boundary], ...] = (
        (EnvironmentFailed, "environment"),
        (RendererError, "renderer"),
        ((RolloutError, RequestError), "engine"),
        (ProgramFailed, "program"),
    )
    return next((boundary for kind, boundary in kinds if isinstance(error, kind)), "loop")


def _end(end: str) -> End:
    return end  # type: ignore[return-value]  # SessionEnded carries one of ENDS


def _with_finite_numbers(outcome: Outcome) -> tuple[Outcome, Failure | None]:
    """Return the outcome with plain numbers, 0 for what is not a finite number, and the first such value as a failure.

    The numbers are those of a user's environment, tools or program. The scorer applies ``reward.on_error`` to the
    failure, as to a bad value of a reward function.
    """
    problems: list[str] = []

    def number(name: str, value: Any, limit: float = MAX_REWARD) -> float:
        try:
            return finite_number(name, value, limit)
        except ValueError as error:
            problems.append(str(error))
            return 0.0

    outcome = replace(
        outcome,
        reward=None if outcome.reward is None else number("reward", outcome.reward),
        turn_rewards={turn: number(f"turn_rewards[{turn}]", value) for turn, value in outcome.turn_rewards.items()},
        reward_components={
            str(key): number(f"component {key}", value) for key, value in outcome.reward_components.items()
        },
        metrics={str(key): number(f"metric {key}", value, _MAX_METRIC) for key, value in outcome.metrics.items()},
    )
    return outcome, Failure("reward", f"the rollout {problems[0]}") if problems else None


def _finished(
    trajectory: Trajectory, outcome: Outcome, session: RecordingSession, failure: Failure | None
) -> Trajectory:
    failed = outcome.end in ("error", "timeout")
    return replace(
        trajectory,
        end=outcome.end if failed or trajectory.end == "done" else trajectory.end,
        reward=outcome.reward,
        turn_rewards=outcome.turn_rewards,
        reward_components=outcome.reward_components,
        messages=outcome.messages,
        metrics={**outcome.metrics, "turns": float(session.turns), "forks": float(session.forks)},
        failure=failure,
        extra=outcome.extra,
    )
