"""Schema of the config's ``agent`` section; importable without torch."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from rollcast.contracts.config import Fraction, Positive, PositiveOrOff, Seconds, config
from rollcast.contracts.session import Budget

__all__ = ["AgentConfig", "StragglersConfig"]


@config
class StragglersConfig:
    """Rollouts that are not waited for."""

    share: Fraction = 0.0
    """Largest share of a worker's rollouts that may be cancelled; 0 waits for all."""
    grace_s: Seconds = 10.0
    """Seconds that they have after the others ended."""


@config
class AgentConfig(Budget):
    """How a rollout is made where it is more than one response. Names are verl's where it has one."""

    loop: str | None = None
    """Registry name of the agent loop; null samples one response for each prompt, without the keys below."""
    renderer: str = "chat_template"
    """Registry name of the renderer."""
    renderer_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the renderer; `chat_template` passes them to the template."""
    format: str = ""
    """Format in which the model writes tool calls, such as `hermes`; empty for the renderer's own."""
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tools by registry name, with their options. With the option `path` (`file.py:function` or `module:function`)
    the function found there is called by that name."""
    tool_config_path: str | None = None
    """YAML file of further tools, in verl's format."""
    mcp_servers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """MCP servers whose tools the model may call: name to `url`, or to `command` with `args`, `env` and `cwd`."""
    max_parallel_calls: Positive = 8
    """Tool calls of one reply that are run."""
    max_tool_response_length: Positive = 8192
    """Characters of a tool's result that the model sees; the middle of a longer one is cut out."""
    tool_timeout_s: Seconds = 30.0
    """Timeout of one tool call in seconds; the model sees that it passed."""
    tool_concurrency: Positive | None = None
    """Calls of one tool at once in a process, where the tool names no number; null for any."""
    environment: str | None = None
    """Registry name of the environment; null for none."""
    environment_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the environment."""
    interaction_config_path: str | None = None
    """YAML file of interactions, in verl's format; the loop `environment` talks with them in place of an
    environment."""
    environment_timeout_s: Seconds = 60.0
    """Timeout of one call of the environment in seconds; the rollout fails when it passes."""
    program: str | None = None
    """Program of the loop `program`: `file.py:function`, `module:function`, or a command."""
    program_kind: Literal["function", "command"] = "function"
    """What `program` is."""
    max_concurrency: Positive | None = None
    """Rollouts at once in a process; null for all."""
    batch_wait_s: Seconds = 0.5
    """Seconds that a rollout in the actor's processes waits for the next turns of the others, to generate together."""
    on_failure: Literal["drop", "mask"] = "drop"
    """Treatment of a rollout that failed or was cancelled: `drop` leaves it out of the update, `mask` keeps it without
    trained tokens and without a part in the baseline of its group. In a validation it counts as wrong."""
    stragglers: StragglersConfig = field(default_factory=StragglersConfig)
    """Rollouts that are not waited for."""
    save_trajectories: PositiveOrOff = 1
    """Steps between files of trajectories in `run_dir/trajectories`; -1 for none."""
