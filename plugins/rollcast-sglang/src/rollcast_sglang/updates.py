"""Carrying an update of the weights, or an adapter, to SGLang's server."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import pickle
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcast.contracts.weights import AdapterWeights, WeightReport
from rollcast.errors import RollcastError, RolloutError, WeightSyncError
from rollcast_serving.model_weights import ModelWeights, check_adapter, write_adapter
from rollcast_serving.receiving import WeightTally
from rollcast_sglang.buckets import BucketMemory, SharedBucket
from rollcast_sglang.client import SglangClient
from rollcast_sglang.server.loading import LoadStep, read_answer
from rollcast_sglang.server_args import CUSTOM_LOADER

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["WeightUpdater"]

Buckets = Iterable[Sequence[tuple[str, "Tensor"]]]


class WeightUpdater:
    """Loads weights into a paused server.

    Args:
        client: of the server.
        weights: what the model has.
        ranks: of the tensor-parallel engine.
        folder: for the ranks' answers and for adapters.
    """

    def __init__(self, client: SglangClient, weights: ModelWeights, ranks: int, folder: Path) -> None:
        self._client = client
        self._weights = weights
        self._ranks = ranks
        self._folder = folder
        self._steps = 0

    async def update(self, buckets: Buckets, version: int) -> WeightReport:
        """Load all of the weights; keys and values from the old ones are forgotten.

        Buckets that can be pickled are gone through in SGLang's own processes; others are copied to them one
        by one, through memory of one bucket's size.

        Raises:
            WeightSyncError: see :meth:`BaseRollout.update_weights`.
            RolloutError: the server failed.
        """
        start = time.perf_counter()
        await self._client.post("/begin_weight_update")
        try:
            whole = self._pickle_whole(buckets, version)
            if whole is not None:
                report = await self._load(*whole)
            else:
                report = await self._send_by_bucket(buckets, version)
        finally:
            # A dead server has nothing to end, and the first error says why.
            with suppress(RolloutError):
                await self._client.post("/end_weight_update")
        await self._client.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        # A prompt's keys and values from the old weights would otherwise be used for the same prompt again.
        await self._client.post("/flush_cache")
        return dataclasses.replace(report, seconds=time.perf_counter() - start)

    async def load_adapter(self, name: str, adapter: AdapterWeights, version: int) -> WeightReport:
        """Load an adapter under a name that is not in use.

        Raises:
            WeightSyncError: it does not fit the model, or SGLang did not take it.
        """
        check_adapter(adapter, self._weights)
        start = time.perf_counter()
        tally = WeightTally([list(adapter.tensors.items())])
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            for bucket in tally:
                write_adapter(Path(folder), AdapterWeights(adapter.config, dict(bucket)))
                try:
                    await self._client.post("/load_lora_adapter", {"lora_name": name, "lora_path": folder})
                except RolloutError as error:
                    raise WeightSyncError(f"the adapter of version {version} was not loaded: {error}") from error
        return dataclasses.replace(tally.report(version), seconds=time.perf_counter() - start)

    def _pickle_whole(self, buckets: Any, version: int) -> tuple[LoadStep, str] | None:
        # Tensors that lie in this process would all be copied into the pickle at once.
        if isinstance(buckets, (list, tuple, Iterator)):
            return None
        if dataclasses.is_dataclass(buckets) and hasattr(buckets, "readers"):
            # The sender waits for each process that goes through them.
            buckets = dataclasses.replace(buckets, readers=self._ranks)  # type: ignore[type-var]
        step = LoadStep(self._answer_path(), version, self._weights, buckets, ends=True)
        try:
            return step, step.encode()
        except (TypeError, AttributeError, pickle.PicklingError):
            return None

    async def _send_by_bucket(self, buckets: Buckets, version: int) -> WeightReport:
        memory = BucketMemory()
        reports: list[WeightReport] = []
        try:
            await self._load(LoadStep(self._answer_path(), version, self._weights))
            waiting = iter(buckets)
            while True:
                # In a thread: the buckets may have to be waited for.
                bucket = await asyncio.to_thread(_next_bucket, waiting, memory)
                if bucket is None:
                    break
                reports.append(await self._load(LoadStep(self._answer_path(), version, buckets=bucket)))
            await self._load(LoadStep(self._answer_path(), version, ends=True))
        finally:
            memory.close()
        return _join(reports, version)

    async def _load(self, step: LoadStep, encoded: str | None = None) -> WeightReport:
        body = {
            "serialized_named_tensors": [_carry(encoded or step.encode())] * self._ranks,
            "load_format": CUSTOM_LOADER,
            "flush_cache": False,
        }
        await self._client.post("/update_weights_from_tensor", body)
        return await asyncio.to_thread(read_answer, step, self._ranks)

    def _answer_path(self) -> str:
        self._steps += 1
        return str(self._folder / f"answer-{self._steps}")


def _next_bucket(buckets: Iterator[Sequence[tuple[str, Tensor]]], memory: BucketMemory) -> SharedBucket | None:
    try:
        bucket = next(buckets, None)
    except RollcastError:
        raise
    except Exception as error:
        raise WeightSyncError(f"the weights could not be read: {type(error).__name__}: {error}") from error
    return None if bucket is None else memory.put(bucket)


def _join(reports: Sequence[WeightReport], version: int) -> WeightReport:
    return WeightReport(
        version,
        sum(report.tensors for report in reports),
        sum(report.bytes for report in reports),
        0.0,
        {str(number): checksum for number, report in enumerate(reports) for checksum in report.checksums.values()},
        sum(report.load_seconds for report in reports),
    )


def _carry(text: str) -> str:
    """A text as the name of an empty tensor, in the encoding that SGLang reads tensors in."""
    import torch

    buffer = io.BytesIO()
    pickle.dump([(text, torch.empty(0))], buffer)
    return base64.b64encode(buffer.getvalue()).decode()
