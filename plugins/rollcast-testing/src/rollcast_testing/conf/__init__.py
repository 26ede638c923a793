"""Configuration of the runtime ``simulated``."""

from rollcast.contracts.config import ConfigSchema
from rollcast_testing.schemas import SimulatedRuntimeConfig

SCHEMAS = (ConfigSchema(path="runtime", schema=SimulatedRuntimeConfig, group="runtime", option="simulated"),)
