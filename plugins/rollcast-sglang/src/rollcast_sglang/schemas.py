"""Schema of the config's ``rollout`` section for ``rollout=sglang``; importable without torch and SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, ClassVar

from rollcast.contracts.config import Gt, Le, Positive, config
from rollcast_serving.engines.schema import AdapterRolloutConfig

__all__ = ["SglangRolloutConfig"]


@config
class SglangRolloutConfig(AdapterRolloutConfig):
    """Keys of the SGLang rollout, in addition to those of engines with adapters. Names are verl's, otherwise
    SGLang's.
    """

    device_arguments: ClassVar[Mapping[str, str]] = {
        "tp_size": "tensor_model_parallel_size",
        "pp_size": "pipeline_model_parallel_size",
        "dp_size": "data_parallel_size",
        "enable_dp_attention": "data_parallel_size",
        "ep_size": "expert_parallel_size",
        **dict.fromkeys(
            [
                *(
                    "nnodes",
                    "node_rank",
                    "dist_init_addr",
                    "base_gpu_id",
                    "gpu_id_step",
                    "attn_cp_size",
                    "attn_dp_size",
                ),
                *("moe_dp_size", "dcp_size", "dwdp_size", "max_ep_size"),
                *("elastic_ep_initial_size", "ep_join_mode"),
            ],
            "",
        ),
    }
    name: str = "sglang"
    """Registry name of the rollout."""
    attention_backend: str | None = None
    """SGLang's attention backend; null for its choice, or `torch_native` on a CPU."""
    mem_fraction_static: Annotated[float, Gt(0), Le(1)] = 0.5
    """Fraction of the GPU's memory for weights and KV cache."""
    max_total_tokens: Positive | None = None
    """Size of the KV cache in tokens; null for the memory that `mem_fraction_static` leaves, or 32768 on a CPU."""
    max_running_requests: Positive = 256
    """Maximum number of sequences computed at once."""
    lora_target_modules: list[str] = field(default_factory=lambda: ["all"])
    """Modules that adapters may change; `all` for all that SGLang supports."""
    enable_weights_cpu_backup: bool = True
    """Keep released weights in host memory; false drops them, so that an update must follow."""
    log_level: str = "warning"
    """Log level of SGLang's server."""
