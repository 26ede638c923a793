"""The profilers ``torch``, ``torch_memory`` and ``nsys``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from rollcast.errors import CapabilityError, ConfigError
from rollcast_automap.profiling.contract import BaseProfiler, ProfilerConfig
from rollcast_automap.profiling.schemas import NsysConfig, TorchMemoryConfig, TorchProfilerConfig

__all__ = ["NsysProfiler", "TorchMemoryProfiler", "TorchProfiler"]

#: Options of nsys that users cannot set, because the profiler sets them to control captures.
_RESERVED = ("c", "capture-range", "capture-range-end", "o", "output", "kill", "f", "force-overwrite")


class TorchProfiler(BaseProfiler):
    """Traces in Chrome's format, which Perfetto and ``chrome://tracing`` show."""

    config_schema: ClassVar[type[ProfilerConfig]] = TorchProfilerConfig

    def __init__(self, config: TorchProfilerConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self._running: tuple[str, torch.profiler.profile] | None = None

    @classmethod
    def check_config(cls, config: TorchProfilerConfig) -> None:
        if not {"cpu", "cuda"} & set(config.contents):
            raise ConfigError(f"profiler.contents is {config.contents}; it needs cpu or cuda")

    def check_process(self) -> None:
        if "cpu" not in self.config.contents and not torch.cuda.is_available():
            raise CapabilityError("profiler.contents has no cpu, and the worker has no CUDA device; add cpu")

    def start(self, name: str) -> None:
        kinds, contents = torch.profiler.ProfilerActivity, self.config.contents
        activities = [kinds.CPU] if "cpu" in contents else []
        if "cuda" in contents and torch.cuda.is_available():
            activities.append(kinds.CUDA)
        profiler = torch.profiler.profile(
            activities=activities,
            profile_memory="memory" in contents,
            record_shapes="shapes" in contents,
            with_stack="stack" in contents,
        )
        profiler.start()
        self._running = name, profiler

    def stop(self) -> list[Path]:
        if self._running is None:
            return []
        (name, profiler), self._running = self._running, None
        profiler.stop()
        # TensorBoard's plugin and Holistic Trace Analysis look for this ending.
        file = self.folder / f"{name}.pt.trace.json.gz"
        profiler.export_chrome_trace(str(file))
        return [file]


class TorchMemoryProfiler(BaseProfiler):
    """Snapshots of the CUDA allocator with its history, for https://pytorch.org/memory_viz."""

    config_schema: ClassVar[type[ProfilerConfig]] = TorchMemoryConfig

    def __init__(self, config: TorchMemoryConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self._name: str | None = None

    def check_process(self) -> None:
        if not torch.cuda.is_available():
            raise CapabilityError(
                "profiler.tool=torch_memory records the CUDA allocator, and the worker has no CUDA device; "
                "on a CPU profiler=torch 'profiler.contents=[cpu,memory]' shows allocations"
            )

    def start(self, name: str) -> None:
        memory: Any = torch.cuda.memory
        memory._record_memory_history(
            max_entries=self.config.trace_alloc_max_entries, context=self.config.context, stacks=self.config.stacks
        )
        self._name = name

    def stop(self) -> list[Path]:
        if self._name is None:
            return []
        name, self._name = self._name, None
        memory: Any = torch.cuda.memory
        file = self.folder / f"{name}.snapshot.pickle"
        try:
            memory._dump_snapshot(str(file))
        finally:
            memory._record_memory_history(enabled=None)
        return [file]


class NsysProfiler(BaseProfiler):
    """NVIDIA Nsight Systems: Ray starts the workers under ``nsys profile``, which records from start to stop."""

    config_schema: ClassVar[type[ProfilerConfig]] = NsysConfig

    def __init__(self, config: NsysConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self._runs = False

    @classmethod
    def check_config(cls, config: NsysConfig) -> None:
        clashes = sorted(set(config.options) & set(_RESERVED))
        if clashes:
            raise ConfigError(f"profiler.options names {', '.join(clashes)}, which the profiler sets itself")

    @classmethod
    def runtime_env(cls, config: NsysConfig, folder: Path, captures: int) -> dict[str, Any]:
        if " " in str(folder):
            raise ConfigError(f"profiler.save_path: nsys is started by a command line, and {str(folder)!r} has a space")
        options = {
            "trace": config.trace,
            "cuda-memory-usage": str(config.cuda_memory_usage).lower(),
            "cuda-graph-trace": config.cuda_graph_trace,
            **config.options,
            "capture-range": "cudaProfilerApi",
            "capture-range-end": f"repeat-shutdown:{captures}",
            # Do not kill the worker when the last capture ends.
            "kill": "none",
            "o": str(folder / "worker_%p"),
        }
        return {"nsight": options}

    def check_process(self) -> None:
        if not torch.cuda.is_available():
            raise CapabilityError(
                "profiler.tool=nsys needs CUDA, and the worker has no CUDA device; use profiler=torch"
            )

    def start(self, name: str) -> None:
        cuda: Any = torch.cuda
        cuda.synchronize()
        cuda.profiler.start()
        cuda.nvtx.range_push(name)
        self._runs = True

    def stop(self) -> list[Path]:
        if not self._runs:
            return []
        self._runs = False
        cuda: Any = torch.cuda
        cuda.synchronize()
        cuda.nvtx.range_pop()
        cuda.profiler.stop()
        # nsys writes worker_<process id>.<capture>.nsys-rep later, so the file may not exist yet.
        return []
