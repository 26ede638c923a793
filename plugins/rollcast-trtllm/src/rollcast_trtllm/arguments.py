"""Building the arguments and the environment of TensorRT-LLM's server from the ``rollout`` section."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from rollcast.contracts.rollout import RolloutSetup
from rollcast.errors import PluginLoadError
from rollcast_serving.casting import loaded_dtype
from rollcast_serving.engines.arguments import join_arguments, starts_without_weights
from rollcast_trtllm.schemas import TrtllmRolloutConfig

__all__ = ["STEP", "build_arguments", "require_trtllm", "server_environment"]

#: Key among the weights of ``/update_weights`` that holds a step of an update.
STEP = "rollcast_step"
#: Keys of the ``rollout`` section, by TensorRT-LLM's names of the same arguments.
_OWN_NAMES = {
    "max_seq_len": "max_model_len",
    "max_batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
    "kv_cache_config": "gpu_memory_utilization",
    "cuda_graph_config": "enforce_eager",
    "enable_sleep": "free_cache_engine",
}


def build_arguments(setup: RolloutSetup, max_positions: int | None) -> dict[str, Any]:
    """Return the arguments of TensorRT-LLM's ``AsyncLLM``, which checks their names itself.

    Raises:
        ConfigError: ``rollout.engine_kwargs`` sets an argument that rollcast sets.
    """
    config: TrtllmRolloutConfig = setup.config
    own: dict[str, Any] = {
        "model": setup.model_path,
        "trust_remote_code": setup.trust_remote_code,
        "backend": "pytorch",
        "dtype": loaded_dtype(config.dtype, on_cpu=False) or config.dtype,
        "load_format": "dummy" if starts_without_weights(setup) else config.load_format,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "max_seq_len": max_positions,
        "max_batch_size": config.max_num_seqs,
        "max_num_tokens": config.max_num_batched_tokens,
        "kv_cache_config": {
            "enable_block_reuse": config.enable_prefix_caching,
            "free_gpu_memory_fraction": config.gpu_memory_utilization,
        },
        "enable_sleep": config.free_cache_engine,
        "orchestrator_type": "ray",
        "ray_worker_extension_cls": "rollcast_trtllm.server.worker.WeightsExtension",
        "enable_iter_perf_stats": True,
    }
    if config.enforce_eager:
        own["cuda_graph_config"] = None
    return join_arguments(own, config, (), "TensorRT-LLM's TorchLlmArgs", _OWN_NAMES)


def server_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of the server.

    Args:
        base: inherited variables; they override defaults that users may change.
    """
    wanted = {"TOKENIZERS_PARALLELISM": "false", "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1"}
    # The engine's workers are actors of a separate Ray: the trainer's would have to reserve their devices twice.
    return {**wanted, **base, "RAY_ADDRESS": "local"}


def require_trtllm() -> None:
    """Check that TensorRT-LLM is installed, without importing it, which takes long and needs a driver.

    Raises:
        PluginLoadError: it is not installed.
    """
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise PluginLoadError(
            "rollout=trtllm needs TensorRT-LLM in the replica's environment, and it is not installed there. Install it "
            'with pip install "rollcast-trtllm[cuda]", or name the interpreter that has it in rollout.replica.python'
        )
