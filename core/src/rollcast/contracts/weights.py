"""Weights in transit from an engine to a rollout: buckets of named tensors, adapters, and reports of receipt.

Weights travel by the names of the model's checkpoint. A module that keeps the experts of a layer in one tensor has
other names; :class:`StackedWeights` maps them.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AdapterWeights",
    "StackedWeights",
    "WeightBucket",
    "WeightReport",
    "checkpoint_tensors",
    "find_stacked",
    "has_prefixed_files",
    "keep_float32",
    "split_stacked",
]


@dataclass(frozen=True)
class WeightReport:
    """A replica's report of a weight update.

    Attributes:
        version: version of the weights with which the rollout generates from now on.
        tensors, bytes: number of tensors and bytes received.
        seconds: duration of the update.
        checksums: checksum of each bucket, by bucket number from 0.
        load_seconds: part of ``seconds`` that the rollout spent on loading.
    """

    version: int
    tensors: int
    bytes: int
    seconds: float
    checksums: Mapping[str, str]
    load_seconds: float = 0.0


@dataclass(frozen=True)
class AdapterWeights:
    """A LoRA adapter in PEFT's format.

    Attributes:
        config: content of ``adapter_config.json`` (``r``, ``lora_alpha``, ``target_modules``, ...).
        tensors: ``...lora_A.weight`` ``[r, in]`` and ``...lora_B.weight`` ``[out, r]`` by PEFT's names.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def config_json(self) -> str:
        """Serialize ``config`` as PEFT's ``adapter_config.json``; sets become lists and enums their values."""

        def plain(value: Any) -> Any:
            return sorted(value) if isinstance(value, (set, frozenset)) else getattr(value, "value", str(value))

        return json.dumps({"peft_type": "LORA", **self.config}, default=plain)


@dataclass(frozen=True)
class WeightBucket(Sequence[tuple[str, "Tensor"]]):
    """Named tensors that arrived together, with the sender's checksums.

    The tensors may be views of a buffer that the next bucket overwrites: copy those to keep.

    Attributes:
        named: pairs of name and tensor, in the sender's order.
        expected: the sender's :func:`~rollcast.protocol.tensor_checksum` by name.
    """

    named: Sequence[tuple[str, Tensor]]
    expected: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.named)

    def __getitem__(self, index: Any) -> Any:
        return self.named[index]


@dataclass(frozen=True)
class StackedWeights:
    """A kind of tensor in which a module stacks a matrix, or several, of each expert.

    Attributes:
        stacked: end of the tensor's name in the module, such as ``mlp.experts.gate_up_proj``; its shape is
            ``[experts, rows, columns]``.
        sources: ends of the matrices' names in a checkpoint, with ``*`` for the expert's number, in the order of their
            rows.
    """

    stacked: str
    sources: tuple[str, ...]

    def parts(self, name: str, shape: Sequence[int]) -> dict[str, tuple[int, slice]] | None:
        """Return expert and rows of each matrix by its checkpoint name; None if this kind does not include ``name``."""
        prefix = name.removesuffix(self.stacked)
        if prefix == name or (prefix and not prefix.endswith(".")):
            return None
        rows = shape[1] // len(self.sources)
        return {
            prefix + source.replace("*", str(expert)): (expert, slice(place * rows, (place + 1) * rows))
            for expert in range(shape[0])
            for place, source in enumerate(self.sources)
        }


def find_stacked(model: Any) -> tuple[StackedWeights, ...] | None:
    """Return the kinds of stacked tensors of a transformers model; None if its files are converted in other ways too.

    Versions of transformers before 5 keep each expert as a module, with the names of the checkpoint.
    """
    stacked = []
    for rule in _conversions(model):
        if _is_prefix(rule):
            continue
        steps = [(type(step).__name__, getattr(step, "dim", None)) for step in getattr(rule, "operations", None) or ()]
        sources, targets = tuple(rule.source_patterns), tuple(rule.target_patterns)
        is_plain = all("\\" not in pattern for pattern in (*sources, *targets))
        stacks = is_plain and steps[:1] == [("MergeModulelist", 0)] and steps[1:] in ([], [("Concatenate", 1)])
        if not stacks or len(targets) != 1 or any(source.count("*") != 1 for source in sources):
            return None
        stacked.append(StackedWeights(targets[0], sources))
    return tuple(stacked)


def has_prefixed_files(model: Any) -> bool:
    """Return True if transformers also reads files in which the names have a prefix, as those of a larger model."""
    return any(_is_prefix(rule) for rule in _conversions(model))


def keep_float32(model: Any) -> None:
    """Convert the buffers to float32 that transformers loads so in every dtype, such as the bias of a router.

    A transformers model that is built from its config has them in its own dtype.
    """
    names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and any(f".{module_name}." in f".{name}." for module_name in names):
            buffer.data = buffer.data.float()


def _conversions(model: Any) -> Sequence[Any]:
    try:
        mapping = importlib.import_module("transformers.conversion_mapping")
    except ImportError:
        return ()
    return mapping.get_model_conversion_mapping(model, add_legacy=False) or ()


def _is_prefix(rule: Any) -> bool:
    return type(rule).__name__ == "PrefixChange"


def split_stacked(kinds: Sequence[StackedWeights], name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the matrices of a stacked tensor by their checkpoint names, as views; any other tensor as it is."""
    for kind in kinds:
        parts = kind.parts(name, tensor.shape)
        if parts is not None:
            return {source: tensor[expert, rows] for source, (expert, rows) in parts.items()}
    return {name: tensor}


def checkpoint_tensors(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a transformers model's tensors by their checkpoint names; stacked ones become views of their matrices."""
    kinds = find_stacked(model) or ()
    return {name: part for key, tensor in tensors.items() for name, part in split_stacked(kinds, key, tensor).items()}
