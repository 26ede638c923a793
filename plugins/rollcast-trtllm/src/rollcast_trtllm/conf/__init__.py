"""Config files of rollcast-trtllm, and the schemas that check them."""

from __future__ import annotations

from rollcast.contracts.config import ConfigSchema
from rollcast_trtllm.schemas import TrtllmRolloutConfig

__all__ = ["SCHEMAS"]

SCHEMAS = (ConfigSchema(path="rollout", schema=TrtllmRolloutConfig, group="rollout", option="trtllm"),)
