"""Config files of rollcast-hf, and the schemas that check them."""

from __future__ import annotations

from rollcast.contracts.config import ConfigSchema
from rollcast_hf.schemas import HfRolloutConfig

__all__ = ["SCHEMAS"]

SCHEMAS = (ConfigSchema(path="rollout", schema=HfRolloutConfig, group="rollout", option="hf"),)
