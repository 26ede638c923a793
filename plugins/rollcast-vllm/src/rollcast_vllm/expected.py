"""The weights that a model has, by their Hugging Face names, and updates held against them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollcast.errors import CheckpointError, WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ExpectedWeights", "WeightChecks", "read_config"]


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
class ExpectedWeights:
    """Names and shapes of a model's weights.

    Attributes:
        shapes: by name, every name of a tied weight included.
        first_names: of each tied weight's further names, the first, by which vLLM loads it.
    """

    shapes: dict[str, tuple[int, ...]]
    first_names: dict[str, str]

    @classmethod
    def of(cls, model_path: str, trust_remote_code: bool = False) -> ExpectedWeights:
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
        shapes: dict[str, tuple[int, ...]] = {}
        first_names: dict[str, str] = {}
        seen: dict[int, str] = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            shapes[name] = tuple(tensor.shape)
            first = seen.setdefault(id(tensor), name)
            if first != name:
                first_names[name] = first
        return cls(shapes, first_names)


class WeightChecks:
    """One update, held against what the model expects, tensor by tensor."""

    def __init__(self, expected: ExpectedWeights) -> None:
        self._expected = expected
        self._loaded: set[str] = set()
        self._tied: dict[str, tuple[str, str]] = {}

    def admit(self, name: str, tensor: Tensor) -> str | None:
        """The name to load a tensor by, None if it is there already by another name.

        Raises:
            WeightSyncError: the model has no such weight, or not of this shape; or it came twice, or tied to
                one with other values.
        """
        shape = self._expected.shapes.get(name)
        if shape is None:
            raise WeightSyncError(f"the model has no weight named {name!r}", tensor=name)
        if tuple(tensor.shape) != shape:
            raise WeightSyncError(
                f"weight {name!r} came with shape {tuple(tensor.shape)}; the model's has {shape}", tensor=name
            )
        first = self._expected.first_names.get(name, name)
        if first in self._expected.first_names.values():
            from rollcast.protocol.checksum import tensor_checksum

            checksum = tensor_checksum(tensor)
            twin, known = self._tied.setdefault(first, (name, checksum))
            if known != checksum:
                raise WeightSyncError(
                    f"weights {twin!r} and {name!r} are one in the model, but came with different values", tensor=name
                )
            if twin != name:
                return None
        if first in self._loaded:
            raise WeightSyncError(f"weight {name!r} came twice", tensor=name)
        self._loaded.add(first)
        return first

    def finish(self, version: int) -> None:
        """Make sure that everything came.

        Raises:
            WeightSyncError: it did not.
        """
        missing = _missing(self._expected, self._loaded)
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise WeightSyncError(f"version {version} came without {', '.join(missing[:3])}{more}", tensor=missing[0])


def _missing(expected: ExpectedWeights, loaded: Iterable[str]) -> list[str]:
    there = set(loaded)
    return [name for name in expected.shapes if expected.first_names.get(name, name) not in there]
