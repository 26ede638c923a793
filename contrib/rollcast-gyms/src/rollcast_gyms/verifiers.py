"""The environment ``verifiers``: tasksets of the public package of the same name."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rollcast.errors import ConfigError
from rollcast_agents.chat import as_chat, tool_message
from rollcast_agents.contracts.environment import BaseEnvironment, Observation
from rollcast_agents.contracts.renderer import Message
from rollcast_agents.contracts.tool import BaseTool
from rollcast_agents.environments.toolsets import started_tools
from rollcast_agents.named import load_named
from rollcast_agents.threads import in_thread
from rollcast_agents.tools.box import RolloutTools, ToolBox
from rollcast_data.chat_template import ToolCall

__all__ = ["Verifiers"]

_KEY = "agent.environment_kwargs.taskset"
_PROGRAM = "run it with agent.loop=program and verifiers' own agents"


class Verifiers(BaseEnvironment):
    """An environment of one task of a taskset: its prompt, tools and stops, and its rewards at the end.

    ``index`` in a dataset row is the number of the task. A system message of the row replaces the task's. A reply
    without a tool call ends the episode. Tools run in this process, and the commands of a task's setup and scores run
    on this machine without a sandbox.

    Args:
        taskset: name of an installed taskset package, or ``module:Class`` or ``file.py:Class``.
        options: fields of its config.
    """

    def __init__(self, taskset: str = "", options: Mapping[str, Any] | None = None) -> None:
        if not taskset:
            raise ConfigError(f"agent.environment=verifiers needs {_KEY}, the name of a taskset")
        self._name, self._options = taskset, json.dumps(dict(options or {}), sort_keys=True)
        self._task: Any = None
        self._trace: Any = None
        self._runtime: Any = None
        self._tools: RolloutTools | None = None
        self._held = contextlib.AsyncExitStack()

    async def reset(self, task: Mapping[str, Any]) -> Observation:
        tasks = await in_thread(_tasks, self._name, self._options)
        self._task = await in_thread(tasks.find, int(task.get("index", 0)))
        await self._begin(tasks.taskset)
        prompt = task.get("prompt") or ()
        for message in _prompt_of(self._task.data, with_system=not prompt or prompt[0]["role"] != "system"):
            self._record(message)
        said = [_as_chat(node.message) for node in self._trace.nodes]
        return Observation(said, tools=self._tools.schemas if self._tools is not None else None)

    async def step(self, message: Message) -> Observation:
        import verifiers.v1 as vf

        calls = [
            vf.ToolCall(id=call.call_id, name=call.name, arguments=json.dumps(dict(call.arguments)))
            for call in message.tool_calls
            if not call.error
        ]
        reply = vf.AssistantMessage(
            content=message.text, reasoning_content=message.reasoning or None, tool_calls=calls or None
        )
        self._record(reply, sampled=True)
        if self._tools is None or not message.tool_calls or await self._is_stopped():
            return await self._end()
        results = await asyncio.gather(*(self._tools.call(call) for call in message.tool_calls))
        answers = [self._answer(call, result.text) for call, result in zip(message.tool_calls, results, strict=True)]
        # An episode that ends at a limit of the run gets no reward from its task.
        return Observation(answers, reward=0.0)

    async def close(self) -> None:
        await self._held.aclose()

    async def _begin(self, taskset: Any) -> None:
        """Start the resources that the task needs: its trace, its folder, its tools."""
        import verifiers.v1 as vf
        from verifiers.v1.runtimes import make_runtime
        from verifiers.v1.state import state_cls
        from verifiers.v1.utils.compile import resolve_runtime_config
        from verifiers.v1.utils.decorators import invoke

        task = self._task
        try:
            config = resolve_runtime_config(vf.SubprocessConfig(), task)
        except ValueError as error:
            raise ConfigError(f"{_KEY}={self._name}: {error}; {_PROGRAM}") from error
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=vf.AgentConfig(runtime=config), name="agent")
        self._trace = vf.Trace(task=about, state=state_cls(type(task))(), agent=agent)
        self._runtime = make_runtime(config, name=f"rollcast-{uuid.uuid4().hex}")
        self._runtime.env = dict(task.runtime_env())
        self._held.push_async_callback(self._runtime.stop)
        await self._runtime.start()
        await invoke(task.setup, {"trace": self._trace, "runtime": self._runtime})
        shared, own = type(taskset).toolsets(taskset.config), type(task).toolsets(task.config)
        tools: list[BaseTool] = await self._held.enter_async_context(
            started_tools(shared, own, task.data, self._trace.state)
        )
        if tools:
            self._tools = await self._held.enter_async_context(ToolBox(tools).rollout({}))

    def _record(self, message: Any, sampled: bool = False) -> None:
        from verifiers.v1.graph import MessageNode

        nodes = self._trace.nodes
        nodes.append(MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))

    def _answer(self, call: ToolCall, text: str) -> dict[str, Any]:
        import verifiers.v1 as vf

        self._record(vf.ToolMessage(tool_call_id=call.call_id, name=call.name or None, content=text))
        return tool_message(call, text)

    async def _is_stopped(self) -> bool:
        import verifiers.v1 as vf
        from verifiers.v1.session import call_hook

        messages = [node.message for node in self._trace.nodes]
        seen: dict[type, Any] = {vf.Trace: self._trace, vf.Request: vf.Request(messages=messages)}
        for stop in self._task.hooks("stop"):
            if await call_hook(stop, seen):
                self._trace.stop(stop.__name__)
                return True
        return False

    async def _end(self) -> Observation:
        from verifiers.v1.utils.decorators import invoke

        self._trace.stop("agent_completed")
        self._trace.ok = True
        await invoke(self._task.finalize, {"trace": self._trace, "runtime": self._runtime})
        await self._task.score(self._trace, self._runtime)
        parts = {name: reward.value for name, reward in self._trace.rewards.items() if reward is not None}
        numbers = {name: value for name, value in self._trace.metrics.items() if value is not None}
        return Observation(reward=self._trace.reward, done=True, components=parts, metrics=numbers)


class _Tasks:
    """The tasks of a possibly endless taskset, read only as far as they are requested."""

    def __init__(self, taskset: Any) -> None:
        self.taskset = taskset
        self._unread: Iterator[Any] = iter(taskset)
        self._read: list[Any] = []
        self._lock = threading.Lock()

    def find(self, index: int) -> Any:
        """Return a task; numbers beyond the last task wrap around."""
        with self._lock:
            self._read += itertools.islice(self._unread, max(index + 1 - len(self._read), 0))
            if not self._read:
                raise ConfigError(f"{type(self.taskset).__name__} has no tasks")
            return self._read[index % len(self._read)]


@functools.lru_cache(maxsize=8)
def _tasks(name: str, options: str) -> _Tasks:
    try:
        from verifiers.v1.utils.loaders import environment_class, taskset_class
    except ImportError as error:
        raise ConfigError(
            "agent.environment=verifiers needs the package verifiers, 0.4 or newer: "
            f'pip install "rollcast-gyms[verifiers]" ({error})'
        ) from error
    from verifiers.v1.envs.single_agent import SingleAgentEnv

    if ":" in name:
        kind, fields = load_named(name, _KEY), json.loads(options)
    else:
        try:
            kind, fields = taskset_class(name), {"id": name, **json.loads(options)}
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{_KEY}={name}: {error}") from error
        if environment_class(name) is not SingleAgentEnv:
            raise ConfigError(f"{_KEY}={name} has an environment of its own; {_PROGRAM}")
    task = kind.task_type()
    if task.NEEDS_CONTAINER:
        raise ConfigError(f"{_KEY}={name}: its tasks need a container; {_PROGRAM}")
    _check_hooks(name, task)
    return _Tasks(_built(name, kind, fields))


def _built(name: str, kind: Callable[[Any], Any], fields: Mapping[str, Any]) -> Any:
    from pydantic import ValidationError
    from verifiers.v1.configs.taskset import TasksetConfig
    from verifiers.v1.utils.generic import concrete_type

    schema = concrete_type(kind, TasksetConfig) or TasksetConfig
    try:
        return kind(schema(**fields))
    except ValidationError as error:
        reason = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
        raise ConfigError(f"agent.environment_kwargs.options do not fit the taskset {name}: {reason}") from error


def _check_hooks(name: str, task: type) -> None:
    """Check that tasks do not rewrite requests or replies, which a session records as they are.

    Raises:
        ConfigError: they do; the message names the hooks.
    """
    intercepts = [key for cls in task.__mro__ for key, value in vars(cls).items() if getattr(value, "intercept", False)]
    if intercepts:
        raise ConfigError(f"{_KEY}={name}: its tasks rewrite messages ({', '.join(intercepts)}); {_PROGRAM}")


def _prompt_of(data: Any, with_system: bool) -> Sequence[Any]:
    import verifiers.v1 as vf

    system = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt and with_system else []
    if isinstance(data.prompt, str):
        return [*system, vf.UserMessage(content=data.prompt)]
    if not data.prompt:
        raise ConfigError(f"task {data.idx} of the taskset has no prompt: a simulated user starts it; {_PROGRAM}")
    return [*system, *data.prompt]


def _as_chat(message: Any) -> dict[str, Any]:
    """Return a message of verifiers in OpenAI's chat format."""
    if message.role != "assistant":
        return dict(message.model_dump(exclude_none=True))
    calls = [ToolCall(call.name, json.loads(call.arguments or "{}"), call.id) for call in message.tool_calls or ()]
    return as_chat(Message(message.content or "", message.reasoning_content or "", tuple(calls)))
