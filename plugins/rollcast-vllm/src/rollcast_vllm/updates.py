"""Loading new weights from this process into vLLM's processes."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollcast.contracts.rollout import EngineNode
from rollcast.contracts.weights import WeightReport
from rollcast.errors import RollcastError
from rollcast_serving.engines.updates import dump_remote, join_reports, same_report, share_buckets
from rollcast_serving.model_weights import ModelWeights
from rollcast_vllm.engine import call_workers

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["load_weights"]


async def load_weights(
    llm: Any, buckets: Iterable[Sequence[tuple[str, Tensor]]], expected: ModelWeights, version: int, node: EngineNode
) -> WeightReport:
    """Load a whole model into a paused engine.

    If the buckets can be pickled, the engine's own processes iterate over them. Others are copied to them one by one,
    through memory of one bucket's size.

    Returns:
        The report of the weights, counted and verified in the engine's processes.

    Raises:
        WeightSyncError: the weights do not fit the model. The engine then holds a mixture of old and new weights.
    """
    start = time.perf_counter()
    pickled = None
    # The processes of several data-parallel engines do not know their number among all.
    if llm.vllm_config.parallel_config.data_parallel_size == 1:
        pickled = dump_remote(buckets, lambda: pickle.dumps((expected, buckets)), node)
    try:
        if pickled is not None:
            report = same_report(await _call(llm, "rollcast_load_all", pickled, version), version)
        else:
            await _call(llm, "rollcast_load_begin", pickle.dumps(expected))
            parts: list[WeightReport] = []
            async with aclosing(share_buckets(buckets, node)) as shared:
                async for bucket in shared:
                    answers = await _call(llm, "rollcast_load_bucket", pickle.dumps(bucket), version)
                    parts.append(same_report(answers, version))
            report = join_reports(parts, version)
        finish = time.perf_counter()
        await _call(llm, "rollcast_load_finish", version)
    except BaseException:
        if not llm.errored:
            await llm.collective_rpc("rollcast_load_abandon")
        raise
    now = time.perf_counter()
    return replace(report, seconds=now - start, load_seconds=report.load_seconds + now - finish)


async def _call(llm: Any, method: str, *args: Any) -> list[Any]:
    """Call a method of every worker.

    Returns:
        The workers' answers in rank order.

    Raises:
        RollcastError: a worker's error.
    """
    answers = [pickle.loads(answer) for answer in await call_workers(llm, method, *args)]
    for answer in answers:
        if isinstance(answer, RollcastError):
            raise answer
    return answers
