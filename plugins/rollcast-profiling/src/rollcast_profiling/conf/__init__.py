"""Configuration files of the profilers."""

from rollcast.contracts.config import ConfigSchema
from rollcast_profiling.contract import ProfilerConfig, profilers
from rollcast_profiling.schemas import NsysConfig, TorchMemoryConfig, TorchProfilerConfig

__all__ = ["SCHEMAS", "profilers"]  # the registry, because a config is checked against those that are declared

SCHEMAS = (
    ConfigSchema(path="profiler", schema=ProfilerConfig, group="profiler"),
    ConfigSchema(path="profiler", schema=TorchProfilerConfig, group="profiler", option="torch"),
    ConfigSchema(path="profiler", schema=TorchMemoryConfig, group="profiler", option="torch_memory"),
    ConfigSchema(path="profiler", schema=NsysConfig, group="profiler", option="nsys"),
)
