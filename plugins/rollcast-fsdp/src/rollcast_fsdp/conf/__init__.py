"""The engine's config files, registered by an entry point in ``rollcast.configs``."""

from rollcast.contracts.config import ConfigSchema
from rollcast_fsdp.schemas import FsdpConfig

__all__ = ["SCHEMAS"]

SCHEMAS = (ConfigSchema(schema=FsdpConfig, group="engine", option="fsdp"),)
