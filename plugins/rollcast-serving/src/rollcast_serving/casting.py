"""Casting weights to the dtype in which a rollout holds them, before they are sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rollcast_data.vision.model_inputs import is_vision_model
from rollcast_serving.model_weights import read_model_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["CastRoom", "Outgoing", "WeightCast", "loaded_dtype"]

_ALIGNMENT = 64
_LONG_NAMES = {"half": "float16", "float": "float32"}


def loaded_dtype(dtype: str, on_cpu: bool) -> str | None:
    """Return torch's name of the dtype that ``rollout.dtype`` stands for in vLLM and SGLang.

    Args:
        dtype: value of the key.
        on_cpu: True if the engine runs on a CPU, where ``auto`` means float32.

    Returns:
        None for ``auto`` on a GPU: the engine chooses by the model and the generation of the GPU.
    """
    if dtype == "auto":
        return "float32" if on_cpu else None
    return _LONG_NAMES.get(dtype, dtype)


@dataclass(frozen=True)
class WeightCast:
    """Conversion of a model's weights to a rollout's dtype, as the rollout itself would convert them.

    Only matrices are cast, and only to a narrower floating dtype. Vectors are sent as they are: engines hold some of
    them in float32 (decays of state-space layers, corrections of expert routing), and they are a thousandth of the
    bytes.

    Attributes:
        dtype: torch's name of the rollout's dtype.
        kept: names of modules or parameters, parts of a weight's dotted name, whose matrices are sent as they are.
    """

    dtype: str
    kept: frozenset[str] = frozenset()

    @classmethod
    def of_model(cls, dtype: str, model_path: str, trust_remote_code: bool = False) -> WeightCast:
        """Return a cast that leaves alone the matrices that the model's transformers class keeps in float32.

        Raises:
            CheckpointError: the folder has no readable config.
        """
        import transformers

        config = read_model_config(model_path, trust_remote_code)
        sees = is_vision_model(config)
        mapping: Any = getattr(transformers, f"MODEL_FOR_{'IMAGE_TEXT_TO_TEXT' if sees else 'CAUSAL_LM'}_MAPPING")
        model_class = mapping.get(type(config), None)
        attributes = ["_keep_in_fp32_modules_strict"]
        if dtype == "float16":  # transformers keeps these in float32 because they need a wider range than float16 has
            attributes.append("_keep_in_fp32_modules")
        return cls(
            dtype, frozenset(name for attribute in attributes for name in getattr(model_class, attribute, None) or ())
        )

    def dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which a weight is sent."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        wider = tensor.is_floating_point() and tensor.element_size() > dtype.itemsize
        return dtype if wider and tensor.dim() > 1 and not self._keeps(name) else tensor.dtype

    def _keeps(self, name: str) -> bool:
        return any(f".{part}." in f".{name}." for part in self.kept)


class Outgoing(NamedTuple):
    """A tensor to send.

    Attributes:
        name: name of the weight.
        tensor: the engine's tensor.
        dtype: dtype in which it is sent.
    """

    name: str
    tensor: Tensor
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Size in bytes as it is sent."""
        return self.tensor.numel() * self.dtype.itemsize

    @property
    def is_cast(self) -> bool:
        """True if it is sent in another dtype than the engine's."""
        return self.dtype != self.tensor.dtype


class CastRoom:
    """Memory for the cast tensors of one bucket, reused for the next bucket.

    Allocating fresh memory for each tensor takes longer than the cast itself.
    """

    def __init__(self) -> None:
        self._flat: Tensor | None = None
        self._used = 0

    def cast(self, bucket: Sequence[Outgoing]) -> Iterator[tuple[str, Tensor]]:
        """Yield a bucket's tensors as they are sent; the next cast may overwrite them."""
        self._used = 0
        capacity = sum(-(-weight.size // _ALIGNMENT) * _ALIGNMENT for weight in bucket if weight.is_cast)
        for name, tensor, dtype in bucket:
            yield name, tensor.detach() if dtype == tensor.dtype else self._put(tensor, dtype, capacity)

    def leave_device(self) -> None:
        """Free memory of a device, which belongs to the rollout and the training between syncs."""
        if self._flat is not None and self._flat.device.type != "cpu":
            self._flat = None

    def _put(self, tensor: Tensor, dtype: torch.dtype, capacity: int) -> Tensor:
        """Return a tensor in another dtype, in the reused memory if it has space."""
        import torch

        size = tensor.numel() * dtype.itemsize
        flat = self._flat
        if not self._used and (flat is None or len(flat) < capacity or flat.device != tensor.device):
            self._flat = flat = torch.empty(capacity, dtype=torch.uint8, device=tensor.device)
        if flat is None or len(flat) < self._used + size or flat.device != tensor.device:
            return tensor.detach().to(dtype)
        cast = flat[self._used : self._used + size].view(dtype).view(tensor.shape)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cast.copy_(tensor.detach())
