"""Configuration files of the core."""

from rollcast.contracts.config import ConfigSchema
from rollcast.contracts.runtime import RuntimeConfig
from rollcast.contracts.sections import PlacementConfig
from rollcast.runtime.local import LocalRuntimeConfig

SCHEMAS = (
    ConfigSchema(path="runtime", schema=RuntimeConfig),
    ConfigSchema(path="runtime", schema=LocalRuntimeConfig, group="runtime", option="local"),
    ConfigSchema(path="placement", schema=PlacementConfig),
)
