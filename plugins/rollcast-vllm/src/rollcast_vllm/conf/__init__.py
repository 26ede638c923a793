"""Config files of rollcast-vllm, and the schemas that check them."""

from __future__ import annotations

from rollcast.contracts.config import ConfigSchema
from rollcast_vllm.schemas import VllmRolloutConfig

__all__ = ["SCHEMAS"]

SCHEMAS = (ConfigSchema(path="rollout", schema=VllmRolloutConfig, group="rollout", option="vllm"),)
