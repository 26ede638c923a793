"""Reading tensors or parts of tensors from the safetensors of a Hugging Face folder, never a whole file at once.

Parts that are contiguous in a file are read, not mapped: the pages of a mapped file count as memory of the process for
as long as it is open, and eight ranks of a node would touch all of them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from rollcast.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DTYPES", "INDEX_FILE", "WeightFolder", "describe_differences"]

INDEX_FILE = "model.safetensors.index.json"
_READ_ERRORS = (SafetensorError, OSError, ValueError, KeyError, RuntimeError)

Region = Sequence[slice]

#: Names of dtypes in a header.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class WeightFolder:
    """The tensors of a folder's safetensors files by name.

    Only requested parts are read. Headers are read at construction.

    Attributes:
        folder: folder of the files.
        shapes: shape of each tensor by name.
        bytes_read: bytes of the tensors read so far.

    Args:
        folder: folder with ``model.safetensors.index.json`` and the files that it names, or with ``*.safetensors``.
        files: names of the files to read; None finds them in the folder.

    Raises:
        ConfigError: there are no files, or a file is missing, truncated or not a safetensors file; the message names
            it.
    """

    def __init__(self, folder: Path, files: Iterable[str] | None = None) -> None:
        self.folder = folder
        self.bytes_read = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        self._spots: dict[str, _Spot] = {}
        self._open: dict[Path, Any] = {}
        index = self._read_index() if files is None else None
        chosen = _find_files(folder, files, index)
        for file in chosen:
            self._read_header(file)
        for name, file_name in (index or {}).items():
            if self._files.get(name) != folder / file_name:
                raise ConfigError(f"{folder / INDEX_FILE} says that {name} is in {file_name}, which does not hold it")

    def _read_index(self) -> dict[str, str] | None:
        file = self.folder / INDEX_FILE
        if not file.is_file():
            return None
        try:
            return dict(json.loads(file.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} cannot be read: {error!r}") from error

    def _read_header(self, file: Path) -> None:
        try:
            tensors: Any = safe_open(file, framework="pt")
            self._open[file] = tensors
            for name in tensors.keys():  # noqa: SIM118  # it is no mapping
                self.shapes[name] = tuple(tensors.get_slice(name).get_shape())
                self._files[name] = file
            self._spots |= _read_spots(file)
        except _READ_ERRORS as error:
            raise ConfigError(f"weights file {file} cannot be read: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a tensor, or its part ``region`` (one slice per dimension).

        It may share memory with the mapped file, unless it is contiguous there.

        Raises:
            KeyError: there is no such tensor.
            ConfigError: it cannot be read; the message names tensor and file.
        """
        file = self._files[name]
        try:
            tensors = self._open[file]
            rows = _rows(self.shapes[name], region)
            if rows is not None and name in self._spots:
                tensor: Tensor = _read_rows(file, self._spots[name], self.shapes[name], rows)
            elif region is None or not self.shapes[name]:
                tensor = tensors.get_tensor(name)
            else:
                tensor = tensors.get_slice(name)[tuple(region)]
        except _READ_ERRORS as error:
            raise ConfigError(f"tensor {name} cannot be read from {file}: {error}") from error
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def fingerprint(self) -> str:
        """Return a digest of names, shapes and the first slice of each tensor along its first dimension."""
        digest = hashlib.sha256()
        for name in sorted(self.shapes):
            shape = self.shapes[name]
            digest.update(f"{name}{shape}".encode())
            if math.prod(shape):
                first = self.read(name, [slice(0, 1)] + [slice(0, size) for size in shape[1:]])
                digest.update(first.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        """Close the files; tensors that were read stay valid."""
        self._open.clear()


@dataclass(frozen=True)
class _Spot:
    """Position of a tensor's data in its file, in bytes, and its dtype."""

    offset: int
    dtype: torch.dtype


def _read_spots(file: Path) -> dict[str, _Spot]:
    """Return the position of each tensor whose dtype torch has; safetensors has checked the header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return {
        name: _Spot(8 + length + entry["data_offsets"][0], DTYPES[entry["dtype"]])
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in DTYPES
    }


def _rows(shape: Sequence[int], region: Region | None) -> slice | None:
    """Return the rows of a region that has all of every other dimension; None for any other region."""
    if not shape:
        return None
    if region is None:
        return slice(0, shape[0])
    whole = all(part == slice(0, size) for part, size in zip(region[1:], shape[1:], strict=True))
    return region[0] if whole else None


def _read_rows(file: Path, spot: _Spot, shape: Sequence[int], rows: slice) -> Tensor:
    row = math.prod(shape[1:]) * spot.dtype.itemsize
    data = torch.empty((rows.stop - rows.start) * row, dtype=torch.uint8)
    if data.numel():
        with file.open("rb", buffering=0) as stream:
            stream.seek(spot.offset + rows.start * row)
            view, done = data.numpy().data, 0
            while done < len(view):
                count = stream.readinto(view[done:])
                if not count:
                    raise OSError("the file ends before the tensor does")
                done += count
    return data.view(spot.dtype).view(rows.stop - rows.start, *shape[1:])


def _find_files(folder: Path, files: Iterable[str] | None, index: Mapping[str, str] | None) -> list[Path]:
    if files is not None or index is not None:
        names = sorted(set(files if files is not None else (index or {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConfigError(f"{folder} lacks the weights file {', '.join(missing)}")
        return [folder / name for name in names]
    shard_files = sorted(folder.glob("*.safetensors"))
    if not shard_files:
        raise ConfigError(f"{folder} contains no *.safetensors")
    single = folder / "model.safetensors"
    return [single] if single in shard_files else shard_files


def describe_differences(missing: Sequence[str], unexpected: Sequence[str], wrong: Sequence[str]) -> str:
    """Return a one-line summary of missing, mis-shaped and unexpected tensors; empty if there are none."""
    kinds = (("lacks", missing), ("has the wrong shape for", wrong), ("also contains", unexpected))
    return "; ".join(f"{what} {_first(names)}" for what, names in kinds if names)


def _first(names: Sequence[str], count: int = 3) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
