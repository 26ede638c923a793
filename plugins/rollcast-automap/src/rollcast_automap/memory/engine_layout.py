"""The layout of a model on the ranks of an engine, read from the engine's config keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rollcast_automap.contract import Mesh, RoleSpec, TrainingLayout
from rollcast_trainer.api import ParallelSizes

__all__ = ["EngineLayout", "describe_engine", "has_known_keys", "usual_layout"]

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class EngineLayout:
    """The layout of a model on a mesh.

    Attributes:
        shards: ranks that shard one copy of the model and gather weights layer by layer.
        stored: bytes per stored parameter.
        computed: bytes per element in the forward and backward pass.
        param_offload, optimizer_offload: True if the parameters or the optimizer state are in host memory while unused.
        checkpointing: True if layers recompute their activations.
        activation_offload: True if activations for the backward pass are in host memory.
        sequence_parts: ranks that share the tokens of a row (sequence parallelism).
        tensor: ranks that share each layer (tensor parallelism).
        pipeline: pipeline stages.
        chunks: chunks of layers in each pipeline stage.
        splits_sequence: True if tensor-parallel ranks also split the activations of norms along the sequence.
        head_positions: positions whose logits exist at a time; None for all positions of a pass.
        gradient: bytes per gradient; None for the bytes of a parameter.
        state: bytes of optimizer state per parameter; None for two values of the parameter's size.
        state_shards: additional ranks over which the optimizer state is sharded.
        fused_logits: True if logits are computed by chunks of positions and never stored as a whole.
        reshards: True if a layer's gathered weights are freed after its forward pass.
        keeps_gradients: True if the memory of gradients stays allocated between updates.
        streams_weights: True if weights, gradients and optimizer state are always in host memory.
    """

    shards: int
    stored: int = 4
    computed: int = 4
    param_offload: bool = False
    optimizer_offload: bool = False
    checkpointing: bool = False
    activation_offload: bool = False
    sequence_parts: int = 1
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    splits_sequence: bool = False
    head_positions: int | None = None
    gradient: int | None = None
    state: int | None = None
    state_shards: int = 1
    fused_logits: bool = False
    reshards: bool = True
    keeps_gradients: bool = False
    streams_weights: bool = False

    @classmethod
    def of(cls, role: RoleSpec, mesh: Mesh, devices: int) -> EngineLayout:
        """Return the layout of a role that does not generate.

        Args:
            role: role that does not generate.
            mesh: mesh of the role.
            devices: number of devices in the role's pool; a mesh does not count the ranks that share a row's tokens.
        """
        keeps = role.training or usual_layout(role)
        data = max(devices // (mesh.tensor * mesh.pipeline * keeps.sequence_parts), 1)
        return cls(
            shards=devices if keeps.shard_size < 1 else keeps.shard_size,
            stored=role.model.dtype_bytes,
            computed=keeps.computed_bytes,
            param_offload=keeps.param_offload,
            optimizer_offload=keeps.optimizer_offload,
            streams_weights=keeps.streams_weights,
            checkpointing=role.recompute,
            activation_offload=keeps.activation_offload,
            sequence_parts=keeps.sequence_parts,
            tensor=mesh.tensor,
            pipeline=mesh.pipeline,
            chunks=keeps.pipeline_chunks,
            splits_sequence=keeps.splits_sequence,
            head_positions=keeps.head_positions,
            gradient=role.gradient_bytes,
            state=role.optimizer_bytes,
            state_shards=data if keeps.spreads_optimizer else 1,
            fused_logits=keeps.fused_logits,
            reshards=keeps.reshards,
            keeps_gradients=keeps.keeps_gradients,
        )

    @property
    def gathers(self) -> bool:
        """True if passes need a temporary copy of weights: from shards or host memory, or in another dtype."""
        return self.shards > 1 or self.computed != self.stored or self.streams_weights

    def shard(self, parameters: int) -> int:
        """Return the parameters on each rank if all ranks share ``parameters``."""
        return -(-parameters // (self.shards * self.tensor))


def usual_layout(role: RoleSpec) -> TrainingLayout:
    """Return the layout of an engine whose keys are not known: sharded by FSDP, or split as Megatron does."""
    shards = role.plugin == "fsdp"
    return TrainingLayout(
        shard_size=-1 if shards else 1,
        param_offload=role.offload,
        optimizer_offload=role.offload,
        spreads_optimizer=not shards,
        splits_sequence=not shards,
    )


def has_known_keys(engine: Any) -> bool:
    """Return True if an engine has keys that :func:`describe_engine` reads; otherwise fp32 on every rank is assumed."""
    return _splits(engine) or hasattr(engine, "model_dtype")


def describe_engine(role: RoleSpec, engine: Any) -> RoleSpec:
    """Return the role with the layout that its engine's keys (``actor.engine``) describe, by their usual names."""
    if _splits(engine):
        return _describe_megatron(role, engine)
    if not has_known_keys(engine):
        whole = replace(role.model, dtype_bytes=4)
        training = TrainingLayout(computed_bytes=4, keeps_gradients=True)
        return replace(role, model=whole, optimizer_bytes=8, gradient_bytes=4, recompute=False, training=training)
    stored = _BYTES.get(engine.model_dtype, 4)
    fused = bool(getattr(engine, "use_fused_kernels", False))
    training = TrainingLayout(
        shard_size=max(getattr(engine, "fsdp_size", -1), -1) or -1,
        computed_bytes=_BYTES.get(getattr(engine, "param_dtype", None) or engine.model_dtype, stored),
        sequence_parts=getattr(engine, "ulysses_sequence_parallel_size", 1),
        streams_weights=bool(getattr(engine, "offload_policy", False)),
        activation_offload=bool(getattr(engine, "enable_activation_offload", False)),
        reshards=bool(getattr(engine, "reshard_after_forward", True)),
        fused_logits=fused,
        head_positions=getattr(engine, "log_probs_chunk_size", None) if fused else None,
        shares_prompts=bool(getattr(engine, "share_prompts", False)),
    )
    recompute = bool(getattr(engine, "enable_gradient_checkpointing", False))
    return _finish(role, engine, training, (stored, stored, 2 * stored), recompute)


def _splits(engine: Any) -> bool:
    return hasattr(engine, "pipeline_model_parallel_size") and hasattr(engine, "dtype")


def _describe_megatron(role: RoleSpec, engine: Any) -> RoleSpec:
    """Return the role with the layout of an engine that has Megatron's keys."""
    stored = _BYTES.get(engine.dtype, 4)
    training = TrainingLayout(
        computed_bytes=stored,
        sequence_parts=ParallelSizes.read(engine).context,
        spreads_optimizer=bool(getattr(engine, "use_distributed_optimizer", False)),
        splits_sequence=bool(getattr(engine, "sequence_parallel", False)),
        head_positions=getattr(engine, "head_chunk_size", None),
        pipeline_chunks=getattr(engine, "virtual_pipeline_model_parallel_size", None) or 1,
    )
    # Two float32 moments; with 2-byte weights also a float32 copy of the weights.
    sizes = (stored, 4, 8 if stored == 4 else 12)
    return _finish(role, engine, training, sizes, getattr(engine, "recompute_granularity", None) == "full")


def _finish(
    role: RoleSpec, engine: Any, training: TrainingLayout, sizes: tuple[int, int, int], recompute: bool
) -> RoleSpec:
    """Return the role with the keys that all engines share; ``sizes``: bytes per parameter, gradient and state."""
    params, state = (bool(getattr(engine, key, False)) for key in ("param_offload", "optimizer_offload"))
    stored, gradient, optimizer = sizes
    return replace(
        role,
        model=replace(role.model, dtype_bytes=stored),
        optimizer_bytes=optimizer,
        gradient_bytes=gradient,
        offload=params or state,
        recompute=recompute,
        training=replace(training, param_offload=params, optimizer_offload=state),
    )
