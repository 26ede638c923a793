"""Weights of a module by Hugging Face name: counting, checking and loading."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from rollcast.contracts.weights import WeightReport, checkpoint_tensors
from rollcast_hf.errors import WeightUpdateError
from rollcast_serving.receiving import WeightTally

__all__ = ["count_weights", "load_buckets"]


def count_weights(module: nn.Module) -> tuple[int, int]:
    """Return the number of distinct parameters, and their bytes."""
    parameters = list(module.parameters())
    return len(parameters), sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def load_buckets(module: nn.Module, buckets: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> WeightReport:
    """Copy full tensors, named as in a checkpoint, into a module in place, converted to its dtype and device.

    Of weights that share memory (a tied head) one name is enough; if several are received they must be equal.

    Returns:
        The report: number and bytes of the received tensors, and a checksum per bucket, by its number.

    Raises:
        WeightUpdateError: a name is unknown, a shape differs, tied weights differ, or a weight is missing. The module
            then holds a mixture of old and new weights.
    """
    targets = checkpoint_tensors(module, module.state_dict())
    loaded: dict[tuple[int, int], str] = {}
    tally = WeightTally(buckets)
    for bucket in tally:
        for name, tensor in bucket:
            _load_tensor(targets, loaded, name, tensor)
    missing = [name for name, target in targets.items() if _place(target) not in loaded]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise WeightUpdateError(f"version {version} lacks {', '.join(missing[:3])}{more}", tensor=missing[0])
    return tally.report(version)


def _place(tensor: Tensor) -> tuple[int, int]:
    # Empty tensors all have address 0, and there is nothing to load.
    return tensor.data_ptr(), math.prod(tensor.shape)


def _load_tensor(targets: dict[str, Tensor], loaded: dict[tuple[int, int], str], name: str, tensor: Tensor) -> None:
    target = targets.get(name)
    if target is None:
        raise WeightUpdateError(f"the model has no weight named {name!r}", tensor=name)
    if target.shape != tensor.shape:
        raise WeightUpdateError(
            f"weight {name!r} arrived with shape {tuple(tensor.shape)}; the model's has {tuple(target.shape)}",
            tensor=name,
        )
    place = _place(target)
    twin = loaded.get(place)
    if twin is None:
        target.copy_(tensor)
        loaded[place] = name
    elif not torch.equal(target, tensor.to(target)):
        raise WeightUpdateError(
            f"weights {twin!r} and {name!r} are tied in the model, but arrived with different values", tensor=name
        )
