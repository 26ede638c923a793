"""The engine's own config keys; no torch here, so that a config is checked before anything loads."""

from __future__ import annotations

from dataclasses import dataclass

from rollcast.errors import ConfigError

__all__ = ["MegatronConfig"]

DTYPES = ("float32", "bfloat16")
GRANULARITIES = ("full", "selective")
METHODS = ("uniform", "block")


@dataclass
class MegatronConfig:
    """Keys of ``actor.engine`` for ``engine=megatron``.

    Attributes:
        name: the engine's name in the registry.
        tensor_model_parallel_size: ranks over which the matrices of a layer are split.
        pipeline_model_parallel_size: stages over which the layers are split, evenly.
        context_parallel_size, expert_model_parallel_size: only 1; see :meth:`check`.
        sequence_parallel: split along the sequence what tensor parallelism leaves whole; exact, and less memory.
        use_distributed_optimizer: spread the optimizer's state over the data-parallel ranks.
        dtype: of the weights, ``float32`` or ``bfloat16``; with the latter gradients are summed, and the
            optimizer works, in float32.
        param_offload: keep the weights in host memory outside ``train_mode`` and ``eval_mode``.
        optimizer_offload: keep the optimizer's state in host memory outside of its steps.
        recompute_granularity: ``full`` recomputes whole layers in the backward pass, ``selective`` the
            attention of each; None keeps all activations.
        recompute_method: of ``full``: ``uniform`` (units of layers, of which only inputs are kept) or
            ``block`` (the first layers of a stage).
        recompute_num_layers: of ``full``: layers in a unit, or the number of first layers.
        head_chunk_size: positions that go through the vocabulary head at a time. Beyond it logits are
            computed once more in the backward pass, so that those of a micro-batch never exist together.
    """

    name: str = "megatron"
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = True
    dtype: str = "float32"
    param_offload: bool = False
    optimizer_offload: bool = False
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    head_chunk_size: int = 2048

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    def check(self, world_size: int) -> None:
        """Refuse values that the engine does not know, and meshes that do not fit the group.

        Raises:
            ConfigError: names the key, its value and the valid ones.
        """
        self._check_sizes(world_size)
        if self.dtype not in DTYPES:
            raise ConfigError(f"engine key dtype is {self.dtype!r}; valid: {', '.join(DTYPES)}")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError(
                "engine key sequence_parallel is true, but tensor_model_parallel_size is 1: it splits what tensor "
                "parallelism leaves whole; set it to false, or raise tensor_model_parallel_size"
            )
        if self.head_chunk_size < 1:
            raise ConfigError(f"engine key head_chunk_size is {self.head_chunk_size}, it must be at least 1")
        self._check_recompute()

    def _check_sizes(self, world_size: int) -> None:
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        for key, size in (("tensor_model_parallel_size", tensor), ("pipeline_model_parallel_size", pipeline)):
            if size < 1:
                raise ConfigError(f"engine key {key} is {size}, it must be at least 1")
        for key, why in (
            ("context_parallel_size", "attention here sees whole rows; sequence_parallel saves activations instead"),
            ("expert_model_parallel_size", "no mixture of experts has a map in rollcast.megatron_models"),
        ):
            if getattr(self, key) != 1:
                raise ConfigError(f"engine key {key} is {getattr(self, key)}, and only 1 is supported: {why}")
        if world_size % (tensor * pipeline):
            fitting = [
                f"{first}x{second}"
                for first in range(1, world_size + 1)
                for second in range(1, world_size // first + 1)
                if world_size % (first * second) == 0
            ]
            raise ConfigError(
                f"engine keys tensor_model_parallel_size={tensor} and pipeline_model_parallel_size={pipeline} need a "
                f"multiple of {tensor * pipeline} ranks, but the group has {world_size}; "
                f"tensor x pipeline sizes that would fit: {', '.join(fitting)}"
            )

    def _check_recompute(self) -> None:
        granularity, method, layers = self.recompute_granularity, self.recompute_method, self.recompute_num_layers
        if granularity is not None and granularity not in GRANULARITIES:
            raise ConfigError(f"engine key recompute_granularity is {granularity!r}; valid: null, full, selective")
        if granularity == "full":
            if method not in METHODS:
                raise ConfigError(
                    f"engine key recompute_method is {method!r}; recompute_granularity=full needs uniform or block"
                )
            if layers is None or layers < 1:
                raise ConfigError(
                    f"engine key recompute_num_layers is {layers}; recompute_granularity=full needs at least 1"
                )
        elif method is not None or layers is not None:
            raise ConfigError(
                f"engine keys recompute_method={method} and recompute_num_layers={layers} belong to "
                f"recompute_granularity=full, which is {granularity}"
            )
