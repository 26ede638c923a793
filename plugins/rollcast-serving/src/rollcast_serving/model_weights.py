"""Names and shapes of a Hugging Face model's weights, and checks of updates and adapters against them.

Rollout engines silently accept an incomplete set of weights; these checks reject it by tensor name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.contracts.weights import AdapterWeights, checkpoint_tensors
from rollcast.errors import CheckpointError, WeightSyncError
from rollcast_data.vision.model_inputs import auto_class_name

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ModelWeights", "UpdateCheck", "check_adapter", "read_model_config", "write_adapter"]

_PREFIX = "base_model.model."
_LORA_A = ".lora_A.weight"
_LORA_B = ".lora_B.weight"
_EXPERTS = re.compile(r"\.layers\.(\d+)\..*\bexperts\.")


def read_model_config(model_path: str, trust_remote_code: bool = False) -> Any:
    """Return the transformers config of a model folder.

    Raises:
        CheckpointError: the folder has no readable config.
    """
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no model config could be read from {model_path}: {error}") from error


@dataclass(frozen=True)
class ModelWeights:
    """Names and shapes of a model's weights.

    Attributes:
        shapes: shape by name, as in the model's checkpoint; a tied weight appears under each of its names.
        names: name under which to load each weight; for a tied head, the embedding's.
        tied: load names that stand for several weights.
    """

    shapes: Mapping[str, tuple[int, ...]]
    names: Mapping[str, str]
    tied: frozenset[str]

    @classmethod
    def of(cls, model_path: str, trust_remote_code: bool = False) -> ModelWeights:
        """Read names and shapes from the folder's config, without allocating weights.

        Raises:
            CheckpointError: the folder has no readable config.
        """
        import torch
        import transformers

        config = read_model_config(model_path, trust_remote_code)
        auto_class: Any = getattr(transformers, auto_class_name(config))
        with torch.device("meta"):
            module = auto_class.from_config(config, trust_remote_code=trust_remote_code)
        module.tie_weights()
        weights = checkpoint_tensors(module, module.state_dict(keep_vars=True))
        firsts: dict[int, str] = {}
        names = {name: firsts.setdefault(id(weight), name) for name, weight in weights.items()}
        tied = frozenset(first for name, first in names.items() if name != first)
        return cls({name: tuple(weight.shape) for name, weight in weights.items()}, names, tied)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts, in ascending order; empty for a dense model."""
        return tuple(sorted({int(match[1]) for name in self.shapes if (match := _EXPERTS.search(name))}))


@dataclass
class UpdateCheck:
    """Check of one weight update against the model, tensor by tensor."""

    model: ModelWeights
    #: Name and checksum (tied weights only) of each weight received, by load name.
    _seen: dict[str, tuple[str, str]] = field(default_factory=dict)

    def admit(self, name: str, tensor: Tensor) -> str | None:
        """Return the name under which to load a tensor; None if its tied twin was received before.

        Raises:
            WeightSyncError: the name is unknown, was received before, has another shape in the model, or
                differs in value from its tied twin.
        """
        shape = self.model.shapes.get(name)
        if shape is None:
            raise WeightSyncError(f"the model has no weight named {name!r}", tensor=name)
        if tuple(tensor.shape) != shape:
            raise WeightSyncError(
                f"weight {name!r} arrived with shape {tuple(tensor.shape)}; the model's has {shape}", tensor=name
            )
        known = self.model.names[name]
        checksum = _checksum(tensor) if known in self.model.tied else ""
        if known not in self._seen:
            self._seen[known] = (name, checksum)
            return known
        twin, twin_checksum = self._seen[known]
        if twin == name:
            raise WeightSyncError(f"weight {name!r} arrived twice", tensor=name)
        if twin_checksum != checksum:
            raise WeightSyncError(
                f"weights {twin!r} and {name!r} are tied in the model, but arrived with different values", tensor=name
            )
        return None

    def finish(self, version: int) -> None:
        """Check that every weight was received.

        Raises:
            WeightSyncError: weights are missing; the message names the first ones.
        """
        missing = [name for name, known in self.model.names.items() if known not in self._seen]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise WeightSyncError(f"version {version} lacks {', '.join(missing[:3])}{more}", tensor=missing[0])


def check_adapter(adapter: AdapterWeights, model: ModelWeights) -> None:
    """Check that each matrix of an adapter fits a weight of the model and has its other half.

    Raises:
        WeightSyncError: the adapter is empty, or a tensor does not fit; the message names it.
    """
    if not adapter.tensors:
        raise WeightSyncError("the adapter has no tensors")
    rank = int(adapter.config["r"])
    for name, tensor in adapter.tensors.items():
        half = next((suffix for suffix in (_LORA_A, _LORA_B) if name.endswith(suffix)), "")
        module = name.removeprefix(_PREFIX).removesuffix(half)
        shape = model.shapes.get(f"{module}.weight")
        if not half or not name.startswith(_PREFIX) or shape is None or len(shape) != 2:
            raise WeightSyncError(f"adapter tensor {name!r} is not the A or B of a matrix of the model", tensor=name)
        wanted = (rank, shape[1]) if half == _LORA_A else (shape[0], rank)
        if tuple(tensor.shape) != wanted:
            raise WeightSyncError(
                f"adapter tensor {name!r} has shape {tuple(tensor.shape)}; with r={rank} it must be {wanted}",
                tensor=name,
            )
        twin = name.removesuffix(half) + (_LORA_B if half == _LORA_A else _LORA_A)
        if twin not in adapter.tensors:
            raise WeightSyncError(f"adapter tensor {name!r} lacks its other half {twin!r}", tensor=twin)


def write_adapter(folder: Path, adapter: AdapterWeights) -> None:
    """Write an adapter in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""
    from safetensors.torch import save_file

    (folder / "adapter_config.json").write_text(adapter.config_json())
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def _checksum(tensor: Tensor) -> str:
    from rollcast.protocol import tensor_checksum

    return tensor_checksum(tensor)
