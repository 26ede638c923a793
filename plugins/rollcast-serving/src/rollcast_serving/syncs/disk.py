"""Weight sync ``disk``: safetensors files in a folder that both ends see, complete or not there at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollcast.contracts.rollout import RolloutMode
from rollcast.contracts.weights import WeightBucket
from rollcast.errors import WeightSyncError
from rollcast_serving.syncs.sending import BucketSync, Receivers, Transport
from rollcast_serving.weight_sync import WeightSyncCapabilities

__all__ = ["DiskSync"]

_MANIFEST = "manifest.json"


class DiskSync(BucketSync):
    """One file a bucket. The folder is removed once every target has loaded it."""

    name: ClassVar[str] = "disk"
    capabilities: ClassVar[WeightSyncCapabilities] = WeightSyncCapabilities(modes=frozenset(RolloutMode))

    @contextmanager
    def transport(self) -> Iterator[Transport]:
        parent = self.settings.folder
        if parent is not None:
            Path(parent).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="weights-", dir=parent) as folder:
            yield _Writer(Path(folder))

    @classmethod
    def open(cls, source: Mapping[str, Any]) -> Iterator[WeightBucket]:
        """See :meth:`BaseWeightSync.open`.

        Raises:
            WeightSyncError: from the iteration; a file is missing or malformed.
        """
        return _read(Path(source["folder"]))


class _Writer(Transport):
    calls_first: ClassVar[bool] = False

    def __init__(self, folder: Path) -> None:
        self._partial, self._folder = folder / "partial", folder / "complete"
        self._partial.mkdir()
        self._manifest: list[dict[str, Any]] = []
        self.source = {"folder": str(self._folder)}

    def send(self, bucket: WeightBucket, receivers: Receivers) -> None:  # nobody receives yet
        name = f"bucket_{len(self._manifest):05d}.safetensors"
        save_file({key: tensor.detach().contiguous().cpu() for key, tensor in bucket}, self._partial / name)
        self._manifest.append({"file": name, "checksums": dict(bucket.expected)})

    def finish(self, receivers: Receivers) -> None:  # nobody receives yet
        (self._partial / _MANIFEST).write_text(json.dumps(self._manifest))
        if self._folder.exists():
            shutil.rmtree(self._folder)
        self._partial.rename(self._folder)


def _read(folder: Path) -> Iterator[WeightBucket]:
    try:
        for entry in json.loads((folder / _MANIFEST).read_text()):
            tensors = load_file(folder / entry["file"])
            order = [name for name in entry["checksums"] if name in tensors]
            yield WeightBucket([(name, tensors[name]) for name in order], entry["checksums"])
    except (OSError, ValueError, SafetensorError) as error:
        raise WeightSyncError(f"weights in {folder} cannot be read: {error}") from error
