"""Schema of the engine's config section; importable without torch, so that it is checked before anything loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from rollcast.contracts.config import Ge, OnAccelerator, Positive, config
from rollcast.errors import ConfigError

__all__ = ["FsdpConfig"]

Dtype = Literal["fp32", "bf16"]


def _shares_no_prompts(values: Mapping[str, Any]) -> bool:
    """Return False if the section sets `share_prompts`, which needs padded rows and the KV cache."""
    return not values.get("share_prompts")


@config
class FsdpConfig:
    """Keys of an ``engine`` section for ``engine=fsdp``."""

    name: str = "fsdp"
    """Registry name of the engine."""
    fsdp_size: int = -1
    """Ranks that shard one copy of the model; -1 for all ranks of the group. A proper divisor of the group's size
    selects hybrid sharding (HSDP): each group of that many ranks holds one copy.
    """
    ulysses_sequence_parallel_size: Positive = 1
    """Ranks that share each sequence and split its attention heads; needs `use_remove_padding`."""
    model_dtype: Dtype = "fp32"
    """Dtype of stored weights, gradients and optimizer state."""
    param_dtype: Annotated[Dtype | None, OnAccelerator("bf16", "the speed of bf16, with fp32 master weights")] = None
    """Dtype of forward and backward; null for `model_dtype`."""
    reduce_dtype: Dtype | None = None
    """Dtype in which gradients are reduced over the ranks; null for `fp32` if `param_dtype` is set, otherwise for
    `model_dtype`.
    """
    param_offload: bool = False
    """Keep the weights in host memory outside `train_mode` and `eval_mode`."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in host memory between updates; the first step of an update loads it, and the end of
    the update offloads it.
    """
    offload_policy: bool = False
    """Keep weights, gradients and optimizer state in host memory during passes too: FSDP2 copies the weights of a layer
    to the device when it needs them, and the optimizer runs on the CPU. For models whose state does not fit otherwise;
    excludes `param_offload` and `optimizer_offload`.
    """
    enable_gradient_checkpointing: Annotated[
        bool, OnAccelerator(True, "activations of long rows exceed a device's memory", _shares_no_prompts)
    ] = False
    """Recompute activations in the backward pass."""
    enable_activation_offload: bool = False
    """Keep the forward's activations in host memory until the backward pass."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward; false saves one gather in the backward pass at the cost of
    memory.
    """
    forward_prefetch: bool = False
    """Gather the next layer's weights while a layer computes."""
    use_remove_padding: Annotated[
        bool, OnAccelerator(True, "padding costs as much time as tokens", _shares_no_prompts)
    ] = False
    """Pack a micro-batch's rows into one sequence without padding."""
    use_fused_kernels: bool = False
    """Compute log-probs by chunks of tokens, without full logits; the backward pass recomputes each chunk."""
    log_probs_chunk_size: Positive = 512
    """Tokens of a chunk of `use_fused_kernels`. Fewer take less memory, but make smaller products with the head."""
    router_aux_loss_coef: Annotated[float, Ge(0)] = 0.0
    """Coefficient of the load-balancing loss of the routers of a mixture of experts; 0 for none."""
    share_prompts: bool = False
    """Compute a prompt that several rows of a micro-batch share only once, and continue from its keys and values:
    the same gradient for less work. Needs a model with a KV cache; no effect on a sharded model or a mixture of
    experts.
    """
    use_torch_compile: bool = False
    """Compile the decoder layers at their first pass with torch. Generation in this process runs them uncompiled."""

    def check(self, world_size: int, path: str = "actor.engine") -> None:
        """Check that sizes fit the ranks, and that no keys exclude each other.

        Args:
            world_size: ranks of the group.
            path: dotted path of the section, for messages.

        Raises:
            ConfigError: a key is invalid; the message names its value and the valid ones.
        """
        sizes = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
        if self.fsdp_size != -1 and not _divides(self.fsdp_size, world_size):
            raise ConfigError(
                f"{path}.fsdp_size is {self.fsdp_size}, but the group has {world_size} ranks; "
                f"use -1 for all of them, or one of {sizes}"
            )
        parallel = self.ulysses_sequence_parallel_size
        if not _divides(parallel, world_size):
            raise ConfigError(
                f"{path}.ulysses_sequence_parallel_size is {parallel}, but the group has {world_size} ranks; "
                f"use one of {sizes}"
            )
        if parallel > 1 and not self.use_remove_padding:
            raise ConfigError(
                f"{path}.ulysses_sequence_parallel_size is {parallel}, which splits packed sequences; "
                f"set {path}.use_remove_padding=true too"
            )
        moved = [f"{path}.{key}" for key in ("param_offload", "optimizer_offload") if getattr(self, key)]
        if self.offload_policy and moved:
            raise ConfigError(
                f"{path}.offload_policy is true, which keeps all state in host memory, so nothing is left for "
                f"{' and '.join(moved)}; set {'it' if len(moved) == 1 else 'them'} to false"
            )
        self._check_shared_prompts(path)

    def _check_shared_prompts(self, path: str) -> None:
        reasons = {
            "enable_gradient_checkpointing": "which disables the KV cache",
            "use_remove_padding": "which has no KV cache",
            "use_fused_kernels": "which needs hidden states instead of logits",
            "use_torch_compile": "which would compile one program per cache shape",
        }
        for key, reason in reasons.items():
            if self.share_prompts and getattr(self, key):
                raise ConfigError(
                    f"{path}.share_prompts is true, and so is {path}.{key}, {reason}; set one of them to false"
                )

    def shard_size(self, world_size: int) -> int:
        """Return the number of ranks that together hold one copy of the model."""
        return world_size if self.fsdp_size == -1 else self.fsdp_size

    def shards(self, world_size: int) -> bool:
        """Return True if FSDP2 holds the model, which it does on one rank too if it converts or moves weights."""
        return world_size > 1 or self.mixes_precision or self.offload_policy

    @property
    def mixes_precision(self) -> bool:
        """True if forward, backward or the reduction of gradients use another dtype than the stored weights."""
        return any(dtype not in (None, self.model_dtype) for dtype in (self.param_dtype, self.reduce_dtype))


def _divides(size: int, world_size: int) -> bool:
    return size > 0 and world_size % size == 0
