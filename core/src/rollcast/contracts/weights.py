"""Weights in transit from an engine to a rollout: buckets of named tensors, adapters, and reports of receipt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AdapterWeights", "WeightBucket", "WeightReport"]


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
