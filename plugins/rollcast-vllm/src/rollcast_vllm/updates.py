"""New weights from this process into vLLM's."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollcast.contracts.weights import WeightReport
from rollcast.errors import RollcastError, WeightSyncError
from rollcast_serving.model_weights import ModelWeights
from rollcast_vllm.buckets import BucketMemory, SharedBucket

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["load_weights"]


async def load_weights(
    llm: Any, buckets: Iterable[Sequence[tuple[str, Tensor]]], expected: ModelWeights, version: int
) -> WeightReport:
    """Load a whole model into an engine that is paused.

    Buckets that can be pickled are gone through by the engine's own processes. Others are copied to them
    one by one, through memory of one bucket's size.

    Returns:
        What came, counted and checked where it arrived.

    Raises:
        WeightSyncError: it is not the model's weights. The engine's are a mixture of old and new then.
    """
    start = time.perf_counter()
    pickled = _pickle(expected, buckets)
    try:
        if pickled is not None:
            parts = await _call(llm, "rollcast_load_all", pickled, version)
        else:
            await _call(llm, "rollcast_load_begin", pickle.dumps(expected))
            parts = await _send_buckets(llm, buckets, version)
        finish = time.perf_counter()
        await _call(llm, "rollcast_load_finish", version)
    except BaseException:
        if not llm.errored:
            await llm.collective_rpc("rollcast_load_abandon")
        raise
    now = time.perf_counter()
    report = _join(parts, version)
    return replace(report, seconds=now - start, load_seconds=report.load_seconds + now - finish)


def _pickle(expected: ModelWeights, buckets: Iterable[Sequence[tuple[str, Tensor]]]) -> bytes | None:
    # Tensors that lie in this process would all be copied into the pickle at once.
    if isinstance(buckets, (list, tuple, Iterator)):
        return None
    try:
        return pickle.dumps((expected, buckets))
    except (TypeError, AttributeError, pickle.PicklingError):
        return None


async def _send_buckets(llm: Any, buckets: Iterable[Sequence[tuple[str, Tensor]]], version: int) -> list[WeightReport]:
    memory = BucketMemory()
    source = iter(buckets)
    parts: list[WeightReport] = []
    try:
        # In another thread, because the source may wait for a sender.
        while (shared := await asyncio.to_thread(_next_bucket, source, memory)) is not None:
            parts += await _call(llm, "rollcast_load_bucket", pickle.dumps(shared), version)
    finally:
        memory.close()
    return parts


def _next_bucket(source: Iterator[Sequence[tuple[str, Tensor]]], memory: BucketMemory) -> SharedBucket | None:
    try:
        bucket = next(source, None)
    except RollcastError:
        raise
    except Exception as error:
        raise WeightSyncError(f"the weights could not be read: {type(error).__name__}: {error}") from error
    return None if bucket is None else memory.put(bucket)


async def _call(llm: Any, method: str, *args: Any) -> list[WeightReport]:
    """Call a method of every worker.

    Returns:
        The first worker's reports, which are those of all.

    Raises:
        WeightSyncError: a worker's error, or workers got different weights.
    """
    answers = [pickle.loads(answer) for answer in await llm.collective_rpc(method, args=args)]
    for answer in answers:
        if isinstance(answer, RollcastError):
            raise answer
    first: list[WeightReport] = answers[0]
    for rank, answer in enumerate(answers):
        if [each.checksums for each in answer] != [each.checksums for each in first]:
            raise WeightSyncError(f"worker {rank} of the engine got other weights than worker 0")
    return first


def _join(parts: Sequence[WeightReport], version: int) -> WeightReport:
    checksums = [checksum for part in parts for checksum in part.checksums.values()]
    return WeightReport(
        version,
        sum(part.tensors for part in parts),
        sum(part.bytes for part in parts),
        0.0,
        {str(number): checksum for number, checksum in enumerate(checksums)},
        sum(part.load_seconds for part in parts),
    )
