"""The model's tensors under their external names: in Hugging Face folders, in checkpoints, in PEFT adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rollcast.contracts.weights import AdapterWeights, StackedWeights, find_stacked, split_stacked
from rollcast_engine.hf import parameters_by_name, transformer
from rollcast_engine.lora import merge_pair
from rollcast_fsdp.sharding import full_tensor, full_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from rollcast_engine.lora import Adapter, LoraPair
    from rollcast_fsdp.sharding import Sharding

__all__ = ["ModelTensors"]


@dataclass(frozen=True)
class ModelTensors:
    """A module's parameters and persistent buffers; all ranks must call the gathering methods together."""

    module: nn.Module
    sharding: Sharding | None
    adapter: Adapter | None
    device: torch.device

    def _all(self) -> dict[str, Tensor]:
        if self.sharding is not None:
            self.sharding.reshard()
        return parameters_by_name(self.module)

    def base(self) -> dict[str, Tensor]:
        """Return this rank's tensors of the model without its adapter, by Hugging Face name."""
        adapter = self.adapter
        if adapter is None:
            return self._all()
        return {adapter.base_name(name): tensor for name, tensor in self._all().items() if not adapter.owns(name)}

    def saved(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint saves: all of them, or with an adapter only the trained ones."""
        if self.adapter is None:
            return self._all()
        return {name: tensor for name, tensor in self._all().items() if tensor.requires_grad}

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors of the model without its adapter by checkpoint name, gathered in few collectives."""
        for name, tensor in full_tensors(self.base().items(), self.device):
            yield from split_stacked(self.kinds, name, tensor).items()

    @cached_property
    def kinds(self) -> tuple[StackedWeights, ...]:
        """Kinds of tensors that hold several tensors of a checkpoint."""
        return find_stacked(transformer(self.module)) or ()

    def gather_merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors of the model with the adapter merged into the weights."""
        if self.adapter is None:
            yield from self.gather()
            return
        everything, pairs = self._all(), self.adapter.pairs
        for name, tensor in self.base().items():
            whole = self._merge(tensor, pairs.get(name), everything)
            yield from split_stacked(self.kinds, name, whole).items()

    def _merge(self, tensor: Tensor, pair: LoraPair | None, everything: dict[str, Tensor]) -> Tensor:
        whole = full_tensor(tensor, self.device)
        if pair is None:
            return whole
        a, b = (full_tensor(everything[half], self.device) for half in (pair.a, pair.b))
        return merge_pair(whole, a, b, pair.scaling)

    def gather_adapter(self) -> AdapterWeights | None:
        """Return the whole adapter by PEFT's names; None without one."""
        if self.adapter is None:
            return None
        tensors = {
            self.adapter.peft_name(name): full_tensor(tensor, self.device)
            for name, tensor in self._all().items()
            if self.adapter.owns(name)
        }
        return AdapterWeights(self.adapter.config, tensors)
