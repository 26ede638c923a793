"""Config options of the group ``reward``, and the schema that checks them."""

from __future__ import annotations

from rollcast.contracts.config import ConfigSchema
from rollcast_rewards.schemas import RewardConfig

SCHEMAS = (ConfigSchema(path="reward", schema=RewardConfig, group="reward"),)
