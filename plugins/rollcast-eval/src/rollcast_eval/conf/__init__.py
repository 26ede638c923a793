"""Configuration of ``rollcast generate`` and ``rollcast eval``."""

from rollcast.config.schemas import ConfigSchema
from rollcast_eval.schemas import SampleConfig

SCHEMAS = (ConfigSchema(path="sample", schema=SampleConfig, group="trainer", option="sample"),)
