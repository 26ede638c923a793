"""A file format for DataProtos; reading a file never executes code from it.

Layout: magic (8 bytes), header length (uint64, little endian), CRC-32 of the header (uint32), the
header as JSON, then the buffers of :mod:`rollcast.protocol._wire`, each at a multiple of 64 bytes
padded with zeros. The header contains the offset, size and CRC-32 of each buffer, and the byte order of the machine,
which is that of the stored tensors.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from rollcast.errors import DataProtoError
from rollcast.protocol import _wire as wire
from rollcast.protocol._columns import Columns, common_length
from rollcast.protocol._values import endless

_MAGIC = b"ROLLDP\x00\x01"
_PREFIX = struct.Struct("<8sQI")
_ALIGN = 64


def _jsonable(value: Any, where: str) -> Any:
    try:
        return _as_json(value, where)
    except RecursionError:
        raise endless(where, value) from None


def _as_json(value: Any, where: str) -> Any:
    """Convert numpy scalars in ``value`` to Python scalars; refuse values that JSON would change."""
    kind = type(value)
    if value is None or kind in (str, bool, int, float):
        return value
    if isinstance(value, np.generic) and type(value.item()) in (str, bool, int, float):
        return value.item()
    if kind is list:
        return [_as_json(item, where) for item in value]
    if kind is dict and all(type(key) is str for key in value):
        return {key: _as_json(item, where) for key, item in value.items()}
    detail = " with keys that are not strings" if kind is dict else ""
    raise DataProtoError(
        f"{where} holds a {kind.__name__}{detail}, which JSON cannot keep; a saved DataProto takes"
        " None, bool, int, float, str, and lists and dicts of them: convert or drop it"
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _encoded(header: wire.Header, buffers: list[torch.Tensor]) -> bytes:
    places = []
    offset = 0
    for buffer in buffers:
        places.append([offset, buffer.numel(), zlib.crc32(buffer.numpy().data)])
        offset += _aligned(buffer.numel())
    meta = {key: _jsonable(item, f"meta_info key {key!r}") for key, item in header.meta_info.items()}
    content = {
        "length": header.length,
        "byteorder": sys.byteorder,
        "columns": header.specs,
        "buffers": places,
        "objects": {name: _jsonable(items, f"object column {name!r}") for name, items in header.objects.items()},
        "meta_info": _jsonable(meta, "meta_info"),
    }
    return json.dumps(content, separators=(",", ":")).encode()


def save(
    path: str | os.PathLike[str], length: int, columns: Mapping[str, torch.Tensor], meta_info: dict[str, Any]
) -> None:
    """Write the file; an existing file is replaced only when the new one is complete.

    Raises:
        DataProtoError: an object or meta entry cannot be stored as JSON; names the column or key.
        OSError: the folder is missing, or the file cannot be written.
    """
    unsaved, buffers = wire.pack(length, columns, meta_info)
    header = _encoded(unsaved, buffers)
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(_PREFIX.pack(_MAGIC, len(header), zlib.crc32(header)))
            file.write(header)
            for buffer in buffers:
                file.write(bytes(-file.tell() % _ALIGN))
                file.write(buffer.numpy().data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str]) -> tuple[int, Columns, dict[str, Any]]:
    """Read a file and return ``(length, columns, meta_info)``; the tensors own their memory and are writable.

    Raises:
        DataProtoError: the file has another format, is truncated or is corrupt.
        OSError: the file cannot be opened or read.
    """
    with Path(path).open("rb") as file:
        try:
            return _read(file)
        except DataProtoError as error:
            raise DataProtoError(f"{os.fspath(path)}: {error}") from error
        except (ValueError, KeyError, TypeError, IndexError) as error:
            # The checksum matches, so the file was written by an incompatible writer.
            raise DataProtoError(f"{os.fspath(path)}: its header is not understood ({error!r})") from error


def _read_exactly(file: BinaryIO, size: int, what: str) -> bytearray:
    remaining = os.fstat(file.fileno()).st_size - file.tell()
    if remaining < size:
        raise DataProtoError(
            f"the file ends inside {what}: {size} bytes were expected and {remaining} are left; it was cut short"
        )
    content = bytearray(size)
    if file.readinto(content) != size:  # type: ignore[attr-defined]
        raise DataProtoError(f"the file became shorter while {what} was read")
    return content


def _read(file: BinaryIO) -> tuple[int, Columns, dict[str, Any]]:
    magic, size, checksum = _PREFIX.unpack(_read_exactly(file, _PREFIX.size, "its first bytes"))
    if magic != _MAGIC:
        raise DataProtoError("this is no saved DataProto (other first bytes, or another version)")
    raw = _read_exactly(file, size, "the header")
    if zlib.crc32(raw) != checksum:
        raise DataProtoError("the header does not match its checksum; the file is damaged")
    content = json.loads(raw)
    if content["byteorder"] != sys.byteorder:
        raise DataProtoError(f"it was written on a {content['byteorder']}-endian machine")
    specs = tuple(
        wire.ColumnSpec(name, kind, tuple(wire.TensorSpec(d, tuple(shape), b) for d, shape, b in tensors))
        for name, kind, tensors in content["columns"]
    )
    start = _aligned(file.tell())
    buffers = []
    for number, (offset, length, checksum) in enumerate(content["buffers"]):
        file.seek(start + offset)
        buffer = _read_exactly(file, length, f"buffer {number}")
        if zlib.crc32(buffer) != checksum:
            raise DataProtoError(f"buffer {number} does not match its checksum; the file is damaged")
        buffers.append(buffer)
    rows, meta_info = content["length"], content["meta_info"]
    columns = wire.unpack(wire.Header(wire.WIRE_VERSION, rows, specs, content["objects"], meta_info), buffers)
    return common_length(columns, rows), columns, meta_info
