"""The weight sync ``my_plugin``: files of raw bytes in a folder that trainer and replicas see."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

from rollcast.contracts.rollout import RolloutMode
from rollcast.contracts.weights import WeightBucket
from rollcast.errors import WeightSyncError
from rollcast_serving.contracts.weight_sync import WeightSyncCapabilities
from rollcast_serving.syncs.sending import BucketSync, Receivers, Transport


class MyPlugin(BucketSync):
    """A sync that writes each bucket as a file, and then calls the replicas.

    ``BucketSync`` packs the buckets, calls the replicas and verifies their reports.
    """

    name: ClassVar[str] = "my_plugin"
    capabilities: ClassVar[WeightSyncCapabilities] = WeightSyncCapabilities(modes=frozenset(RolloutMode))

    @contextmanager
    def transport(self) -> Iterator[Transport]:
        """Yield the transport of one sync; its files are removed when every replica has read them."""
        folder = Path(tempfile.mkdtemp(dir=self.settings.folder))
        try:
            yield Files(folder)
        finally:
            shutil.rmtree(folder)

    @classmethod
    def open(cls, source: Mapping[str, Any]) -> Iterator[WeightBucket]:
        """Yield the buckets, in a replica's process."""
        folder = Path(source["folder"])
        try:
            for number, entries in enumerate(json.loads((folder / "index.json").read_text())):
                yield read_bucket((folder / str(number)).read_bytes(), entries)
        except OSError as error:
            raise WeightSyncError(f"weights in {folder} cannot be read: {error}") from error


class Files(Transport):
    """The sending end: one file per bucket, and an index when all are written."""

    calls_first: ClassVar[bool] = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index: list[list[dict[str, Any]]] = []
        self.source = {"folder": str(folder)}

    def send(self, bucket: WeightBucket, receivers: Receivers) -> None:
        """Write a bucket."""
        entries = []
        with (self.folder / str(len(self.index))).open("wb") as stream:
            for name, tensor in bucket:
                entry = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
                entries.append({**entry, "checksum": bucket.expected[name]})
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                stream.write(flat.view(torch.uint8).numpy().tobytes())
        self.index.append(entries)

    def finish(self, receivers: Receivers) -> None:
        """Write the index; the replicas are called afterwards."""
        (self.folder / "index.json").write_text(json.dumps(self.index))


def read_bucket(data: bytes, entries: list[dict[str, Any]]) -> WeightBucket:
    """Return the tensors of a file, with the sender's checksums."""
    named, at, memory = [], 0, bytearray(data)
    for entry in entries:
        dtype = getattr(torch, entry["dtype"])
        tensor = torch.empty(entry["shape"], dtype=dtype)
        size = tensor.numel() * tensor.element_size()
        if size:
            tensor.view(-1).copy_(
                torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=at).clone().view(dtype)
            )
        named.append((entry["name"], tensor))
        at += size
    return WeightBucket(named, {entry["name"]: entry["checksum"] for entry in entries})
