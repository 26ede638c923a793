"""Configuration files of the trainers."""

from rollcast.config.schemas import ConfigSchema
from rollcast.contracts.engine import ModelConfig
from rollcast.contracts.profiler import ProfilerConfig
from rollcast_trainer.profiling.schemas import NsysConfig, TorchMemoryConfig, TorchProfilerConfig
from rollcast_trainer.schemas import (
    ActorConfig,
    CriticConfig,
    PpoActorConfig,
    PpoTrainerConfig,
    RefConfig,
    RewardModelConfig,
    SampleConfig,
    SftTrainerConfig,
)

SCHEMAS = (
    ConfigSchema(path="model", schema=ModelConfig, group="trainer"),
    ConfigSchema(path="actor", schema=ActorConfig, group="trainer"),
    ConfigSchema(path="sample", schema=SampleConfig, group="trainer", option="sample"),
    ConfigSchema(path="actor", schema=PpoActorConfig, group="trainer", option="ppo"),
    ConfigSchema(path="ref", schema=RefConfig, group="trainer", option="ppo"),
    ConfigSchema(path="critic", schema=CriticConfig, group="trainer", option="ppo"),
    ConfigSchema(path="reward_model", schema=RewardModelConfig, group="trainer", option="ppo"),
    ConfigSchema(path="trainer", schema=PpoTrainerConfig, group="trainer", option="ppo"),
    ConfigSchema(path="trainer", schema=SftTrainerConfig, group="trainer", option="sft"),
    ConfigSchema(path="profiler", schema=ProfilerConfig, group="profiler"),
    ConfigSchema(path="profiler", schema=TorchProfilerConfig, group="profiler", option="torch"),
    ConfigSchema(path="profiler", schema=TorchMemoryConfig, group="profiler", option="torch_memory"),
    ConfigSchema(path="profiler", schema=NsysConfig, group="profiler", option="nsys"),
)
