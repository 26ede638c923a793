"""The registry of weight syncs, which validates ``rollout.weight_sync``, and the schema of ``judge``."""

from rollcast.contracts.config import ConfigSchema
from rollcast_serving.schemas import JudgeConfig
from rollcast_serving.weight_sync import weight_syncs

__all__ = ["SCHEMAS", "weight_syncs"]

SCHEMAS = (ConfigSchema(path="judge", schema=JudgeConfig),)
