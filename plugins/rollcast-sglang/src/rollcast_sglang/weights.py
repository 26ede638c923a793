"""The weights that a model has, by their Hugging Face names, and updates held against them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollcast.errors import CheckpointError, WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ModelWeights", "UpdateCheck", "read_config"]


def read_config(model_path: str, trust_remote_code: bool = False) -> Any:
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
        names: of each weight's names, the one that SGLang loads it by: for a tied head the embedding's.
        tied: those of the latter that stand for several.
    """

    shapes: dict[str, tuple[int, ...]]
    names: dict[str, str]
    tied: frozenset[str]

    @classmethod
    def of(cls, model_path: str, trust_remote_code: bool = False) -> ModelWeights:
        """What transformers has for the folder's config; no memory is taken for the weights.

        Raises:
            CheckpointError: there is no readable config.
        """
        import torch
        import transformers

        config = read_config(model_path, trust_remote_code)
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


def _checksum(tensor: Tensor) -> str:
    from rollcast.protocol.checksum import tensor_checksum

    return tensor_checksum(tensor)
