"""Sending an update of the weights, or an adapter, to SGLang's server."""

from __future__ import annotations

import base64
import dataclasses
import io
import pickle
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rollcast.contracts.rollout import EngineNode
from rollcast.contracts.weights import AdapterWeights, WeightReport
from rollcast.errors import RolloutError, WeightSyncError
from rollcast_serving.engines.steps import StepUpdater
from rollcast_serving.model_weights import ModelWeights, check_adapter, write_adapter
from rollcast_serving.receiving import WeightTally
from rollcast_sglang.client import SglangClient
from rollcast_sglang.server_args import CUSTOM_LOADER

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["WeightUpdater"]

Buckets = Iterable[Sequence[tuple[str, "Tensor"]]]


class WeightUpdater:
    """Loader of weights into a paused server.

    Args:
        client: client of the server.
        weights: names and shapes of the model's weights.
        ranks: number of tensor-parallel ranks.
        folder: folder for the ranks' answers and for adapters.
        node: this process's place in the engine.
    """

    def __init__(self, client: SglangClient, weights: ModelWeights, ranks: int, folder: Path, node: EngineNode) -> None:
        self._client = client
        self._weights = weights
        self._ranks = ranks
        self._folder = folder
        self._steps = StepUpdater(self._carry, "SGLang", weights, ranks, folder, node)

    async def update(self, buckets: Buckets, version: int) -> WeightReport:
        """Load all weights, and drop keys and values of the old ones.

        Raises:
            WeightSyncError: see :meth:`BaseRollout.update_weights`.
            RolloutError: the server failed.
        """
        start = time.perf_counter()
        await self._client.change("/begin_weight_update")
        try:
            report = await self._steps.update(buckets, version)
        finally:
            # A dead server has no update to end, and the first error has the reason.
            with suppress(RolloutError):
                await self._client.change("/end_weight_update")
        await self._client.change("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        # Otherwise a prompt's cached keys and values from the old weights would be reused.
        await self._client.change("/flush_cache")
        return dataclasses.replace(report, seconds=time.perf_counter() - start)

    async def load_adapter(self, name: str, adapter: AdapterWeights, version: int) -> WeightReport:
        """Load an adapter under an unused name.

        Raises:
            WeightSyncError: it does not fit the model, or SGLang rejected it.
        """
        check_adapter(adapter, self._weights)
        start = time.perf_counter()
        tally = WeightTally([list(adapter.tensors.items())])
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            for bucket in tally:
                write_adapter(Path(folder), AdapterWeights(adapter.config, dict(bucket)))
                try:
                    await self._client.change("/load_lora_adapter", {"lora_name": name, "lora_path": folder})
                except RolloutError as error:
                    raise WeightSyncError(f"the adapter of version {version} was not loaded: {error}") from error
        return dataclasses.replace(tally.report(version), seconds=time.perf_counter() - start)

    async def _carry(self, step: str) -> None:
        body = {
            "serialized_named_tensors": [_encode_name(step)] * self._ranks,
            "load_format": CUSTOM_LOADER,
            "flush_cache": False,
        }
        await self._client.change("/update_weights_from_tensor", body)


def _encode_name(text: str) -> str:
    """Return a text as the name of an empty tensor, in SGLang's encoding of tensors."""
    import torch

    buffer = io.BytesIO()
    pickle.dump([(text, torch.empty(0))], buffer)
    return base64.b64encode(buffer.getvalue()).decode()
