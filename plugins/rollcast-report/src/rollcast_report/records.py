"""Files of JSON lines, each with a ``step``, that stay readable if the process is killed at any moment."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollcast.errors import DataError

__all__ = ["RecordWriter", "Unreadable", "check_records", "drop_after", "encode_record", "parse_record", "read_records"]


#: Steps are smaller in any run; a larger one is damage, and would overflow floats.
_STEPS = 2**53


@dataclass(frozen=True)
class Unreadable:
    """A line that is not a JSON object with a ``step``, an integer from 0.

    Attributes:
        line: line number, from 1.
        torn: True for a last line without a newline, as a kill leaves it.
    """

    line: int
    torn: bool


def encode_record(step: int, values: Mapping[str, Any]) -> bytes:
    """Return one line: ``step`` first, then ``values``; numbers that are not finite become null.

    Raises:
        TypeError: a value has no JSON form.
    """
    record = {"step": int(step), **{key: _plain(value) for key, value in values.items() if key != "step"}}
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    # A lone surrogate has no UTF-8 form; its backslash form is the JSON escape of the same character.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _plain(value: Any) -> Any:
    """Return ``value`` in types that the json module accepts."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if callable(getattr(value, "tolist", None)):  # arrays and their scalars, without importing numpy or torch
        return _plain(value.tolist())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} has no JSON form; got {value!r:.200}")


def parse_record(raw: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None if the line is no JSON object with a ``step``, an integer from 0."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):  # also UnicodeDecodeError: the caller reports the line
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step < _STEPS else None


def read_records(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | Unreadable]]:
    """Yield each line of ``path`` with its record; nothing if the file does not exist.

    A last line without newline is never a record, even if it parses: it may be cut within a number.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                yield raw, Unreadable(number, torn=True)
                continue
            record = parse_record(raw)
            yield raw, Unreadable(number, torn=False) if record is None else record


def check_records(path: Path, start_step: int) -> None:
    """Check that a run that continues from ``start_step`` can append to a file; change nothing.

    Raises:
        DataError: the path is a folder, a link or a device, or a line of the file cannot be read.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_file():
        what = "a link" if path.is_symlink() else "a folder" if path.is_dir() else "no regular file"
        raise DataError(f"{path} is {what}; the run writes a file of this name: move it away")
    if start_step > 0:
        for _, record in read_records(path):
            if isinstance(record, Unreadable) and not record.torn:
                raise DataError(_describe_unreadable(path, record))


def _describe_unreadable(path: Path, record: Unreadable) -> str:
    wanted = "a JSON object with a 'step', an integer from 0"
    return f"{path}, line {record.line}: not {wanted}; remove the line, then resume again"


def drop_after(path: Path, start_step: int) -> int:
    """Drop, atomically, the records that a run that continues from ``start_step`` will write again.

    These are all records of later steps, and a torn last line. A run that starts afresh (0) writes
    every record again, also the validation before training, so the file becomes empty.

    Returns:
        Number of dropped lines.

    Raises:
        DataError: another line cannot be read; the user has to decide about it.
        OSError: the file cannot be written; the old file is unchanged.
    """
    if not path.exists():
        return 0
    dropped = 0
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for raw, record in read_records(path):
                if isinstance(record, Unreadable) and not record.torn and start_step > 0:
                    raise DataError(_describe_unreadable(path, record))
                if isinstance(record, Unreadable) or start_step <= 0 or record["step"] > start_step:
                    dropped += 1
                else:
                    file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        if dropped:
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return dropped


class RecordWriter:
    """A writer that appends records to one file and passes each line to the operating system at once.

    Args:
        path: path of the file; created if it does not exist.
        start_step: step that the run continues from, see :func:`drop_after`.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        self.path = path
        self.dropped = drop_after(path, start_step)
        self._file = path.open("ab", buffering=0)

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one record.

        Raises:
            OSError: the line cannot be written, for example because the disk is full; no part of it stays. Names the
                file.
        """
        line = encode_record(step, values)
        start = os.fstat(self._file.fileno()).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(start)
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()
