"""Builds vLLM's configuration as on an H100, on a machine without a GPU; run as a process of its own.

vLLM decides much only when it builds its configuration, by the platform. Its package for CPUs has the code of the CUDA
platform, which needs NVIDIA's library for questions that are answered here instead.

Reads a list of dicts of rollout keys from stdin, and writes a list with what vLLM made of each.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from vllm import platforms
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms.interface import DeviceCapability
from vllm.usage.usage_lib import UsageContext

from rollcast.contracts.rollout import EngineNode, RolloutSetup
from rollcast_testing.tiny import tiny_model_folder
from rollcast_vllm import engine_args
from rollcast_vllm.schemas import VllmRolloutConfig

_ARCHITECTURE = "Qwen2ForCausalLM"


def become_cuda() -> None:
    """Make vLLM's platform an H100, in place, because its modules have imported the object."""
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
    from vllm.platforms.cuda import NvmlCudaPlatform

    class H100(NvmlCudaPlatform):  # type: ignore[misc, valid-type]
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100 80GB HBM3")
        get_device_uuid = classmethod(lambda cls, device_id=0: "GPU-0")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 80 << 30)
        is_fully_connected = classmethod(lambda cls, device_ids: True)
        device_count = classmethod(lambda cls: 8)
        log_warnings = classmethod(lambda cls: None)

        @classmethod
        def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
            asked = divmod(capability, 10) if isinstance(capability, int) else tuple(capability)
            return asked <= (9, 0)

        def is_cumem_allocator_available(self) -> bool:
            return True

    # Import what needs kernels on a CUDA platform before; what the registry says of the model is kept.
    for module in ("vllm.model_executor.model_loader", "vllm.model_executor.models.qwen2"):
        importlib.import_module(module)
    ModelRegistry._try_inspect_model_cls(_ARCHITECTURE)
    platforms.current_platform.__class__ = H100
    for name in ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8"):
        setattr(torch.ops._C, name, lambda capability: True)
    engine_args.has_gpu = lambda: True


def build(keys: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what vLLM makes of rollout keys; the key ``node`` is the engine's place among nodes."""
    node = EngineNode(*keys.pop("node", ()))
    setup = RolloutSetup(VllmRolloutConfig(**keys), str(folder), seed=1, pad_token_id=0, eos_token_id=2)
    built = engine_args.build_engine_args(dataclasses.replace(setup, node=node), takes_images=False)
    config = built.create_engine_config(UsageContext.LLM_CLASS)
    parallel = config.parallel_config
    return {
        "worker": parallel.worker_cls,
        "world_size": parallel.world_size,
        "nodes": parallel.nnodes,
        "sleeps": config.model_config.enable_sleep_mode,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "share": config.cache_config.gpu_memory_utilization,
        "cache_bytes": config.cache_config.kv_cache_memory_bytes,
        "max_lora_rank": None if config.lora_config is None else config.lora_config.max_lora_rank,
        "extension": parallel.worker_extension_cls,
    }


def main() -> None:
    """Answer the dicts of stdin."""
    become_cuda()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model_folder(Path(folder) / "model")
        answers = [build(keys, model) for keys in json.load(sys.stdin)]
    sys.stdout.write(f"\n{json.dumps(answers)}\n")


if __name__ == "__main__":
    main()
