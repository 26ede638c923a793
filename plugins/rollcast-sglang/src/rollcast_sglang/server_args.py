"""From the ``rollout`` section to SGLang's server arguments."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path
from typing import Any

from rollcast.contracts.rollout import RolloutSetup
from rollcast.errors import ConfigError
from rollcast_serving.casting import loaded_dtype
from rollcast_sglang.environment import find_sglang
from rollcast_sglang.schemas import SglangRolloutConfig

__all__ = ["CUSTOM_LOADER", "SAMPLING_BACKEND", "SPARE_POSITIONS", "build_server_args", "starts_without_weights"]

CUSTOM_LOADER = "rollcast_sglang.server.loading.load"
#: The one whose sampler is replaced by this package's; SGLang has it on every device.
SAMPLING_BACKEND = "pytorch"
#: KV cache of an engine on a CPU, where SGLang's own default is a share of all the memory there is.
CPU_TOTAL_TOKENS = 32768
#: Positions that SGLang does not give to a request of its context length.
SPARE_POSITIONS = 8
#: SGLang's names for keys that this package has under verl's.
OWN_NAMES = {
    "context_length": "max_model_len",
    "disable_cuda_graph": "enforce_eager",
    "disable_radix_cache": "enable_prefix_caching",
    "tp_size": "tensor_model_parallel_size",
    "enable_memory_saver": "free_cache_engine",
}


def build_server_args(setup: RolloutSetup, max_positions: int | None, gpu: bool) -> dict[str, Any]:
    """SGLang's ``ServerArgs`` for a rollout, less where it listens.

    Args:
        setup: of the rollout.
        max_positions: most positions of a sequence; None if nothing limits them.
        gpu: whether it runs on a GPU.

    Raises:
        ConfigError: ``engine_kwargs`` has a key that SGLang has not, or that is not the user's to set.
        PluginLoadError: SGLang is not installed here.
    """
    values = _own_arguments(setup, max_positions, gpu)
    extra: dict[str, Any] = dict(setup.config.engine_kwargs)
    known = _known_arguments(find_sglang())
    for key in extra:
        if key in values:
            raise ConfigError(_taken(key, setup.config))
        if known and key not in known:
            near = difflib.get_close_matches(key, known, 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(f"rollout.engine_kwargs.{key} is no argument of SGLang's ServerArgs{hint}")
    return {**values, **extra}


def _taken(key: str, config: SglangRolloutConfig) -> str:
    name = OWN_NAMES.get(key, key)
    if hasattr(config, name):
        return f"rollout.engine_kwargs.{key}: set rollout.{name} instead"
    return f"rollout.engine_kwargs.{key} cannot be set: what rollcast does depends on its value"


def _known_arguments(sglang: Path) -> list[str]:
    """Names of SGLang's arguments, read from its source, because importing it takes seconds; empty if moved."""
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
    values: dict[str, Any] = {
        "model_path": setup.model_path,
        "random_seed": setup.seed % 2**31,
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
        "enable_memory_saver": config.free_cache_engine and gpu,
        "enable_weights_cpu_backup": config.enable_weights_cpu_backup and config.free_cache_engine and gpu,
        "log_level": config.log_level,
        "sampling_backend": SAMPLING_BACKEND,
        "custom_weight_loader": [CUSTOM_LOADER],
        "weight_version": "0",
        # Tokens in, tokens out.
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "skip_server_warmup": True,
    }
    if config.enable_lora:
        values |= {
            "max_lora_rank": config.max_lora_rank,
            "lora_target_modules": list(config.lora_target_modules),
            # The present adapter, and one that requests under way still use; SGLang drops the oldest.
            "max_loras_per_batch": 2,
            "max_loaded_loras": 2,
        }
        if not gpu:
            values["lora_backend"] = "torch_native"
    if not gpu:
        # An idle scheduler would keep a core busy that the trainer needs.
        values |= {"device": "cpu", "sleep_on_idle": True}
    return values


def starts_without_weights(setup: RolloutSetup) -> bool:
    """Whether the engine starts with weights that mean nothing, and has to wait for an update."""
    load_format = setup.config.load_format
    return load_format == "dummy" or (load_format == "auto" and not _has_weights(Path(setup.model_path)))


def _has_weights(folder: Path) -> bool:
    """Whether a folder holds weights; what is no folder is taken for a model hub's name."""
    return not folder.is_dir() or any(path.suffix in {".safetensors", ".bin", ".pt"} for path in folder.iterdir())
