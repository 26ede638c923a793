"""Weights on their way from an engine to a rollout: buckets of named tensors, counted and checked.

Example, in a rollout's ``update_weights``::

    tally = WeightTally(buckets)
    for bucket in tally:
        for name, tensor in bucket:
            ...
    return tally.report(version)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rollcast.errors import WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AdapterWeights", "BucketsForReaders", "WeightBucket", "WeightReport", "WeightTally"]


@dataclass(frozen=True)
class WeightReport:
    """What arrived in a weight update: the replica's side of the attestation.

    Attributes:
        version: of the weights that the rollout generates with now.
        tensors, bytes: how many came.
        seconds: how long it took.
        checksums: of each bucket, by its number from 0.
        load_seconds: the part of ``seconds`` that the rollout's own loading took.
    """

    version: int
    tensors: int
    bytes: int
    seconds: float
    checksums: Mapping[str, str]
    load_seconds: float = 0.0


@dataclass(frozen=True)
class AdapterWeights:
    """A LoRA adapter in PEFT's terms.

    Attributes:
        config: PEFT's ``adapter_config.json`` (``r``, ``lora_alpha``, ``target_modules``, ...).
        tensors: ``...lora_A.weight`` ``[r, in]`` and ``...lora_B.weight`` ``[out, r]`` by PEFT's names.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class WeightBucket(Sequence[tuple[str, "Tensor"]]):
    """Named tensors that arrived together, and the checksums that their sender gave them.

    The tensors may lie in a buffer that is used again for the next bucket: what is to stay has to be
    copied.

    Attributes:
        named: name and tensor, in the sender's order.
        expected: :func:`~rollcast.protocol.tensor_checksum` by name.
    """

    named: Sequence[tuple[str, Tensor]]
    expected: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.named)

    def __getitem__(self, index: Any) -> Any:
        return self.named[index]


@runtime_checkable
class BucketsForReaders(Protocol):
    """Buckets from elsewhere that several processes of one engine may go through, each once."""

    def for_reader(self, index: int, count: int) -> Iterable[Sequence[tuple[str, Tensor]]]:
        """All of them for process ``index`` of ``count``; every one of the ``count`` has to go through its own."""
        ...


class WeightTally:
    """Goes through buckets once: counts them, and checks each before it is handed on.

    Args:
        buckets: plain sequences of ``(name, tensor)``, or :class:`WeightBucket` with what to expect.

    Raises:
        WeightSyncError: from the iteration; a tensor is not the one that was sent, or did not come.
    """

    def __init__(self, buckets: Iterable[Sequence[tuple[str, Tensor]]]) -> None:
        self._buckets = buckets
        self._tensors = 0
        self._bytes = 0
        self._checksums: dict[str, str] = {}
        self._start = time.perf_counter()
        self._outside = 0.0

    def __iter__(self) -> Iterator[Sequence[tuple[str, Tensor]]]:
        for bucket in self._buckets:
            self._take(bucket)
            handed = time.perf_counter()
            yield bucket
            self._outside += time.perf_counter() - handed

    def _take(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        from rollcast.protocol import combine_checksums, tensor_checksum

        expected = dict(bucket.expected) if isinstance(bucket, WeightBucket) else {}
        found: list[tuple[str, str]] = []
        for name, tensor in bucket:
            checksum = tensor_checksum(tensor)
            if expected.pop(name, checksum) != checksum:
                raise WeightSyncError(f"weight {name!r} arrived with other bytes than were sent", tensor=name)
            found.append((name, checksum))
            self._tensors += 1
            self._bytes += tensor.numel() * tensor.element_size()
        if expected:
            name = next(iter(expected))
            raise WeightSyncError(f"weight {name!r} was announced and did not arrive", tensor=name)
        self._checksums[str(len(self._checksums))] = combine_checksums(found)

    def report(self, version: int) -> WeightReport:
        """What came, once the iteration is over."""
        seconds = time.perf_counter() - self._start
        return WeightReport(version, self._tensors, self._bytes, seconds, dict(self._checksums), self._outside)
