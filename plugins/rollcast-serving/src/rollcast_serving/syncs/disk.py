"""Weight sync ``disk``: safetensors files in a folder that both ends see, also by an fsspec URL."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from safetensors import SafetensorError

from rollcast.contracts.rollout import RolloutMode
from rollcast.contracts.weights import WeightBucket
from rollcast.errors import WeightSyncError
from rollcast_serving.contracts.weight_sync import WeightSyncCapabilities
from rollcast_serving.syncs.folder import SharedFolder
from rollcast_serving.syncs.sending import BucketSync, Receivers, Transport

__all__ = ["DiskSync", "FileWriter", "read_files", "temporary_folder"]

_MANIFEST = "manifest.json"


class DiskSync(BucketSync):
    """The weight sync ``disk``: one file per bucket; the folder is removed once every target has loaded it."""

    name: ClassVar[str] = "disk"
    capabilities: ClassVar[WeightSyncCapabilities] = WeightSyncCapabilities(modes=frozenset(RolloutMode))

    @contextmanager
    def transport(self) -> Iterator[Transport]:
        with temporary_folder(self.settings.folder) as folder:
            yield FileWriter(folder)

    @classmethod
    def open(cls, source: Mapping[str, Any]) -> Iterator[WeightBucket]:
        """Return the buckets in a target's process; see :meth:`BaseWeightSync.open`.

        Raises:
            WeightSyncError: during iteration, if a file is missing or malformed.
        """
        return read_files(source["folder"])


@contextmanager
def temporary_folder(parent: str | None) -> Iterator[SharedFolder]:
    """Yield a new folder for one sync, in ``parent`` or in the node's temporary folder, and remove it afterwards."""
    folder = SharedFolder(f"{parent or tempfile.gettempdir()}/weights-{secrets.token_hex(8)}")
    folder.make()
    try:
        yield folder
    finally:
        folder.remove()


class FileWriter(Transport):
    """Writer of one file per bucket, and a manifest last; targets are called when all files exist.

    Args:
        folder: folder for the files.
    """

    calls_first: ClassVar[bool] = False

    def __init__(self, folder: SharedFolder) -> None:
        self._folder = folder
        self._manifest: list[dict[str, Any]] = []
        self.source = {"folder": folder.url}

    def send(self, bucket: WeightBucket, receivers: Receivers) -> None:  # no target receives yet
        name = f"bucket_{len(self._manifest):05d}.safetensors"
        self._folder.save(name, dict(bucket))
        self._manifest.append({"file": name, "checksums": dict(bucket.expected)})

    def finish(self, receivers: Receivers) -> None:  # no target receives yet
        self._folder.write_text(_MANIFEST, json.dumps(self._manifest))


def read_files(url: str) -> Iterator[WeightBucket]:
    """Yield the buckets of a folder that a :class:`FileWriter` wrote.

    Raises:
        WeightSyncError: a file is missing or malformed.
    """
    try:
        folder = SharedFolder(url)
        for entry in json.loads(folder.read_text(_MANIFEST)):
            tensors = folder.load(entry["file"])
            order = [name for name in entry["checksums"] if name in tensors]
            yield WeightBucket([(name, tensors[name]) for name in order], entry["checksums"])
    except (OSError, ValueError, SafetensorError) as error:
        raise WeightSyncError(f"weights in {url} cannot be read: {error}") from error
