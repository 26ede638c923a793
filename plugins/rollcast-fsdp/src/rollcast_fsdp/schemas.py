"""The engine's own config keys; no torch here, so that a config is checked before anything loads."""

from __future__ import annotations

from dataclasses import dataclass

from rollcast.errors import ConfigError

__all__ = ["FsdpConfig"]

DTYPES = ("fp32", "bf16")


@dataclass
class FsdpConfig:
    """Keys of ``actor.engine`` for ``engine=fsdp``.

    Attributes:
        name: the engine's name in the registry.
        fsdp_size: ranks over which one copy of the model is sharded; -1 for all ranks of the group. A
            divisor of their number makes a hybrid: groups of so many ranks hold a copy each (HSDP).
        ulysses_sequence_parallel_size: ranks that share each sequence, and the heads of its attention;
            needs ``use_remove_padding``.
        model_dtype: dtype of stored weights, gradients and optimizer state, ``fp32`` or ``bf16``.
        param_dtype: dtype that forward and backward compute in; null for ``model_dtype``.
        reduce_dtype: dtype in which gradients are added up over the ranks; null for ``fp32`` where
            ``param_dtype`` is given, else ``model_dtype``.
        param_offload: keep the weights in host memory outside ``train_mode`` and ``eval_mode``.
        optimizer_offload: keep the optimizer's state in host memory outside of its steps.
        enable_gradient_checkpointing: recompute activations in the backward pass.
        enable_activation_offload: keep what the backward pass needs of the forward in host memory.
        reshard_after_forward: free a layer's gathered weights after its forward; False trades
            memory for one gather less in the backward pass.
        forward_prefetch: gather the next layer's weights while a layer computes.
        use_remove_padding: pack a micro-batch's rows into one sequence without padding.
        use_fused_kernels: compute log-probs block by block over the vocabulary, without full logits; the
            backward pass computes each block anew.
        share_prompts: compute a prompt that several rows of a micro-batch have in common once, and
            go on from its keys and values: less work for the same gradient. Needs a model with a
            KV cache; a sharded model runs as without it.
        use_torch_compile: have torch compile the decoder layers at their first pass. Generation in this
            process runs them as they are.
    """

    name: str = "fsdp"
    fsdp_size: int = -1
    ulysses_sequence_parallel_size: int = 1
    model_dtype: str = "fp32"
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    param_offload: bool = False
    optimizer_offload: bool = False
    enable_gradient_checkpointing: bool = False
    enable_activation_offload: bool = False
    reshard_after_forward: bool = True
    forward_prefetch: bool = False
    use_remove_padding: bool = False
    use_fused_kernels: bool = False
    share_prompts: bool = False
    use_torch_compile: bool = False

    def check(self, world_size: int) -> None:
        """Refuse values that the engine does not know, and sizes that do not fit the ranks.

        Raises:
            ConfigError: names the key, its value and the valid ones.
        """
        sizes = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        if self.fsdp_size != -1 and not _divides(self.fsdp_size, world_size):
            raise ConfigError(
                f"engine key fsdp_size is {self.fsdp_size}, but the group has {world_size} ranks; "
                f"use -1 for all of them, or one of {sizes}"
            )
        parallel = self.ulysses_sequence_parallel_size
        if not _divides(parallel, world_size):
            raise ConfigError(
                f"engine key ulysses_sequence_parallel_size is {parallel}, but the group has {world_size} ranks; "
                f"use one of {sizes}"
            )
        if parallel > 1 and not self.use_remove_padding:
            raise ConfigError(
                f"engine key ulysses_sequence_parallel_size is {parallel}, which splits packed sequences; "
                "set use_remove_padding=true too"
            )
        for key in ("model_dtype", "param_dtype", "reduce_dtype"):
            value = getattr(self, key)
            if value not in DTYPES and (value is not None or key == "model_dtype"):
                raise ConfigError(f"engine key {key} is {value!r}; valid: {', '.join(DTYPES)}")
        self._check_shared_prompts()

    def _check_shared_prompts(self) -> None:
        reasons = {
            "enable_gradient_checkpointing": "which turns the KV cache off",
            "use_remove_padding": "which keeps none",
            "use_fused_kernels": "which sees hidden states only",
            "use_torch_compile": "for which caches of many shapes are many programs",
        }
        for key, reason in reasons.items():
            if self.share_prompts and getattr(self, key):
                raise ConfigError(
                    f"engine key share_prompts is true, and so is {key}, {reason}; set one of them to false"
                )

    def shard_size(self, world_size: int) -> int:
        """Ranks that hold one copy of the model together."""
        return world_size if self.fsdp_size == -1 else self.fsdp_size

    @property
    def mixes_precision(self) -> bool:
        """Whether forward, backward or the reduction of gradients use another dtype than the stored weights."""
        return any(dtype not in (None, self.model_dtype) for dtype in (self.param_dtype, self.reduce_dtype))


def _divides(size: int, world_size: int) -> bool:
    return size > 0 and world_size % size == 0
