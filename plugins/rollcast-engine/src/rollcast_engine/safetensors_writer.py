"""Writing safetensors files tensor by tensor, in any order, with at most one tensor in memory.

The format stores names, shapes and offsets of all tensors at the start of a file, so these must be known before the
first tensor is written: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rollcast_engine.weights import DTYPES, INDEX_FILE

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SHARD_BYTES", "SafetensorsWriter"]

#: Maximum size of a weights file in bytes, unless one tensor is larger.
SHARD_BYTES = 5 << 30

_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Place:
    """Position of a tensor: its file, the offset in bytes, and the expected shape and dtype."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SafetensorsWriter:
    """Writer of ``model.safetensors``, or of several files and their index if the tensors exceed one file.

    Args:
        folder: existing folder to write into.
        layout: shape and dtype of each tensor by name.
        shard_bytes: maximum size of a file in bytes, unless one tensor is larger.

    Raises:
        OSError: a file cannot be created.
    """

    def __init__(
        self, folder: Path, layout: Mapping[str, tuple[Sequence[int], torch.dtype]], shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._folder = folder
        self._places: dict[str, _Place] = {}
        self._handles: dict[Path, int] = {}
        self._missing = set(layout)
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in layout.items()}
        shards = list(_split(sizes, shard_bytes))
        self._bytes = sum(sizes.values())
        for number, names in enumerate(shards, 1):
            single = len(shards) == 1
            file_name = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._begin(folder / file_name, {name: layout[name] for name in names})

    def _begin(self, file: Path, layout: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        offsets: dict[str, int] = {}
        # Larger dtypes first, so that each tensor is aligned to its item size.
        for name, (shape, dtype) in sorted(layout.items(), key=lambda item: -item[1][1].itemsize):
            offsets[name], end = end, end + math.prod(shape) * dtype.itemsize
            places = [offsets[name], end]
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": places}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        handle = self._handles[file] = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        _write(handle, memoryview(len(text).to_bytes(8, "little") + text), 0)
        os.truncate(handle, 8 + len(text) + end)
        for name, (shape, dtype) in layout.items():
            self._places[name] = _Place(file, 8 + len(text) + offsets[name], tuple(shape), dtype)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor at its position, converted to the dtype of the layout.

        Raises:
            ValueError: the layout has no tensor of this name and shape, or it was already written.
            OSError: it cannot be written.
        """
        place = self._places.get(name)
        if place is None:
            raise ValueError(f"there is no tensor {name} in the model")
        if place.shape != tuple(tensor.shape):
            raise ValueError(f"tensor {name} has shape {tuple(tensor.shape)}; the model's has {place.shape}")
        if name not in self._missing:
            raise ValueError(f"tensor {name} was written twice")
        plain = tensor.detach().to("cpu", place.dtype).contiguous()
        if plain.numel():
            data = plain.reshape(-1).view(torch.uint8).numpy().data
            _write(self._handles[place.file], data, place.offset)
        self._missing.discard(name)

    def finish(self) -> None:
        """Close the files, and write the index if there are several.

        Raises:
            ValueError: a tensor was not written.
            OSError: a file cannot be written.
        """
        self.close()
        if self._missing:
            names = sorted(self._missing)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"these tensors were not written: {', '.join(names[:3])}{more}")
        files = {name: place.file.name for name, place in self._places.items()}
        if len(set(files.values())) > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": files}
            (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def close(self) -> None:
        """Close the files without checking that they are complete."""
        while self._handles:
            os.close(self._handles.popitem()[1])


def _write(handle: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``; the system may write less per call than it is asked to."""
    while data.nbytes:
        count = os.pwrite(handle, data, offset)
        data, offset = data[count:], offset + count


def _split(sizes: Mapping[str, int], limit: int) -> Iterable[list[str]]:
    shard: list[str] = []
    held = 0
    for name, size in sizes.items():
        if shard and held + size > limit:
            yield shard
            shard, held = [], 0
        shard.append(name)
        held += size
    if shard:
        yield shard
