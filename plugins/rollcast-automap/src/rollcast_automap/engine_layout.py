"""How an engine keeps a model on its ranks, from its own config keys alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollcast_trainer.batch.sizes import ParallelSizes

__all__ = ["EngineLayout"]

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class EngineLayout:
    """How an engine keeps a model.

    Attributes:
        shards: ranks over which one copy is spread, of which each gathers what it needs.
        stored: bytes a stored parameter.
        computed: bytes a number in the forward and backward pass.
        param_offload, optimizer_offload: kept in host memory outside of their use.
        checkpointing: layers recompute their activations.
        activation_offload: what is kept for the backward pass is in host memory.
        sequence_parts: ranks that share the tokens of a row.
        tensor: ranks that share each layer, and work on it as it is.
        pipeline: ranks that each have some of the layers.
        splits_sequence: what tensor parallelism leaves whole is split over its ranks along the sequence.
        head_positions: positions whose logits exist at a time; None for all of a pass.
        gradient: bytes a gradient; None for those of a parameter.
        state: bytes of the optimizer's state a parameter; None for two numbers like it.
        state_shards: ranks over which the optimizer's state is spread beside.
        fused_logits: logits are computed block by block, and never held.
        reshards: a layer's gathered weights are given up after its forward pass.
        known: the engine has the keys that this was read from; otherwise it is a guess.
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
    splits_sequence: bool = False
    head_positions: int | None = None
    gradient: int | None = None
    state: int | None = None
    state_shards: int = 1
    fused_logits: bool = False
    reshards: bool = True
    known: bool = True

    @classmethod
    def read(cls, engine: Any, ranks: int) -> EngineLayout:
        """From the engine's own keys (``actor.engine``), by their usual names."""
        if hasattr(engine, "pipeline_model_parallel_size") and hasattr(engine, "dtype"):
            return cls._read_megatron(engine, ranks)
        if not hasattr(engine, "model_dtype"):
            return cls(shards=1, known=False)
        stored = _BYTES.get(engine.model_dtype, 4)
        size = getattr(engine, "fsdp_size", -1)
        return cls(
            shards=ranks if size < 1 else size,
            stored=stored,
            computed=_BYTES.get(getattr(engine, "param_dtype", None) or engine.model_dtype, stored),
            param_offload=bool(getattr(engine, "param_offload", False)),
            optimizer_offload=bool(getattr(engine, "optimizer_offload", False)),
            checkpointing=bool(getattr(engine, "enable_gradient_checkpointing", False)),
            activation_offload=bool(getattr(engine, "enable_activation_offload", False)),
            sequence_parts=getattr(engine, "ulysses_sequence_parallel_size", 1),
            fused_logits=bool(getattr(engine, "use_fused_kernels", False)),
            reshards=bool(getattr(engine, "reshard_after_forward", True)),
        )

    @classmethod
    def _read_megatron(cls, engine: Any, ranks: int) -> EngineLayout:
        """Of an engine that is split as Megatron is."""
        sizes = ParallelSizes.read(engine)
        stored = _BYTES.get(engine.dtype, 4)
        spread = bool(getattr(engine, "use_distributed_optimizer", False))
        return cls(
            shards=1,
            stored=stored,
            gradient=4,
            # Two moments, and with weights of two bytes a copy of four.
            state=8 if stored == 4 else 12,
            state_shards=sizes.data(ranks) if spread else 1,
            computed=stored,
            param_offload=bool(getattr(engine, "param_offload", False)),
            optimizer_offload=bool(getattr(engine, "optimizer_offload", False)),
            checkpointing=getattr(engine, "recompute_granularity", None) == "full",
            sequence_parts=sizes.context,
            tensor=sizes.tensor,
            pipeline=sizes.pipeline,
            splits_sequence=bool(getattr(engine, "sequence_parallel", False)),
            head_positions=getattr(engine, "head_chunk_size", None),
        )

    @property
    def gathers(self) -> bool:
        """Whether passes need weights other than the stored ones."""
        return self.shards > 1 or self.computed != self.stored

    def shard(self, parameters: int) -> int:
        """Parameters on each rank, of those that all ranks share."""
        return -(-parameters // (self.shards * self.tensor))
