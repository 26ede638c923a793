"""Schema of the config's ``rollout`` section for ``rollout=trtllm``; importable without torch and TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from rollcast.contracts.config import Gt, Le, Positive, config
from rollcast_serving.engines.schema import EngineRolloutConfig

__all__ = ["TrtllmRolloutConfig"]


@config
class TrtllmRolloutConfig(EngineRolloutConfig):
    """Keys of the TensorRT-LLM rollout, in addition to those of every engine. Names are verl's where verl has one."""

    name: str = "trtllm"
    """Registry name of the rollout."""
    device_arguments: ClassVar[Mapping[str, str]] = {
        "tensor_parallel_size": "tensor_model_parallel_size",
        "pipeline_parallel_size": "pipeline_model_parallel_size",
        "moe_expert_parallel_size": "expert_parallel_size",
        "enable_attention_dp": "data_parallel_size",
        **dict.fromkeys(
            ["context_parallel_size", "gpus_per_node", "moe_cluster_parallel_size", "orchestrator_type"], ""
        ),
    }
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.5
    """Fraction of the GPU's free memory for the KV cache."""
    max_num_seqs: Positive = 256
    """Maximum number of sequences computed at once."""
    max_num_batched_tokens: Positive = 8192
    """Maximum number of tokens per step."""
