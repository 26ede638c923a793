"""The registry of weight syncs, against which ``rollout.weight_sync`` is checked, and the schema of ``judge``."""

from rollcast.contracts.config import ConfigSchema
from rollcast_serving.schemas import JudgeConfig
from rollcast_serving.weight_sync import weight_syncs

__all__ = ["SCHEMAS", "weight_syncs"]

SCHEMAS = (ConfigSchema(path="judge", schema=JudgeConfig),)
