"""Configuration files of the profilers."""

from rollcast.contracts.config import ConfigSchema
from rollcast.contracts.profiler import ProfilerConfig
from rollcast_profiling.schemas import NsysConfig, TorchMemoryConfig, TorchProfilerConfig

SCHEMAS = (
    ConfigSchema(path="profiler", schema=ProfilerConfig, group="profiler"),
    ConfigSchema(path="profiler", schema=TorchProfilerConfig, group="profiler", option="torch"),
    ConfigSchema(path="profiler", schema=TorchMemoryConfig, group="profiler", option="torch_memory"),
    ConfigSchema(path="profiler", schema=NsysConfig, group="profiler", option="nsys"),
)
