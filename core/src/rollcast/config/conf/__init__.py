"""The core's own configuration files."""

from rollcast.config.schemas import ConfigSchema, PlacementConfig
from rollcast.contracts.runtime import RuntimeConfig
from rollcast.runtime.local import LocalRuntimeConfig

SCHEMAS = (
    ConfigSchema(path="runtime", schema=RuntimeConfig),
    ConfigSchema(path="runtime", schema=LocalRuntimeConfig, group="runtime", option="local"),
    ConfigSchema(path="placement", schema=PlacementConfig),
)
