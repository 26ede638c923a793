"""The schema of the section ``agent``."""

from __future__ import annotations

from rollcast.contracts.config import ConfigSchema
from rollcast_agents.schemas import AgentConfig

SCHEMAS = (ConfigSchema(path="agent", schema=AgentConfig),)
