"""What a Hugging Face model has for weights, and updates and adapters held against that.

For rollouts whose engine would load less than a whole model without a word. Reading a model's folder needs
transformers, and writing an adapter safetensors; both come with the rollouts that do so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.contracts.weights import AdapterWeights
from rollcast.errors import CheckpointError, WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ModelWeights", "UpdateCheck", "check_adapter", "read_model_config", "write_adapter"]

_PREFIX = "base_model.model."
_LORA_A = ".lora_A.weight"
_LORA_B = ".lora_B.weight"


def read_model_config(model_path: str, trust_remote_code: bool = False) -> Any:
    """The transformers config in a model's folder.

    Raises:
        CheckpointError: there is no readable one.
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
        shapes: by name; a tied weight is there under each of its names.
        names: of each weight's names the one to load it by: for a tied head the embedding's.
        tied: those of the latter that stand for several.
    """

    shapes: Mapping[str, tuple[int, ...]]
    names: Mapping[str, str]
    tied: frozenset[str]

    @classmethod
    def of(cls, model_path: str, trust_remote_code: bool = False) -> ModelWeights:
        """What transformers has for the folder's config; no memory is taken for the weights.

        Raises:
            CheckpointError: there is no readable config.
        """
        import torch
        import transformers

        config = read_model_config(model_path, trust_remote_code)
        auto_class: Any = transformers.AutoModelForCausalLM
        with torch.device("meta"):
            module = auto_class.from_config(config, trust_remote_code=trust_remote_code)
        module.tie_weights()
        weights: dict[str, Tensor] = module.state_dict(keep_vars=True)
        firsts: dict[int, str] = {}
        names = {name: firsts.setdefault(id(weight), name) for name, weight in weights.items()}
        tied = frozenset(first for name, first in names.items() if name != first)
        return cls({name: tuple(weight.shape) for name, weight in weights.items()}, names, tied)


@dataclass
class UpdateCheck:
    """One update, held against what the model has, tensor by tensor."""

    model: ModelWeights
    #: Of each weight that came, by the name to load it by: the name that it came by, and its checksum if tied.
    _seen: dict[str, tuple[str, str]] = field(default_factory=dict)

    def admit(self, name: str, tensor: Tensor) -> str | None:
        """The name to load a tensor by; None for a tied weight that came by another name before.

        Raises:
            WeightSyncError: the model has no such weight, or not of this shape; or it came before, or with
                other values than one that it is tied to.
        """
        shape = self.model.shapes.get(name)
        if shape is None:
            raise WeightSyncError(f"the model has no weight named {name!r}", tensor=name)
        if tuple(tensor.shape) != shape:
            raise WeightSyncError(
                f"weight {name!r} came with shape {tuple(tensor.shape)}; the model's has {shape}", tensor=name
            )
        known = self.model.names[name]
        checksum = _checksum(tensor) if known in self.model.tied else ""
        if known not in self._seen:
            self._seen[known] = (name, checksum)
            return known
        twin, twin_checksum = self._seen[known]
        if twin == name:
            raise WeightSyncError(f"weight {name!r} came twice", tensor=name)
        if twin_checksum != checksum:
            raise WeightSyncError(
                f"weights {twin!r} and {name!r} are one in the model, but came with different values", tensor=name
            )
        return None

    def finish(self, version: int) -> None:
        """Make sure that everything came.

        Raises:
            WeightSyncError: it did not; names the first that is missing.
        """
        missing = [name for name, known in self.model.names.items() if known not in self._seen]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise WeightSyncError(f"version {version} came without {', '.join(missing[:3])}{more}", tensor=missing[0])


def check_adapter(adapter: AdapterWeights, model: ModelWeights) -> None:
    """Make sure that each matrix of an adapter belongs to a weight of the model, and has its other half.

    Raises:
        WeightSyncError: it has no tensors, or names the first that is wrong.
    """
    if not adapter.tensors:
        raise WeightSyncError("the adapter came without tensors")
    rank = int(adapter.config["r"])
    for name, tensor in adapter.tensors.items():
        half = next((each for each in (_LORA_A, _LORA_B) if name.endswith(each)), "")
        module = name.removeprefix(_PREFIX).removesuffix(half)
        shape = model.shapes.get(f"{module}.weight")
        if not half or not name.startswith(_PREFIX) or shape is None or len(shape) != 2:
            raise WeightSyncError(f"adapter tensor {name!r} is not the A or B of a matrix of the model", tensor=name)
        wanted = (rank, shape[1]) if half == _LORA_A else (shape[0], rank)
        if tuple(tensor.shape) != wanted:
            raise WeightSyncError(
                f"adapter tensor {name!r} came with shape {tuple(tensor.shape)}; with r={rank} it has to be {wanted}",
                tensor=name,
            )
        twin = name.removesuffix(half) + (_LORA_B if half == _LORA_A else _LORA_A)
        if twin not in adapter.tensors:
            raise WeightSyncError(f"adapter tensor {name!r} came without {twin!r}", tensor=twin)


def write_adapter(folder: Path, adapter: AdapterWeights) -> None:
    """Write an adapter's two files as PEFT does: ``adapter_config.json`` and ``adapter_model.safetensors``."""
    from safetensors.torch import save_file

    config = {"peft_type": "LORA", **adapter.config}
    (folder / "adapter_config.json").write_text(json.dumps(config, default=_plain))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def _plain(value: Any) -> Any:
    """What JSON has for a value of a PEFT config: sets become lists, and enums their values."""
    return sorted(value) if isinstance(value, (set, frozenset)) else getattr(value, "value", str(value))


def _checksum(tensor: Tensor) -> str:
    from rollcast.protocol import tensor_checksum

    return tensor_checksum(tensor)
