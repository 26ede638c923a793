"""Configuration files of the trainers."""

from rollcast.contracts.config import ConfigSchema
from rollcast_trainer.schemas import PpoConfig, SftConfig

SCHEMAS = (
    ConfigSchema(path="", schema=PpoConfig, group="trainer", option="ppo"),
    ConfigSchema(path="", schema=SftConfig, group="trainer", option="sft"),
)
