"""Configuration files of the runtime ``ray``."""

from rollcast.contracts.config import ConfigSchema
from rollcast_ray.schemas import RayRuntimeConfig

SCHEMAS = (ConfigSchema(path="runtime", schema=RayRuntimeConfig, group="runtime", option="ray"),)
