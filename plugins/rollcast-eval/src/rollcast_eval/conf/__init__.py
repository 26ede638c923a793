"""Configuration of ``rollcast generate`` and ``rollcast eval``."""

from rollcast.contracts.config import ConfigSchema
from rollcast_eval.schemas import SampleRunConfig

SCHEMAS = (ConfigSchema(path="", schema=SampleRunConfig, group="trainer", option="sample"),)
