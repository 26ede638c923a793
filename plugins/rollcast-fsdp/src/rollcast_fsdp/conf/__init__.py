"""The engine's config files, announced to the core by an entry point in ``rollcast.configs``."""

from rollcast.config.schemas import ConfigSchema
from rollcast_fsdp.schemas import FsdpConfig

__all__ = ["SCHEMAS"]

SCHEMAS = (ConfigSchema(path="actor.engine", schema=FsdpConfig, group="engine", option="fsdp"),)
