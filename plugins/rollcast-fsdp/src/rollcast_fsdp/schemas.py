"""The engine's own config keys; no torch here, so that a config is checked before anything loads."""

from __future__ import annotations

from dataclasses import dataclass

from rollcast.errors import ConfigError

__all__ = ["FsdpConfig"]

MODEL_DTYPES = ("fp32", "bf16")
MIXED_PRECISIONS = ("none", "bf16")


@dataclass
class FsdpConfig:
    """Keys of ``actor.engine`` for ``engine=fsdp``.

    Attributes:
        name: the engine's name in the registry.
        fsdp_size: ranks over which one copy of the model is sharded; -1 for all ranks of the group.
            Other sizes than the whole group (hybrid sharding) are not supported yet.
        model_dtype: dtype of stored weights, gradients and optimizer state, ``fp32`` or ``bf16``.
        mixed_precision: ``none``, or ``bf16`` to compute in bf16 and reduce gradients in fp32.
        param_offload: keep the weights in host memory outside ``train_mode`` and ``eval_mode``.
        optimizer_offload: keep the optimizer's state in host memory outside of its steps.
        gradient_checkpointing: recompute activations in the backward pass.
        reshard_after_forward: free a layer's gathered weights after its forward; False trades
            memory for one gather less in the backward pass.
        share_prompts: compute a prompt that several rows of a micro-batch have in common once, and
            go on from its keys and values: less work for the same gradient. Needs a model with a
            KV cache and no ``gradient_checkpointing``; a sharded model runs as without it.
    """

    name: str = "fsdp"
    fsdp_size: int = -1
    model_dtype: str = "fp32"
    mixed_precision: str | None = "none"
    param_offload: bool = False
    optimizer_offload: bool = False
    gradient_checkpointing: bool = False
    reshard_after_forward: bool = True
    share_prompts: bool = False

    def check(self, world_size: int) -> None:
        """Refuse values that the engine does not know.

        Raises:
            ConfigError: names the key, its value and the valid ones.
        """
        if self.fsdp_size not in (-1, world_size):
            raise ConfigError(
                f"engine key fsdp_size is {self.fsdp_size}, but the group has {world_size} ranks; "
                f"use -1 or {world_size} (hybrid sharding over part of the ranks is not supported)"
            )
        if self.model_dtype not in MODEL_DTYPES:
            raise ConfigError(f"engine key model_dtype is {self.model_dtype!r}; valid: {', '.join(MODEL_DTYPES)}")
        if self.mixed_precision is not None and self.mixed_precision not in MIXED_PRECISIONS:
            valid = ", ".join(MIXED_PRECISIONS)
            raise ConfigError(f"engine key mixed_precision is {self.mixed_precision!r}; valid: {valid}")
        if self.share_prompts and self.gradient_checkpointing:
            raise ConfigError(
                "engine key share_prompts is true, and so is gradient_checkpointing, which turns the KV cache off; "
                "set one of them to false"
            )

    @property
    def computes_in_bf16(self) -> bool:
        """Whether forward and backward run in bf16 while the stored weights keep ``model_dtype``."""
        return self.mixed_precision == "bf16"
