"""The receiving side of weights: counting and verifying buckets, and buckets that several processes read.

Example, in a rollout's ``update_weights``::

    tally = WeightTally(buckets)
    for bucket in tally:
        for name, tensor in bucket:
            ...
    return tally.report(version)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rollcast.contracts.weights import WeightBucket, WeightReport
from rollcast.errors import WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BucketsForReaders", "WeightTally"]


@runtime_checkable
class BucketsForReaders(Protocol):
    """Remote buckets that several processes of one engine may read, each once."""

    def for_reader(self, index: int, count: int) -> Iterable[Sequence[tuple[str, Tensor]]]:
        """Return all buckets for process ``index`` of ``count``; each of the ``count`` processes must read its own."""
        ...


class WeightTally:
    """An iterator over buckets that counts and verifies each before yielding it.

    Args:
        buckets: sequences of ``(name, tensor)``, or :class:`WeightBucket` with expected checksums.

    Raises:
        WeightSyncError: during iteration, if a tensor is corrupt or missing.
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
            self._verify(bucket)
            yielded = time.perf_counter()
            yield bucket
            self._outside += time.perf_counter() - yielded

    def _verify(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        from rollcast.protocol import combine_checksums, tensor_checksum

        expected = dict(bucket.expected) if isinstance(bucket, WeightBucket) else {}
        checksums: list[tuple[str, str]] = []
        for name, tensor in bucket:
            checksum = tensor_checksum(tensor)
            if expected.pop(name, checksum) != checksum:
                raise WeightSyncError(f"weight {name!r} is corrupt: it differs from what was sent", tensor=name)
            checksums.append((name, checksum))
            self._tensors += 1
            self._bytes += tensor.numel() * tensor.element_size()
        if expected:
            name = next(iter(expected))
            raise WeightSyncError(f"weight {name!r} was announced but did not arrive", tensor=name)
        self._checksums[str(len(self._checksums))] = combine_checksums(checksums)

    def report(self, version: int) -> WeightReport:
        """Return the report of the update, after the iteration."""
        seconds = time.perf_counter() - self._start
        return WeightReport(version, self._tensors, self._bytes, seconds, dict(self._checksums), self._outside)
