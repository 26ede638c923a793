"""Values of small device tensors, computed beside the fake ones, so that counts and indices are true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from rollcast_dryrun.schemas import fills_by_shape, is_view, leaves_of, map_leaves

__all__ = [
    "Value",
    "attach",
    "choose_evenly",
    "compute",
    "copy_value",
    "forget",
    "get_value",
    "has_values",
    "set_value",
]

#: Largest numbers of elements of tensors whose values are computed: indices and masks, and other numbers.
_INTEGERS, _NUMBERS = 1 << 16, 1 << 10
_ATTRIBUTE = "_dryrun_value"


@dataclass(eq=False)
class _Root:
    """Memory that a tensor and its views share; its values are known as long as all that wrote it were."""

    known: bool = True


@dataclass(frozen=True)
class Value:
    """The values of a fake tensor.

    Attributes:
        tensor: a tensor on the CPU of the same shape, a view of the same memory if the fake one is.
        root: memory that they share.
    """

    tensor: torch.Tensor
    root: _Root


def has_values(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is one whose values are computed."""
    exact = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return tensor.numel() <= (_INTEGERS if exact else _NUMBERS)


def set_value(fake: torch.Tensor, value: torch.Tensor, root: _Root | None = None) -> None:
    """Attach values to a fake tensor; without ``root``, of memory of its own."""
    setattr(fake, _ATTRIBUTE, Value(value, root or _Root()))


def get_value(fake: torch.Tensor) -> torch.Tensor | None:
    """Return a fake tensor's values; None if they are not known."""
    value: Value | None = getattr(fake, _ATTRIBUTE, None)
    return value.tensor if value is not None and value.root.known else None


def copy_value(target: torch.Tensor, source: torch.Tensor | None) -> None:
    """Copy values into those of a fake tensor; None makes them unknown. A copy of all its memory makes them known."""
    value: Value | None = getattr(target, _ATTRIBUTE, None)
    if value is None:
        return
    if source is None or not has_values(source):
        value.root.known = False
        return
    value.tensor.copy_(source)
    value.root.known |= target.nbytes == target.untyped_storage().nbytes()


def forget(fake: torch.Tensor) -> None:
    """Make the values of a tensor, and of all that share its memory, unknown."""
    value: Value | None = getattr(fake, _ATTRIBUTE, None)
    if value is not None:
        value.root.known = False


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Return True and an operation's result on the values, if those that it depends on are known."""
    leaves = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not fills_by_shape(func) and not all(map(_is_known, leaves)):
        return False, None
    return _run(func, args, kwargs)


def compute_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return a result of the shape that an operation's whole numbers and masks decide; None if they are not known."""
    leaves = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not any(map(_is_known, leaves)) or any(not (_is_known(leaf) or leaf.is_floating_point()) for leaf in leaves):
        return None
    known, result = _run(func, args, kwargs)
    return result if known and isinstance(result, torch.Tensor) else None


def _is_known(leaf: torch.Tensor) -> bool:
    return has_values(leaf) and not (isinstance(leaf, FakeTensor) and get_value(leaf) is None)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Run an operation on values, and on zeros in place of those that are not known."""

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            value = get_value(leaf)
            return torch.zeros(leaf.shape, dtype=leaf.dtype) if value is None else value
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    try:
        with torch.no_grad():
            return True, func(*map_leaves(plain, args), **map_leaves(plain, kwargs))
    except (NotImplementedError, RuntimeError):  # no kernel of the CPU, such as for flash attention
        return False, None


def choose_evenly(scores: torch.Tensor, indices: torch.Tensor) -> None:
    """Attach values to the indices of the largest scores, which are not known: each position is chosen as often.

    Args:
        scores: ``[..., N]``, such as those of experts.
        indices: fake tensor ``[..., k]``.
    """
    if has_values(indices):
        set_value(indices, (torch.arange(indices.numel()) % scores.shape[-1]).reshape(indices.shape))


def attach(func: Any, args: tuple[Any, ...], fakes: Any, values: Any) -> None:
    """Attach the values of an operation's result to its fake result; views share the memory of their source."""
    source = next((leaf for leaf in leaves_of(args) if isinstance(leaf, torch.Tensor)), None)
    known: Value | None = getattr(source, _ATTRIBUTE, None) if is_view(func) and source is not None else None
    for fake, value in zip(leaves_of(fakes), leaves_of(values), strict=True):
        if isinstance(fake, torch.Tensor) and has_values(fake) and not hasattr(fake, _ATTRIBUTE):
            set_value(fake, value, None if known is None else known.root)
