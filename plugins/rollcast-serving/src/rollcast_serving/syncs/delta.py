"""Weight sync ``delta``: only the elements that changed since a replica's last update, in files.

A training step at a small learning rate leaves most bfloat16 weights bit for bit unchanged. The sender keeps a copy of
the weights that it sent last, and writes the positions and values of the elements that differ; a replica keeps a copy
too, and patches it. Both copies are in host memory, in the rollout's dtype. Every patched tensor is verified as a
whole, so a patch on weights other than the sender's is refused.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from rollcast.contracts.rollout import RolloutMode
from rollcast.contracts.weights import WeightBucket, WeightReport
from rollcast.errors import WeightSyncError
from rollcast_serving.contracts.weight_sync import Delivery, WeightSyncCapabilities
from rollcast_serving.syncs.disk import temporary_folder
from rollcast_serving.syncs.folder import SharedFolder
from rollcast_serving.syncs.sending import BucketSync, Receivers, Transport

__all__ = ["DeltaSync"]

_MANIFEST = "manifest.json"
#: Integer dtypes of an element's width, to compare bits: NaN differs from itself, and 0 equals -0.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Bytes of a position. A tensor is sent whole if its positions and values would take more.
_POSITION = 4
_MOST_POSITIONS = 2**31


class DeltaSync(BucketSync):
    """The weight sync ``delta``; see the module. A replica that is new, or whose last update failed, gets all
    tensors whole.
    """

    name: ClassVar[str] = "delta"
    capabilities: ClassVar[WeightSyncCapabilities] = WeightSyncCapabilities(modes=frozenset(RolloutMode))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last = _Last()
        #: By target, the name under which its process stores the weights that it received last.
        self._holders: dict[Any, str] = {}
        #: Targets that hold the weights of the last sync.
        self._current: set[Any] = set()
        #: Bytes that the last transport wrote to files.
        self.written_bytes = 0
        self._names: list[str] = []
        self._lacking: set[str] = set()

    async def sync(self, version: int, only_adapter: bool = False) -> list[Delivery]:
        """Send the weights; see :meth:`BucketSync.sync`."""
        keys = [getattr(target, "address", target) for target in self.targets]
        known, self._current = self._current, set()  # after a failure every replica gets all tensors
        try:
            # A target keeps its name, so that its process replaces its old copy.
            self._names = [self._holders.setdefault(key, secrets.token_hex(8)) for key in keys]
            self._lacking = {name for name, key in zip(self._names, keys, strict=True) if key not in known}
            deliveries = await super().sync(version, only_adapter)
        except BaseException:
            self._last = _Last()
            raise
        done = zip(keys, deliveries, strict=True)
        self._current = {key for key, result in done if isinstance(result, WeightReport)}
        return deliveries

    @contextmanager
    def transport(self) -> Iterator[Transport]:
        with temporary_folder(self.settings.folder) as folder:
            writer = _Writer(folder, self._last, self._names, self._lacking)
            yield writer
            self.written_bytes = writer.written_bytes

    @classmethod
    def open(cls, source: Mapping[str, Any]) -> Iterator[WeightBucket]:
        """Return the buckets in a target's process; see :meth:`BaseWeightSync.open`.

        Raises:
            WeightSyncError: during iteration, if a file is missing or malformed, or this process has no weights to
                patch.
        """
        return _read(source)

    def close(self) -> None:
        self._last, self._holders, self._current = _Last(), {}, set()


@dataclass
class _Last:
    """The weights of the last update, in host memory."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def difference(self, name: str, tensor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return positions, int32 ``[K]``, and values ``[K]`` of the changed elements; None to send all elements.

        Args:
            name: name of the weight.
            tensor: new value on the CPU, contiguous; stored for the next comparison.
        """
        last = self.tensors.get(name)
        if last is None or last.shape != tensor.shape or last.dtype != tensor.dtype:
            self.tensors[name] = tensor.clone()
            return None
        width = tensor.element_size()
        new, old = tensor.reshape(-1), last.reshape(-1)
        positions = (new.view(_BITS[width]) != old.view(_BITS[width])).nonzero().reshape(-1)
        values = new[positions]
        last.copy_(tensor)
        if len(positions) * (width + _POSITION) > tensor.numel() * width or tensor.numel() >= _MOST_POSITIONS:
            return None
        return positions.to(torch.int32), values


class _Writer(Transport):
    """Writer of each bucket as a patch, and also whole if a target lacks the base of the patch."""

    calls_first: ClassVar[bool] = False

    def __init__(self, folder: SharedFolder, last: _Last, names: Sequence[str], lacking: set[str]) -> None:
        self._folder, self._last, self._lacking = folder, last, lacking
        self._patches = len(lacking) < len(set(names))
        self._manifest: list[dict[str, Any]] = []
        self.written_bytes = 0
        self.source = {"folder": folder.url, "holders": list(names), "whole": sorted(lacking)}

    def send(self, bucket: WeightBucket, receivers: Receivers) -> None:  # no target receives yet
        held = [(name, tensor.detach().contiguous().cpu()) for name, tensor in bucket]
        patch: dict[str, Tensor] = {}
        for index, (name, tensor) in enumerate(held):
            difference = self._last.difference(name, tensor)
            if difference is None:
                patch[f"{index}.whole"] = tensor
            else:
                patch[f"{index}.at"], patch[f"{index}.to"] = difference
        number = len(self._manifest)
        whole = {f"{index}.whole": tensor for index, (_, tensor) in enumerate(held)}
        entry: dict[str, Any] = {"names": [name for name, _ in held], "checksums": dict(bucket.expected)}
        for kind, tensors, is_needed in (("patch", patch, self._patches), ("whole", whole, bool(self._lacking))):
            if is_needed:
                entry[kind] = f"{kind}_{number:05d}.safetensors"
                self.written_bytes += self._folder.save(entry[kind], tensors)
        self._manifest.append(entry)

    def finish(self, receivers: Receivers) -> None:  # no target receives yet
        self._folder.write_text(_MANIFEST, json.dumps(self._manifest))


#: The tensors that this process received last, by the name that the sender gave to it.
_held: dict[str, dict[str, Tensor]] = {}


def _read(source: Mapping[str, Any]) -> Iterator[WeightBucket]:
    holder = source["holders"][source["target"]]
    # Each process of a tensor-parallel engine has its own copy, and so has each target in a process.
    key = f"{holder}.{source.get('reader', 0)}"
    kind = "whole" if holder in source["whole"] else "patch"
    # Removed first: an update that breaks off leaves a mixture, which must not be patched again.
    held = _held.pop(key, {})
    try:
        folder = SharedFolder(source["folder"])
        for entry in json.loads(folder.read_text(_MANIFEST)):
            tensors = folder.load(entry[kind])
            named = [(name, _patched(held, name, tensors, index)) for index, name in enumerate(entry["names"])]
            yield WeightBucket(named, entry["checksums"])
    except (OSError, ValueError, SafetensorError) as error:
        raise WeightSyncError(f"weights in {source['folder']} cannot be read: {error}") from error
    _held[key] = held


def _patched(held: dict[str, Tensor], name: str, tensors: Mapping[str, Tensor], index: int) -> Tensor:
    whole = tensors.get(f"{index}.whole")
    if whole is not None:
        # A copy: a tensor mapped from a file keeps the file, which the sender removes.
        held[name] = whole.clone()
    elif name not in held:
        raise WeightSyncError(f"weight {name!r} arrived as a patch, but this replica has no earlier value", tensor=name)
    else:
        held[name].view(-1)[tensors[f"{index}.at"].long()] = tensors[f"{index}.to"]
    return held[name]
