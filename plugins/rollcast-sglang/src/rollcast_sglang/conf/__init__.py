"""Config files of rollcast-sglang, and the schemas that check them."""

from __future__ import annotations

from rollcast.contracts.config import ConfigSchema
from rollcast_sglang.schemas import SglangRolloutConfig

__all__ = ["SCHEMAS"]

SCHEMAS = (ConfigSchema(path="rollout", schema=SglangRolloutConfig, group="rollout", option="sglang"),)
