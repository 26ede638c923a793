"""Schema of the engine's config section; importable without torch, so that it is checked before anything loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from rollcast.contracts.config import Ge, OnAccelerator, Positive, config
from rollcast.errors import ConfigError

__all__ = ["MegatronConfig"]

_EXCHANGE = "an exchange between data-parallel ranks takes no extra time if it runs during computation"
_MEMORY = "activations of long rows exceed a device's memory"


def _sets_no_recompute(values: Mapping[str, Any]) -> bool:
    """Return True if the section sets none of the keys of recomputation, which only fit each other together."""
    return not any(key.startswith("recompute_") for key in values)


def _distributes(values: Mapping[str, Any]) -> bool:
    """Return True if the section leaves on what `overlap_param_gather` needs."""
    return all(values.get(key, True) for key in ("use_distributed_optimizer", "overlap_grad_reduce"))


@config
class MegatronConfig:
    """Keys of an ``engine`` section for ``engine=megatron``."""

    name: str = "megatron"
    """Registry name of the engine."""
    tensor_model_parallel_size: Positive = 1
    """Ranks over which the matrices of a layer are split."""
    pipeline_model_parallel_size: Positive = 1
    """Stages over which the layers are split, evenly unless the next two keys say otherwise."""
    num_layers_in_first_pipeline_stage: Positive | None = None
    """Layers of the first stage, which also has the embedding; null for as many as the stages between."""
    num_layers_in_last_pipeline_stage: Positive | None = None
    """Layers of the last stage, which also has the head; null for as many as the stages between."""
    virtual_pipeline_model_parallel_size: Annotated[int, Ge(2)] | None = None
    """Chunks of layers in each pipeline stage, for the interleaved schedule: stages wait less, and exchange activations
    this many times as often. null for one chunk.
    """
    context_parallel_size: Positive = 1
    """Ranks that split the tokens of each row; attention gathers the keys and values of all of them."""
    expert_model_parallel_size: Positive = 1
    """Data- and context-parallel ranks over which the experts of a layer are split; 1 to hold all of them on each.
    Experts are also split over the tensor-parallel ranks.
    """
    sequence_parallel: bool = False
    """Split activations along the sequence where tensor parallelism does not split them; exact, and saves memory."""
    use_remove_padding: bool = False
    """Pack a micro-batch's rows into one sequence without padding."""
    use_distributed_optimizer: bool = True
    """Distribute the optimizer's state over the data-parallel (and context-parallel) ranks."""
    overlap_grad_reduce: Annotated[bool, OnAccelerator(True, _EXCHANGE)] = False
    """Reduce gradients over the data-parallel ranks during the last micro-batch's backward pass."""
    overlap_param_gather: Annotated[bool, OnAccelerator(True, _EXCHANGE, _distributes)] = False
    """Gather the weights that the distributed optimizer has updated during the next forward pass, instead of after the
    step; needs `overlap_grad_reduce`. An adapter's weights are always gathered after the step.
    """
    dtype: Annotated[
        Literal["float32", "bfloat16"], OnAccelerator("bfloat16", "the speed of bfloat16, with a float32 optimizer")
    ] = "float32"
    """Dtype of the weights; with `bfloat16`, gradients are summed and the optimizer computes in float32."""
    param_offload: bool = False
    """Keep the weights in host memory outside `train_mode` and `eval_mode`."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in host memory outside updates."""
    recompute_granularity: Annotated[
        Literal["full", "selective"] | None, OnAccelerator("full", _MEMORY, _sets_no_recompute)
    ] = None
    """`full` recomputes whole layers in the backward pass, `selective` only attention; null keeps all activations."""
    recompute_method: Annotated[
        Literal["uniform", "block"] | None, OnAccelerator("uniform", _MEMORY, _sets_no_recompute)
    ] = None
    """For `full`: `uniform` recomputes all layers in units and keeps only the inputs of each unit; `block`
    recomputes the first layers of a stage.
    """
    recompute_num_layers: Annotated[Positive | None, OnAccelerator(1, _MEMORY, _sets_no_recompute)] = None
    """For `full`: number of layers per unit (`uniform`), or of first layers (`block`)."""
    router_aux_loss_coef: Annotated[float, Ge(0)] = 0.0
    """Coefficient of the load-balancing loss of the routers of a mixture of experts; 0 for none."""
    head_chunk_size: Positive = 2048
    """Positions per pass through the vocabulary head. A micro-batch with more positions recomputes logits in the
    backward pass, so that they never exist all together.
    """

    @property
    def mesh_sizes(self) -> tuple[int, int, int, int]:
        """Tensor-, context-, pipeline- and expert-parallel size.

        The product of the first three is the number of ranks that share rows.
        """
        return (
            self.tensor_model_parallel_size,
            self.context_parallel_size,
            self.pipeline_model_parallel_size,
            self.expert_model_parallel_size,
        )

    def check(self, world_size: int, path: str = "actor.engine") -> None:
        """Check that the mesh fits the group, and that the keys fit each other.

        Args:
            world_size: ranks of the group.
            path: dotted path of the section, for messages.

        Raises:
            ConfigError: a key is invalid; the message names its value and the valid ones.
        """
        self._check_sizes(world_size, path)
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError(
                f"{path}.sequence_parallel is true, but {path}.tensor_model_parallel_size is 1: it splits what tensor "
                "parallelism does not split; set it to false, or raise tensor_model_parallel_size"
            )
        for key in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            if getattr(self, key) is not None and self.pipeline_model_parallel_size == 1:
                raise ConfigError(
                    f"{path}.{key} is {getattr(self, key)}, but {path}.pipeline_model_parallel_size is 1: one stage "
                    "has all layers; set the key to null, or raise pipeline_model_parallel_size"
                )
        self._check_chunks(path)
        self._check_overlap(path)
        self._check_recompute(path)

    @property
    def chunks(self) -> int:
        """Number of chunks of each pipeline stage."""
        return self.virtual_pipeline_model_parallel_size or 1

    def stage_layers(self, layers: int) -> tuple[int, ...] | None:
        """Return the number of layers of each stage of a model; None if the layers cannot be divided."""
        stages = self.pipeline_model_parallel_size
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        fixed = [count for count in (first, last) if count is not None]
        between, left = stages - len(fixed), layers - sum(fixed)
        if left < between or (left if between == 0 else left % between):
            return None
        middle = [left // between] * between if between else []
        return (*((first,) if first else ()), *middle, *((last,) if last else ()))

    def _check_sizes(self, world_size: int, path: str) -> None:
        tensor, context, pipeline, experts = self.mesh_sizes
        if world_size % (tensor * context * pipeline):
            shared = f", {path}.context_parallel_size={context}" if context > 1 else ""
            ranks = world_size // context if world_size % context == 0 else world_size
            fitting = [
                f"{first}x{second}"
                for first in range(1, ranks + 1)
                for second in range(1, ranks // first + 1)
                if ranks % (first * second) == 0
            ]
            fits = f" {ranks} ranks" if context > 1 else ""
            raise ConfigError(
                f"{path}.tensor_model_parallel_size={tensor}{shared} and "
                f"{path}.pipeline_model_parallel_size={pipeline} need a multiple of {tensor * context * pipeline} "
                f"ranks, but the group has {world_size}; tensor x pipeline sizes that fit{fits}: {', '.join(fitting)}"
            )
        # Experts are also split over context-parallel ranks: what they compute does not depend on other positions.
        ranks = world_size // (tensor * pipeline)
        if ranks % experts:
            sizes = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
            raise ConfigError(
                f"{path}.expert_model_parallel_size is {experts}, which does not divide the {ranks} data- and "
                f"context-parallel ranks ({world_size} ranks / tensor {tensor} / pipeline {pipeline}); sizes that fit: "
                f"{sizes}"
            )

    def _check_chunks(self, path: str) -> None:
        key, stages = f"{path}.virtual_pipeline_model_parallel_size", self.pipeline_model_parallel_size
        if self.chunks > 1 and stages == 1:
            raise ConfigError(
                f"{key} is {self.chunks}, but {path}.pipeline_model_parallel_size is 1: chunks of one stage would run "
                "one after the other; set the key to null, or raise pipeline_model_parallel_size"
            )

    def _check_overlap(self, path: str) -> None:
        for key in ("use_distributed_optimizer", "overlap_grad_reduce"):
            if self.overlap_param_gather and not getattr(self, key):
                raise ConfigError(
                    f"{path}.overlap_param_gather is true, but {path}.{key} is false; set overlap_param_gather to "
                    f"false, or {key} to true"
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
