"""The core's own configuration files."""

from rollcast.config.schemas import ConfigSchema, PlacementConfig, RuntimeConfig

SCHEMAS = (
    ConfigSchema(path="runtime", schema=RuntimeConfig),
    ConfigSchema(path="placement", schema=PlacementConfig),
)
