"""Passing an update of the weights on to an engine's own processes."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from rollcast.contracts.rollout import EngineNode
from rollcast.contracts.weights import WeightReport
from rollcast.errors import RollcastError, WeightSyncError
from rollcast_serving.bucket_memory import BucketMemory, ServedBucket, SharedBucket

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["dump_remote", "join_reports", "same_report", "share_buckets"]

Buckets = Iterable[Sequence[tuple[str, "Tensor"]]]
T = TypeVar("T")


def dump_remote(buckets: Buckets, dump: Callable[[], T], node: EngineNode) -> T | None:
    """Return ``dump()``, which pickles the buckets, if the engine's processes can iterate over them themselves.

    Returns:
        None if the buckets exist only in this process, or can be read only on its node; see :func:`share_buckets`.
    """
    # Tensors of this process would all be copied into the pickle at once.
    if node.nodes > 1 or isinstance(buckets, (list, tuple, Iterator)):
        return None
    try:
        return dump()
    except (TypeError, AttributeError, pickle.PicklingError):
        return None


async def share_buckets(buckets: Buckets, node: EngineNode) -> AsyncGenerator[SharedBucket | ServedBucket, None]:
    """Yield buckets one by one in memory that the engine's processes map; each is valid until the next.

    Args:
        buckets: buckets that this process can read.
        node: this process's place in the engine; if the engine spans nodes, its processes fetch the buckets.

    Raises:
        WeightSyncError: a bucket cannot be read from its source.
    """
    memory = BucketMemory(node.host if node.nodes > 1 else None)
    source = iter(buckets)
    try:
        # In another thread, because the source may wait for a sender.
        while (shared := await asyncio.to_thread(_next_bucket, source, memory)) is not None:
            yield shared
    finally:
        memory.close()


def _next_bucket(
    source: Iterator[Sequence[tuple[str, Tensor]]], memory: BucketMemory
) -> SharedBucket | ServedBucket | None:
    try:
        bucket = next(source, None)
    except RollcastError:
        raise
    except Exception as error:
        raise WeightSyncError(f"the weights could not be read: {type(error).__name__}: {error}") from error
    return None if bucket is None else memory.put(bucket)


def same_report(answers: Sequence[WeightReport | RollcastError], version: int) -> WeightReport:
    """Return the first rank's report after checking that all ranks report the same.

    Args:
        answers: a report or an error of each rank.
        version: version of the update, for messages.

    Raises:
        RollcastError: a rank's error.
        WeightSyncError: ranks received different weights.
    """
    reports: list[WeightReport] = []
    for answer in answers:
        if isinstance(answer, RollcastError):
            raise answer
        reports.append(answer)
    for rank, report in enumerate(reports):
        if report.checksums != reports[0].checksums:
            raise WeightSyncError(f"rank {rank} of the engine got weights of version {version} unlike rank 0's")
    return reports[0]


def join_reports(parts: Sequence[WeightReport], version: int) -> WeightReport:
    """Return the report of an update whose buckets were reported one by one; its ``seconds`` are 0."""
    checksums = [checksum for part in parts for checksum in part.checksums.values()]
    return WeightReport(
        version,
        sum(part.tensors for part in parts),
        sum(part.bytes for part in parts),
        0.0,
        {str(number): checksum for number, checksum in enumerate(checksums)},
        sum(part.load_seconds for part in parts),
    )
