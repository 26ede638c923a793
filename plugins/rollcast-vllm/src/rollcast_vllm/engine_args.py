"""From the ``rollout`` section to vLLM's engine arguments."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any

from rollcast.contracts.rollout import RolloutSetup
from rollcast.errors import ConfigError
from rollcast_serving.casting import loaded_dtype
from rollcast_vllm.environment import has_gpu
from rollcast_vllm.schemas import VllmRolloutConfig

__all__ = ["WORKER_EXTENSION", "build_engine_args", "check_config", "has_weights", "starts_without_weights"]

WORKER_EXTENSION = "rollcast_vllm.worker.WeightsExtension"
#: KV cache of an engine on a CPU, where vLLM's own default is a share of all the memory there is.
CPU_KV_CACHE_BYTES = 256 << 20
#: Arguments that are set from a key of their own, or that the contract decides.
OWN_KEYS = {"tensor_parallel_size": "tensor_model_parallel_size", "enable_sleep_mode": "free_cache_engine"}

#: Arguments that ``engine_kwargs`` may change.
DEFAULTS = {"use_tqdm_on_load": False}


def check_config(config: VllmRolloutConfig) -> None:
    """Refuse values that need no vLLM to be seen as wrong.

    Raises:
        ConfigError: names the key.
    """
    if config.sleep_level not in {1, 2}:
        raise ConfigError(f"rollout.sleep_level is {config.sleep_level}, which is neither 1 nor 2")
    for key in ("tensor_model_parallel_size", "max_num_seqs", "max_lora_rank"):
        if getattr(config, key) < 1:
            raise ConfigError(f"rollout.{key} is {getattr(config, key)}, which is not at least 1")
    if config.health_timeout_s <= 0:
        raise ConfigError(f"rollout.health_timeout_s is {config.health_timeout_s}, which is not above 0")


def build_engine_args(setup: RolloutSetup) -> Any:
    """VLLM's ``AsyncEngineArgs`` for a rollout.

    Raises:
        ConfigError: ``engine_kwargs`` has a key that vLLM has not, or that is not the user's to set; or vLLM
            takes no such value.
    """
    from vllm import AsyncEngineArgs

    values = _own_arguments(setup)
    extra: dict[str, Any] = dict(setup.config.engine_kwargs)
    known = [each.name for each in dataclasses.fields(AsyncEngineArgs)]
    for key in extra:
        if key in values:
            raise ConfigError(_taken(key, setup.config))
        if key not in known:
            near = difflib.get_close_matches(key, known, 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(f"rollout.engine_kwargs.{key} is no argument of vLLM's AsyncEngineArgs{hint}")
    try:
        return AsyncEngineArgs(**{**DEFAULTS, **extra, **values})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vLLM does not take the arguments of the rollout section: {error}") from error


def _taken(key: str, config: VllmRolloutConfig) -> str:
    name = OWN_KEYS.get(key, key)
    if hasattr(config, name):
        return f"rollout.engine_kwargs.{key}: set rollout.{name} instead"
    return f"rollout.engine_kwargs.{key} cannot be set: what rollcast does depends on its value"


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


def starts_without_weights(setup: RolloutSetup) -> bool:
    """Whether the engine starts with weights that mean nothing, and has to wait for an update."""
    load_format = setup.config.load_format
    return load_format == "dummy" or (load_format == "auto" and not has_weights(setup.model_path))


def has_weights(model_path: str) -> bool:
    """Whether a folder holds weights; what is no folder is taken for a model hub's name."""
    folder = Path(model_path)
    return not folder.is_dir() or any(path.suffix in {".safetensors", ".bin", ".pt"} for path in folder.iterdir())
