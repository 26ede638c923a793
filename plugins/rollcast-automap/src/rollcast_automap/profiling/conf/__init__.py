"""Configuration files of the profilers."""

from rollcast.contracts.config import ConfigSchema
from rollcast_automap.profiling.contract import ProfilerConfig, profilers
from rollcast_automap.profiling.schemas import NsysConfig, TorchMemoryConfig, TorchProfilerConfig

__all__ = ["SCHEMAS", "profilers"]  # exported because profiler names in a config are checked against the registry

SCHEMAS = (
    ConfigSchema(path="profiler", schema=ProfilerConfig, group="profiler"),
    ConfigSchema(path="profiler", schema=TorchProfilerConfig, group="profiler", option="torch"),
    ConfigSchema(path="profiler", schema=TorchMemoryConfig, group="profiler", option="torch_memory"),
    ConfigSchema(path="profiler", schema=NsysConfig, group="profiler", option="nsys"),
)
