"""Schema of the engine's config section; importable without torch, so that it is checked before anything loads."""

from __future__ import annotations

from typing import Literal

from rollcast.contracts.config import Positive, config
from rollcast.errors import ConfigError

__all__ = ["MegatronConfig"]


@config
class MegatronConfig:
    """Keys of an ``engine`` section for ``engine=megatron``."""

    name: str = "megatron"
    """Registry name of the engine."""
    tensor_model_parallel_size: Positive = 1
    """Ranks over which the matrices of a layer are split."""
    pipeline_model_parallel_size: Positive = 1
    """Stages over which the layers are split, evenly."""
    context_parallel_size: Positive = 1
    """Only 1: attention here sees whole rows."""
    expert_model_parallel_size: Positive = 1
    """Only 1: no mixture of experts is supported yet."""
    sequence_parallel: bool = False
    """Split along the sequence what tensor parallelism leaves whole; exact, and less memory."""
    use_distributed_optimizer: bool = True
    """Spread the optimizer's state over the data-parallel ranks."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights; with `bfloat16` the gradients are summed, and the optimizer works, in float32."""
    param_offload: bool = False
    """Keep the weights in host memory outside `train_mode` and `eval_mode`."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in host memory between its steps."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """`full` recomputes whole layers in the backward pass, `selective` the attention of each; null keeps all
    activations."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Of `full`: `uniform` (units of layers, of which only inputs are kept) or `block` (the first layers of a
    stage)."""
    recompute_num_layers: Positive | None = None
    """Of `full`: layers in a unit, or the number of first layers."""
    head_chunk_size: Positive = 2048
    """Positions that go through the vocabulary head at a time. With more, logits are computed again in the backward
    pass, so that those of a micro-batch never exist together."""

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that share one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    def check(self, world_size: int, path: str = "actor.engine") -> None:
        """Refuse meshes that do not fit the group, and keys that do not fit each other.

        Args:
            world_size: Ranks of the group.
            path: The section, for messages.

        Raises:
            ConfigError: The key, its value and the valid ones.
        """
        self._check_sizes(world_size, path)
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError(
                f"{path}.sequence_parallel is true, but {path}.tensor_model_parallel_size is 1: it splits what tensor "
                "parallelism leaves whole; set it to false, or raise tensor_model_parallel_size"
            )
        self._check_recompute(path)

    def _check_sizes(self, world_size: int, path: str) -> None:
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        for key, why in (
            ("context_parallel_size", "attention here sees whole rows; sequence_parallel saves activations instead"),
            ("expert_model_parallel_size", "no mixture of experts has a map in rollcast.megatron_models"),
        ):
            if getattr(self, key) != 1:
                raise ConfigError(f"{path}.{key} is {getattr(self, key)}, and only 1 is supported: {why}")
        if world_size % (tensor * pipeline):
            fitting = [
                f"{first}x{second}"
                for first in range(1, world_size + 1)
                for second in range(1, world_size // first + 1)
                if world_size % (first * second) == 0
            ]
            raise ConfigError(
                f"{path}.tensor_model_parallel_size={tensor} and {path}.pipeline_model_parallel_size={pipeline} need a "
                f"multiple of {tensor * pipeline} ranks, but the group has {world_size}; "
                f"tensor x pipeline sizes that would fit: {', '.join(fitting)}"
            )

    def _check_recompute(self, path: str) -> None:
        granularity, method, layers = self.recompute_granularity, self.recompute_method, self.recompute_num_layers
        if granularity == "full":
            if method is None:
                raise ConfigError(
                    f"{path}.recompute_method is null; {path}.recompute_granularity=full needs uniform or block"
                )
            if layers is None:
                raise ConfigError(
                    f"{path}.recompute_num_layers is null; {path}.recompute_granularity=full needs at least 1"
                )
        elif method is not None or layers is not None:
            raise ConfigError(
                f"{path}.recompute_method={method} and {path}.recompute_num_layers={layers} belong to "
                f"recompute_granularity=full, which is {granularity}"
            )
