"""The receiving end of a weight sync, in a process of its own beside the training on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollcast.contracts.weights import WeightBucket, WeightReport
from rollcast.protocol import combine_checksums, tensor_checksum
from rollcast_dryrun.mode import active_mode
from rollcast_dryrun.record import Recorder
from rollcast_engine.weights import WeightFolder
from rollcast_serving.contracts.weight_sync import weight_syncs

__all__ = ["DryReplica"]


class DryReplica:
    """A replica as the target of a weight sync; see :class:`rollcast_serving.contracts.weight_sync.RemoteRollout`.

    It runs the sync's own receiving end, and copies the weights into its own, in bfloat16, as an engine does.

    Args:
        folder: folder of the model.
        shards: ranks that share each matrix.
        node: address of its node.
    """

    def __init__(self, folder: Path, shards: int = 1, node: str = "") -> None:
        self.node = node
        self._mode = active_mode()
        self._process = self._mode.add_process()
        self._folder = folder
        self._shards = shards
        self._weights: dict[str, Tensor] = {}

    @property
    def recorder(self) -> Recorder:
        """The record of the replica's process."""
        return self._process.recorder

    def wake(self) -> None:
        """Allocate the weights, which an engine does when it wakes up."""
        files = WeightFolder(self._folder)
        with self._mode.run_as(self._process):
            for name, shape in files.shapes.items():
                numel = math.prod(shape) // (self._shards if len(shape) > 1 else 1)
                self._weights[name] = torch.empty(numel, dtype=torch.bfloat16, device="cuda")

    def receive_weights(self, sync: str, source: Mapping[str, Any], version: int) -> WeightReport:
        """Receive and load weights."""
        with self._mode.run_as(self._process):
            checksums: dict[str, str] = {}
            tensors = nbytes = 0
            for bucket in weight_syncs.get(sync).open(source):
                # Each end of a dry run knows the values of other tensors, so their checksums differ.
                checksums[str(len(checksums))] = combine_checksums(bucket.expected.items())
                tensors += len(bucket)
                nbytes += sum(tensor.nbytes for _, tensor in bucket)
                self._load(bucket)
            return WeightReport(version, tensors, nbytes, 0.0, checksums)

    def _load(self, bucket: WeightBucket) -> None:
        for name, tensor in bucket:
            if tensor.device.type == "cuda":
                tensor_checksum(tensor)
            if name not in self._weights:  # of an adapter
                self._weights[name] = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cuda")
            weight = self._weights[name]
            weight.copy_(tensor.reshape(-1)[: len(weight)])
