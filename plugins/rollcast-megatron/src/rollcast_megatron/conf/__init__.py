"""The engine's config files, registered by an entry point in ``rollcast.configs``."""

from rollcast.contracts.config import ConfigSchema
from rollcast_megatron.schemas import MegatronConfig

__all__ = ["SCHEMAS"]

SCHEMAS = (ConfigSchema(schema=MegatronConfig, group="engine", option="megatron"),)
