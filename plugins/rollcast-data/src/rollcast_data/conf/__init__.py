"""Config options of the group ``data``, and the schema that checks them."""

from __future__ import annotations

from rollcast.contracts.config import ConfigSchema
from rollcast_data.schemas import DataConfig

SCHEMAS = (ConfigSchema(path="data", schema=DataConfig, group="data"),)
