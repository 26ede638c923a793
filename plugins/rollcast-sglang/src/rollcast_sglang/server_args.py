"""Building SGLang's server arguments from the ``rollout`` section."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from rollcast.contracts.rollout import RolloutSetup
from rollcast.errors import ConfigError
from rollcast_serving.casting import loaded_dtype
from rollcast_serving.engines.arguments import join_arguments, starts_without_weights
from rollcast_sglang.environment import find_sglang
from rollcast_sglang.schemas import SglangRolloutConfig

__all__ = ["CUSTOM_LOADER", "SAMPLING_BACKEND", "SPARE_POSITIONS", "build_server_args"]

CUSTOM_LOADER = "rollcast_sglang.server.loading.load"
#: Sampling backend whose sampler this package replaces; SGLang has it on every device.
SAMPLING_BACKEND = "pytorch"
#: KV cache of an engine on a CPU, where SGLang's own default is a share of all memory.
CPU_TOTAL_TOKENS = 32768
#: Positions of its context length that SGLang does not use for a request.
SPARE_POSITIONS = 8
#: Keys of the ``rollout`` section, by SGLang's names of the same arguments.
OWN_NAMES = {
    "context_length": "max_model_len",
    "disable_cuda_graph": "enforce_eager",
    "disable_radix_cache": "enable_prefix_caching",
    "enable_memory_saver": "free_cache_engine",
    "enable_return_routed_experts": "enable_rollout_routing_replay",
}
#: SGLang's loader that quantizes weights in the folder, and those of every update after them.
QUANTIZING_LOADER = "flash_rl"


def build_server_args(setup: RolloutSetup, max_positions: int | None, gpu: bool) -> dict[str, Any]:
    """Return SGLang's ``ServerArgs`` for a rollout, except the server's address.

    Args:
        setup: setup of the rollout.
        max_positions: maximum number of positions of a sequence; None for no limit.
        gpu: True if it runs on a GPU.

    Raises:
        ConfigError: ``engine_kwargs`` has a key that SGLang does not know or that rollcast sets, or ``quantization`` is
            set on a CPU, with a ``load_format``, or for a folder without weights.
        PluginLoadError: SGLang is not installed here.
    """
    own = _own_arguments(setup, max_positions, gpu)
    return join_arguments(own, setup.config, _known_arguments(find_sglang()), "SGLang's ServerArgs", OWN_NAMES)


def _known_arguments(sglang: Path) -> list[str]:
    """Return the names of SGLang's arguments, read from its source because importing takes seconds; empty if not
    found.
    """
    source = sglang / "srt" / "arg_groups" / "field_order.py"
    if not source.is_file():
        return []
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def _own_arguments(setup: RolloutSetup, max_positions: int | None, gpu: bool) -> dict[str, Any]:
    config: SglangRolloutConfig = setup.config
    without_weights = starts_without_weights(setup)
    if config.quantization is not None:
        _check_quantization(setup, gpu)
    values: dict[str, Any] = {
        "model_path": setup.model_path,
        "random_seed": setup.seed % 2**31,
        "trust_remote_code": setup.trust_remote_code,
        "dtype": loaded_dtype(config.dtype, not gpu) or config.dtype,
        "load_format": "dummy" if without_weights else config.load_format,
        "attention_backend": config.attention_backend or (None if gpu else "torch_native"),
        "mem_fraction_static": config.mem_fraction_static,
        "max_total_tokens": config.max_total_tokens or (None if gpu else CPU_TOTAL_TOKENS),
        "context_length": None if max_positions is None else max_positions + SPARE_POSITIONS,
        "max_running_requests": config.max_running_requests,
        "disable_radix_cache": not config.enable_prefix_caching,
        "disable_cuda_graph": config.enforce_eager or not gpu,
        "tp_size": config.tensor_model_parallel_size,
        "enable_lora": config.enable_lora,
        "enable_return_routed_experts": config.enable_rollout_routing_replay,
        "enable_memory_saver": config.free_cache_engine and gpu,
        "enable_weights_cpu_backup": config.enable_weights_cpu_backup and config.free_cache_engine and gpu,
        "log_level": config.log_level,
        "sampling_backend": SAMPLING_BACKEND,
        "custom_weight_loader": [CUSTOM_LOADER],
        "weight_version": "0",
        # Token ids in and out.
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "skip_server_warmup": True,
    }
    if config.quantization is not None:
        values |= {"quantization": config.quantization, "load_format": QUANTIZING_LOADER}
    if config.enable_lora:
        values |= {
            "max_lora_rank": config.max_lora_rank,
            "lora_target_modules": list(config.lora_target_modules),
            # The current adapter, and one that requests in flight still use; SGLang drops the oldest.
            "max_loras_per_batch": 2,
            "max_loaded_loras": 2,
        }
        if not gpu:
            values["lora_backend"] = "torch_native"
    node = setup.node
    if node.nodes > 1:
        address = f"{node.address}:{node.port}"
        values |= {"nnodes": node.nodes, "node_rank": node.rank, "dist_init_addr": address}
    if not gpu:
        # An idle scheduler would keep a core busy that the trainer needs.
        values |= {"device": "cpu", "sleep_on_idle": True}
    return values


def _check_quantization(setup: RolloutSetup, gpu: bool) -> None:
    config: SglangRolloutConfig = setup.config
    asked = f"rollout.quantization is {config.quantization}, but"
    if not gpu:
        raise ConfigError(f"{asked} SGLang has no such kernels for a CPU; set it to null")
    if config.load_format not in {"auto", QUANTIZING_LOADER}:
        raise ConfigError(
            f"{asked} rollout.load_format is {config.load_format}, and SGLang takes updates of quantized weights only "
            f"with {QUANTIZING_LOADER}; set rollout.load_format to auto"
        )
    if starts_without_weights(setup):
        raise ConfigError(
            f"{asked} SGLang has to load weights before it quantizes updates, and model.path={setup.model_path} has "
            "none; save the model there, or set it to null"
        )
