"""Schema of the config's ``agent`` section; importable without torch."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from rollcast.contracts.config import Fraction, LocalPath, Positive, PositiveOrOff, Seconds, config
from rollcast_agents.contracts.session import Budget

__all__ = ["AgentConfig", "StragglersConfig"]


@config
class StragglersConfig:
    """Rollouts that may be cancelled because the others have ended."""

    share: Fraction = 0.0
    """Maximum share of a worker's rollouts that may be cancelled; 0 waits for all."""
    grace_s: Seconds = 10.0
    """Seconds to wait for them after the others have ended."""


@config
class AgentConfig(Budget):
    """Settings of agent rollouts, which may have several replies. Names are verl's where verl has one."""

    loop: str | None = None
    """Registry name of the agent loop; null samples one response per prompt, and ignores the keys below."""
    renderer: str = "chat_template"
    """Registry name of the renderer."""
    renderer_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the renderer; `chat_template` passes them to the template."""
    format: str = ""
    """Format of the model's tool calls, such as `hermes`; empty for the renderer's own."""
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tools by registry name, with their options. The option `path` (`file.py:function` or `module:function`) uses
    that function as a tool with this name.
    """
    tool_config_path: LocalPath | None = None
    """YAML file of further tools, in verl's format."""
    mcp_servers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """MCP servers whose tools the model may call: name to `url`, or to `command` with `args`, `env` and `cwd`."""
    max_parallel_calls: Positive = 8
    """Maximum number of tool calls of one reply that are run."""
    max_tool_response_length: Positive = 8192
    """Maximum characters of a tool's result that the model sees; the middle of a longer result is cut out."""
    tool_timeout_s: Seconds = 30.0
    """Timeout of one tool call in seconds; the model reads a message about it."""
    tool_concurrency: Positive | None = None
    """Maximum concurrent calls of one tool in a process, unless the tool sets its own limit; null for no limit."""
    environment: str | None = None
    """Registry name of the environment; null for none."""
    environment_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the environment."""
    interaction_config_path: LocalPath | None = None
    """YAML file of interactions, in verl's format; the loop `environment` uses them instead of an environment."""
    environment_timeout_s: Seconds = 60.0
    """Timeout of one call to the environment in seconds; after it the rollout fails."""
    memory_limit_mb: Positive | None = None
    """Memory in MiB that the process of tools, environments and programs may allocate after it has loaded them; null
    for no limit.
    """
    program: str | None = None
    """Program of the loop `program`: `file.py:function`, `module:function`, or a command."""
    program_kind: Literal["function", "command"] = "function"
    """Kind of `program`."""
    max_concurrency: Positive | None = None
    """Maximum number of concurrent rollouts in a process; null for all."""
    batch_wait_s: Seconds = 0.5
    """Seconds that a rollout in the actor's processes waits for other rollouts' next turns, to generate them in one
    batch.
    """
    on_failure: Literal["drop", "mask"] = "drop"
    """Handling of a rollout that failed or was cancelled: `drop` removes it from the update; `mask` keeps it,
    without trained tokens and excluded from its group's baseline. In validation it counts as wrong.
    """
    stragglers: StragglersConfig = field(default_factory=StragglersConfig)
    """Rollouts that may be cancelled because the others have ended."""
    save_trajectories: PositiveOrOff = 1
    """Steps between files of trajectories in `run_dir/trajectories`; -1 for none."""
