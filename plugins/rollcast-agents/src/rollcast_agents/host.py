"""The agents of a process: renderer, tools, gateway and loop, with many concurrent rollouts in one event loop."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollcast.contracts.rollout import RolloutOutput, RolloutRequest, SamplingParams
from rollcast.errors import ConfigError
from rollcast_agents.code_processes import CodeProcesses, RemoteEnvironment, needs_process
from rollcast_agents.contracts.agent_loop import AgentLoopSetup, BaseAgentLoop, agent_loops
from rollcast_agents.contracts.environment import environments
from rollcast_agents.contracts.renderer import BaseRenderer, RendererSetup, renderers
from rollcast_agents.contracts.tool import BaseTool
from rollcast_agents.contracts.trajectory import Trajectory
from rollcast_agents.ended import ProcessEnded
from rollcast_agents.gateway import Gateway
from rollcast_agents.runner import Limits, RolloutRunner
from rollcast_agents.schemas import AgentConfig
from rollcast_agents.session import RecordingSession
from rollcast_agents.tools.box import ToolBox, ToolLimits
from rollcast_agents.tools.mcp import McpServer
from rollcast_agents.user_code import environment_factory, local_tools

__all__ = ["AgentHost", "Generate", "HostSetup", "Rollout", "check_names"]

logger = logging.getLogger(__name__)
_PROGRESS_S = 10.0


@dataclass(frozen=True)
class HostSetup:
    """Picklable arguments that a host is built from.

    Attributes:
        config: section ``agent``.
        model_path: folder of the tokenizer.
        max_total_tokens: maximum tokens of a context; a smaller ``agent.max_total_tokens`` takes precedence.
        trust_remote_code: allow the folder's own Python code.
    """

    config: AgentConfig
    model_path: str
    max_total_tokens: int
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Rollout:
    """A rollout to run.

    Attributes:
        number: index among the rollouts of its call.
        rollout_id: id, unique in the run.
        group_id: prompt that it belongs to.
        task: row of the dataset.
        seed: seed of its replies; None for the engine's stream.
    """

    number: int
    rollout_id: str
    group_id: str
    task: Mapping[str, Any]
    seed: int | None = None


#: Sends a request of a rollout to an engine.
Generate = Callable[[Rollout, RolloutRequest], Awaitable[RolloutOutput]]


def check_names(config: AgentConfig) -> None:
    """Check that loop, renderer, environment and tools exist, before anything starts.

    Raises:
        PluginError: one does not exist; the message names the key.
        ConfigError: a tool cannot be built.
    """
    agent_loops.get(str(config.loop), requested_by="agent.loop")
    renderers.get(config.renderer, requested_by="agent.renderer")
    if config.environment is not None:
        environments.get(config.environment, requested_by="agent.environment")
    if config.environment is not None and config.interaction_config_path is not None:
        raise ConfigError(
            f"agent.environment={config.environment} and agent.interaction_config_path="
            f"{config.interaction_config_path} are both set, but a rollout has one environment: remove one of them"
        )
    environment_factory(config)
    local_tools(config)


class AgentHost:
    """Runner of the config's agent loop for many rollouts; used from one event loop.

    Args:
        setup: setup of the host.
    """

    def __init__(self, setup: HostSetup) -> None:
        self.setup = setup
        config = setup.config
        self.renderer: BaseRenderer = renderers.get(config.renderer, requested_by="agent.renderer")(
            RendererSetup(setup.model_path, config.format, config.renderer_kwargs, setup.trust_remote_code)
        )
        limits = [limit for limit in (config.max_total_tokens, setup.max_total_tokens) if limit is not None]
        # The runner ends a rollout that takes too long; a second timeout would hide where it hung.
        self._budget = replace(config, max_total_tokens=min(limits), timeout_s=None)
        self._servers: list[McpServer] = []
        self._code: CodeProcesses | None = None
        self._box: ToolBox | None = None
        self._gateway: Gateway | None = None
        self._loop: BaseAgentLoop | None = None
        self._runner: RolloutRunner | None = None

    async def start(self) -> None:
        """Build tools, gateway and loop; call it once, before the first :meth:`run`.

        Raises:
            ConfigError: one of them cannot be built, or an MCP server does not respond.
        """
        config = self.setup.config
        tools: list[BaseTool] = []
        if needs_process(config):
            self._code = CodeProcesses(config)
            tools += await self._code.start()
        for name, options in config.mcp_servers.items():
            server = McpServer(name, options, config.tool_timeout_s)
            self._servers.append(server)
            tools += await server.start()
        limits = ToolLimits(config.tool_timeout_s, config.max_tool_response_length, config.tool_concurrency)
        self._box = ToolBox(tools, limits)
        if config.program is not None:
            self._gateway = Gateway(self.renderer, self.setup.model_path, SamplingParams())
            await self._gateway.start()
        loop_class = agent_loops.get(str(config.loop), requested_by="agent.loop")
        self._loop = loop_class(AgentLoopSetup(config, self._box, self._gateway))
        limits_of_rollouts = Limits(config.timeout_s, config.environment_timeout_s)
        has_environment = config.environment is not None or config.interaction_config_path is not None
        make_environment = RemoteEnvironment.build if has_environment else None
        self._runner = RolloutRunner(self._loop, make_environment, limits_of_rollouts)

    async def run(
        self,
        rollouts: Sequence[Rollout],
        generate: Generate,
        sampling: SamplingParams,
        *,
        enter: Callable[[], None] = lambda: None,
        leave: Callable[[], None] = lambda: None,
    ) -> list[list[Trajectory]]:
        """Run all rollouts; return the trajectories of each, at least one, in the rollouts' order.

        Args:
            rollouts: rollouts to run.
            generate: sends a request to an engine.
            sampling: default sampling parameters of a reply.
            enter: called for each concurrent slot before any rollout starts.
            leave: called for each of them when it has no rollout left.
        """
        if self._runner is None:
            raise RuntimeError("AgentHost.start has to be called first")
        job = _Job(self, self._runner, deque(rollouts), generate, sampling)
        at_once = min(self.setup.config.max_concurrency or len(rollouts), len(rollouts))
        for _ in range(at_once):
            enter()
        takers = [asyncio.ensure_future(job.take(leave)) for _ in range(at_once)]
        watcher = asyncio.ensure_future(job.watch(len(rollouts), self.setup.config))
        try:
            await asyncio.gather(*takers)
        finally:
            for task in (watcher, *takers):
                task.cancel()
            await asyncio.gather(watcher, *takers, return_exceptions=True)
        # A rollout that had not started when stragglers were cancelled has no entry.
        return [
            job.ended.get(rollout.number) or [_aborted(rollout.group_id, rollout.rollout_id)] for rollout in rollouts
        ]

    def session(self, rollout: Rollout, generate: Generate, sampling: SamplingParams) -> RecordingSession:
        """Return the session of a rollout."""
        return RecordingSession(
            rollout.rollout_id,
            group_id=rollout.group_id,
            generate=functools.partial(generate, rollout),
            renderer=self.renderer,
            sampling=sampling,
            budget=self._budget,
            seed=rollout.seed,
        )

    async def attempt(
        self, runner: RolloutRunner, rollout: Rollout, session: RecordingSession, is_private: bool
    ) -> list[Trajectory]:
        """Return the trajectories of a rollout whose users' code runs in a process.

        Raises:
            ProcessEnded: the shared process ended.
        """
        if self._code is None:
            return await runner.run(rollout.task, session)
        try:
            async with self._code.rollout(is_private):
                return await runner.run(rollout.task, session)
        except ProcessEnded:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError from None
            raise

    async def close(self) -> None:
        """Release the resources of loop, tools, gateway and servers."""
        for part in (self._loop, self._gateway, self._box, self._code, *self._servers):
            if part is not None:
                try:
                    await part.close()
                except Exception:  # a user's code must not prevent the others from closing
                    logger.warning("%s could not be closed", type(part).__name__, exc_info=True)
        self._runner = None


@dataclass(eq=False)
class _Job:
    """A batch of rollouts in flight."""

    host: AgentHost
    runner: RolloutRunner
    waiting: deque[Rollout]
    generate: Generate
    sampling: SamplingParams
    ended: dict[int, list[Trajectory]] = field(default_factory=dict)
    running: set[asyncio.Task[list[Trajectory]]] = field(default_factory=set)
    #: True once users' code has ended the process that rollouts share.
    is_private: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, leave: Callable[[], None]) -> None:
        """Run one rollout after the other until none is left."""
        try:
            while self.waiting:
                rollout = self.waiting.popleft()
                self.ended[rollout.number] = await self._run(rollout)
                self.changed.set()
        finally:
            leave()

    async def _run(self, rollout: Rollout) -> list[Trajectory]:
        try:
            return await self._run_in(rollout, self.is_private)
        except ProcessEnded as ended:
            if not self.is_private:
                logger.warning("%s; its rollouts run again, and each has a process of its own", ended)
            # For the rest of the batch, so that it is interrupted only once.
            self.is_private = True
            return await self._run_in(rollout, is_private=True)

    async def _run_in(self, rollout: Rollout, is_private: bool) -> list[Trajectory]:
        session = self.host.session(rollout, self.generate, self.sampling)
        # A separate task, so that a straggler can be cancelled while its samples are kept.
        task = asyncio.ensure_future(self.host.attempt(self.runner, rollout, session, is_private))
        self.running.add(task)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            self.running.discard(task)
        if not task.cancelled():
            return task.result()
        return session.trajectories() or [_aborted(session.group_id, session.session_id)]

    async def watch(self, count: int, config: AgentConfig) -> None:
        """Log the progress, and cancel stragglers."""
        start = said = time.monotonic()
        deadline: float | None = None
        spared = int(config.stragglers.share * count)
        while len(self.ended) < count:
            self.changed.clear()
            left = _PROGRESS_S if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                async with asyncio.timeout(left):
                    await self.changed.wait()
            except TimeoutError:
                pass
            now = time.monotonic()
            if now - said >= _PROGRESS_S:
                said = now
                logger.info("%d of %d rollouts ended after %.0f s", len(self.ended), count, now - start)
            if spared and deadline is None and count - len(self.ended) <= spared:
                deadline = now + config.stragglers.grace_s
            if deadline is not None and now >= deadline:
                self.waiting.clear()
                logger.warning("%d of %d rollouts are cancelled as stragglers", len(self.running), count)
                for task in self.running:
                    task.cancel()
                return


def _aborted(group_id: str, rollout_id: str) -> Trajectory:
    return Trajectory((), group_id, rollout_id, "aborted")
