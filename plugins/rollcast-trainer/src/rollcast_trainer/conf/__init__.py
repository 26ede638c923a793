"""Configuration files of the trainers."""

from rollcast.config.schemas import ConfigSchema
from rollcast.contracts.engine import ModelConfig
from rollcast_trainer.schemas import (
    ActorConfig,
    CriticConfig,
    PpoActorConfig,
    PpoTrainerConfig,
    RefConfig,
    RewardModelConfig,
    SftTrainerConfig,
)

SCHEMAS = (
    ConfigSchema(path="model", schema=ModelConfig, group="trainer"),
    ConfigSchema(path="actor", schema=ActorConfig, group="trainer"),
    ConfigSchema(path="actor", schema=PpoActorConfig, group="trainer", option="ppo"),
    ConfigSchema(path="ref", schema=RefConfig, group="trainer", option="ppo"),
    ConfigSchema(path="critic", schema=CriticConfig, group="trainer", option="ppo"),
    ConfigSchema(path="reward_model", schema=RewardModelConfig, group="trainer", option="ppo"),
    ConfigSchema(path="trainer", schema=PpoTrainerConfig, group="trainer", option="ppo"),
    ConfigSchema(path="trainer", schema=SftTrainerConfig, group="trainer", option="sft"),
)
