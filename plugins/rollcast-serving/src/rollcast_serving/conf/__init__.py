"""The registry of weight syncs, which validates ``rollout.weight_sync``, and the schema of ``judge``."""

from rollcast.contracts.config import ConfigSchema
from rollcast_serving.contracts.weight_sync import weight_syncs
from rollcast_serving.schemas import JudgeConfig

__all__ = ["SCHEMAS", "weight_syncs"]

SCHEMAS = (ConfigSchema(path="judge", schema=JudgeConfig),)
