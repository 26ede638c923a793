"""Building vLLM's engine arguments from the ``rollout`` section."""

from __future__ import annotations

import dataclasses
from typing import Any

from rollcast.contracts.rollout import RolloutSetup
from rollcast.errors import ConfigError
from rollcast_serving.casting import loaded_dtype
from rollcast_serving.engines.arguments import has_gpu, join_arguments, starts_without_weights
from rollcast_serving.model_weights import read_model_config
from rollcast_serving.requests import ModelLimits
from rollcast_vllm.schemas import VllmRolloutConfig

__all__ = ["WORKER_EXTENSION", "build_engine_args"]

WORKER_EXTENSION = "rollcast_vllm.worker.WeightsExtension"
#: KV cache of an engine on a CPU, where vLLM's own default is a share of all memory.
CPU_KV_CACHE_BYTES = 256 << 20
#: Tokens of the blocks that vLLM keeps beside those of a sequence.
_CPU_BLOCKS = 1024
#: rollcast's keys for arguments that ``engine_kwargs`` must not set.
OWN_KEYS = {
    "enable_sleep_mode": "free_cache_engine",
    "enable_return_routed_experts": "enable_rollout_routing_replay",
}

#: Default arguments that ``engine_kwargs`` may override.
DEFAULTS = {"use_tqdm_on_load": False}
#: Arguments for a model that takes images.
IMAGE_ARGUMENTS = {
    # Pixels arrive normalized, as the trainer's model gets them.
    "mm_device_do_normalize": False,
    # This cache has a half in two processes, which fall out of step when requests overtake one another. The outputs of
    # the vision tower are kept elsewhere, by the content of the image.
    "mm_processor_cache_gb": 0,
}


def build_engine_args(setup: RolloutSetup, takes_images: bool = False) -> Any:
    """Return vLLM's ``AsyncEngineArgs`` for a rollout.

    Args:
        setup: setup of the rollout.
        takes_images: True for a vision-language model.

    Raises:
        ConfigError: ``engine_kwargs`` has a key that vLLM does not know or that rollcast sets, vLLM rejects a value, or
            ``quantization`` or ``enable_rollout_routing_replay`` is set on a CPU.
    """
    from vllm import AsyncEngineArgs

    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    own = {**_own_arguments(setup), **(IMAGE_ARGUMENTS if takes_images else {})}
    values = join_arguments(own, setup.config, known, "vLLM's AsyncEngineArgs", OWN_KEYS)
    try:
        return AsyncEngineArgs(**{**DEFAULTS, **values})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vLLM rejects arguments of the rollout section: {error}") from error


def _own_arguments(setup: RolloutSetup) -> dict[str, Any]:
    config: VllmRolloutConfig = setup.config
    gpu = has_gpu()
    if config.quantization is not None and not gpu:
        raise ConfigError(
            f"rollout.quantization is {config.quantization}, but vLLM has no such kernels for a CPU; set it to null"
        )
    if config.expert_parallel_size > 1 and not gpu:
        raise ConfigError(
            f"rollout.expert_parallel_size is {config.expert_parallel_size}, but vLLM has no such kernels for a CPU; "
            "set it to 1"
        )
    if config.enable_rollout_routing_replay and config.replica_size > config.tensor_model_parallel_size:
        raise ConfigError(
            "rollout.enable_rollout_routing_replay is true, but vLLM records the experts of one pipeline stage and one "
            "data-parallel rank; set it to false, or rollout.pipeline_model_parallel_size and data_parallel_size to 1"
        )
    if config.enable_rollout_routing_replay and not gpu:
        raise ConfigError(
            "rollout.enable_rollout_routing_replay is true, but vLLM records experts on a GPU only; set it to "
            "false, or use rollout=sglang or rollout=hf"
        )
    kv_cache = config.kv_cache_memory_bytes
    values = {
        "model": setup.model_path,
        "seed": setup.seed,
        "trust_remote_code": setup.trust_remote_code,
        "dtype": loaded_dtype(config.dtype, not gpu) or config.dtype,
        "load_format": "dummy" if starts_without_weights(setup) else config.load_format,
        "enforce_eager": config.enforce_eager or not gpu,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": _cpu_kv_cache_bytes(setup) if kv_cache is None and not gpu else kv_cache,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "pipeline_parallel_size": config.pipeline_model_parallel_size,
        "data_parallel_size": config.data_parallel_size,
        "enable_expert_parallel": config.expert_parallel_size > 1,
        "enable_lora": config.enable_lora,
        "enable_return_routed_experts": config.enable_rollout_routing_replay,
        "max_loras": 1,
        "max_lora_rank": config.max_lora_rank,
        "enable_sleep_mode": config.free_cache_engine and gpu,
        "worker_extension_cls": WORKER_EXTENSION,
        # Log-probs after temperature, top-k and top-p; vLLM's default is before them.
        "logprobs_mode": "processed_logprobs",
        # Token ids in and out; only the request determines what ends a sequence.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    node = setup.node
    if node.nodes > 1:
        values |= {
            "distributed_executor_backend": "mp",
            "nnodes": node.nodes,
            "node_rank": node.rank,
            "master_addr": node.address,
            "master_port": node.port,
        }
        if config.data_parallel_size > 1:
            # Each rank fits on a node, so nothing else meets at this port.
            values["data_parallel_rpc_port"] = node.port
    if config.quantization is not None:
        values["quantization"] = config.quantization
    if config.use_request_seeds and not gpu:
        # With chunked prefill, an incomplete prompt samples a token that is discarded, and vLLM 0.32 crashes when it
        # has to rewind a CPU's random numbers for it.
        values["enable_chunked_prefill"] = False
    return values


def _cpu_kv_cache_bytes(setup: RolloutSetup) -> int:
    """Return the size of the KV cache on a CPU: one sequence as long as the model or ``max_model_len`` allows fits.

    vLLM does not start with less. A model whose config does not state its sizes gets the least size.
    """
    config = read_model_config(setup.model_path, setup.trust_remote_code)
    text = config.get_text_config()
    layers, heads = (getattr(text, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    length = setup.config.max_model_len or ModelLimits.of(config).max_positions
    if layers is None or heads is None or length is None:
        return CPU_KV_CACHE_BYTES
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    a_token: int = 2 * 4 * layers * (getattr(text, "num_key_value_heads", None) or heads) * width
    return max(CPU_KV_CACHE_BYTES, a_token * (length + _CPU_BLOCKS))
