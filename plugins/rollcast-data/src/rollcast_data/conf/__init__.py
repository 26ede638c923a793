"""Config options of the group ``data``, and the schema that checks them."""

from __future__ import annotations

from rollcast.contracts.config import ConfigSchema
from rollcast_data.contract import datasets, preprocessors
from rollcast_data.schemas import DataConfig

__all__ = ["SCHEMAS", "datasets", "preprocessors"]  # imported to declare their registries, for config checks

SCHEMAS = (ConfigSchema(path="data", schema=DataConfig, group="data"),)
