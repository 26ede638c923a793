"""From the ``rollout`` section to vLLM's engine arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

from rollcast.contracts.rollout import RolloutSetup
from rollcast.errors import ConfigError
from rollcast_serving.casting import loaded_dtype
from rollcast_serving.engines.arguments import has_gpu, join_arguments, starts_without_weights
from rollcast_vllm.schemas import VllmRolloutConfig

__all__ = ["WORKER_EXTENSION", "build_engine_args"]

WORKER_EXTENSION = "rollcast_vllm.worker.WeightsExtension"
#: KV cache of an engine on a CPU, where vLLM's own default is a share of all the memory there is.
CPU_KV_CACHE_BYTES = 256 << 20
#: Arguments that are set from a key of their own, or that the contract decides.
OWN_KEYS = {"tensor_parallel_size": "tensor_model_parallel_size", "enable_sleep_mode": "free_cache_engine"}

#: Arguments that ``engine_kwargs`` may change.
DEFAULTS = {"use_tqdm_on_load": False}


def build_engine_args(setup: RolloutSetup) -> Any:
    """Return vLLM's ``AsyncEngineArgs`` for a rollout.

    Raises:
        ConfigError: ``engine_kwargs`` has a key that vLLM has not, or that is not the user's to set; or vLLM
            takes no such value.
    """
    from vllm import AsyncEngineArgs

    known = [each.name for each in dataclasses.fields(AsyncEngineArgs)]
    values = join_arguments(_own_arguments(setup), setup.config, known, "vLLM's AsyncEngineArgs", OWN_KEYS)
    try:
        return AsyncEngineArgs(**{**DEFAULTS, **values})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vLLM does not take the arguments of the rollout section: {error}") from error


def _own_arguments(setup: RolloutSetup) -> dict[str, Any]:
    config: VllmRolloutConfig = setup.config
    gpu = has_gpu()
    kv_cache = config.kv_cache_memory_bytes
    values = {
        "model": setup.model_path,
        "seed": setup.seed,
        "dtype": loaded_dtype(config.dtype, not gpu) or config.dtype,
        "load_format": "dummy" if starts_without_weights(setup) else config.load_format,
        "enforce_eager": config.enforce_eager or not gpu,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES if kv_cache is None and not gpu else kv_cache,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "enable_lora": config.enable_lora,
        "max_loras": 1,
        "max_lora_rank": config.max_lora_rank,
        "enable_sleep_mode": config.free_cache_engine and gpu,
        "worker_extension_cls": WORKER_EXTENSION,
        # Log-probs after temperature, top-k and top-p; vLLM's default is before them.
        "logprobs_mode": "processed_logprobs",
        # Tokens in, tokens out; what ends a sequence is said by each request alone.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if config.use_request_seeds and not gpu:
        # A part of a prompt samples a token to be thrown away, and vLLM 0.32 dies where it has to rewind the
        # random numbers of a CPU for it.
        values["enable_chunked_prefill"] = False
    return values
