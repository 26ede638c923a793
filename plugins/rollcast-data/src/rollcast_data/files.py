"""Rows of JSONL, JSON and Parquet files: read with errors that name file and row, written atomically."""

from __future__ import annotations

import difflib
import glob
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rollcast.errors import DataError
from rollcast_data.tokenizer import HUB_NAME

__all__ = ["Row", "expand_files", "find_split", "read_files", "read_rows", "write_jsonl", "write_parquet"]

_MISSING: Any = object()
#: Name of one of the files of a split on the Hugging Face Hub; older ones end with a hash.
_SHARD = re.compile(r".+-(?P<number>\d{5})-of-(?P<count>\d{5})(-[0-9a-f]+)?\.parquet")
#: Longest row of a file in bytes. A longer row is probably a file without line breaks, and would fill the memory.
_LONGEST_ROW = 64 << 20
#: Deepest nesting of a row; later readers, such as pickle, recurse and have a limit.
_DEEPEST_ROW = 100


@dataclass(frozen=True)
class Row:
    """A row and its position, from 1: a line of a JSONL file, an item of a JSON list, or a row of a Parquet file.

    ``fills_structs`` is True if the file's format adds nulls to the structs of rows, as Parquet does.
    """

    values: Mapping[str, Any]
    path: Path
    number: int
    fills_structs: bool = False

    @property
    def location(self) -> str:
        """Position as ``file:row``, for messages."""
        return f"{self.path}:{self.number}"

    def find(self, key: str, default: Any = None) -> Any:
        """Return the column ``key``, or the value at the dotted ``key`` in nested columns, or ``default``."""
        if key in self.values:
            return self.values[key]
        value: Any = self.values
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value

    def get(self, key: str, config_key: str = "") -> Any:
        """Return the value of a required column.

        Args:
            config_key: config key that names the column, for the message.

        Raises:
            DataError: there is no such column, or the value is null; lists the columns of the row.
        """
        value = self.find(key, _MISSING)
        if value is _MISSING or value is None:
            state = "has no column" if value is _MISSING else "is null in column"
            hint = f" ({config_key})" if config_key else ""
            columns = ", ".join(self.values) or "none"
            raise DataError(f"{self.location}: the row {state} {key!r}{hint}; its columns: {columns}")
        return value


def expand_files(patterns: Sequence[str | Path]) -> list[Path]:
    """Return the files that names and globs match, in the order of ``patterns``; the files of a glob are sorted.

    Raises:
        DataError: nothing was given, a file is missing (the nearest name in its folder is shown),
            a glob matches nothing, or a name is a folder.
    """
    if not patterns:
        raise DataError("no data files are given; set data.train_files or data.val_files")
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            raise DataError(f"{path} is a folder; name its files, or write a glob such as {path / '*.parquet'}")
        elif glob.has_magic(str(path)):
            matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]  # noqa: PTH207  # the pattern may be absolute
            if not matches:
                raise DataError(f"no file matches {path}")
            files += matches
        else:
            raise DataError(_missing_file(path))
    return files


def _missing_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        hint = ""
        if HUB_NAME.fullmatch(str(path)) and path.suffix.lower() not in _READERS:
            hint = (
                f"; for a dataset of the Hugging Face Hub, run hf download {path} --repo-type dataset "
                f"--local-dir {path.name}, and name its files, such as '{path.name}/**/train-*.parquet'"
            )
        return f"{path} does not exist: there is no folder {folder.absolute()}{hint}"
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.4)
    if near:
        return f"{path} does not exist; the nearest name in {folder.absolute()} is {near[0]}"
    return f"{path} does not exist; files in {folder.absolute()}: {', '.join(names[:10]) or 'none'}"


def find_split(folder: Path, split: str, config: str = "main") -> list[Path]:
    """Return the files of a split in a data set's folder, in order.

    They are ``train.jsonl``, ``train.json`` or ``train.parquet``, or shards as the Hugging Face Hub names them, such as
    ``train-00000-of-00002.parquet``; in the folder itself, or in its folder ``config`` or ``data``.

    Raises:
        DataError: there are none, or a shard is missing.
    """
    for place in (folder, folder / config, folder / "data"):
        single = [place / f"{split}{suffix}" for suffix in _READERS if (place / f"{split}{suffix}").is_file()]
        if single:
            return single[:1]
        shards = sorted(path for path in place.glob(f"{split}-*.parquet") if _SHARD.fullmatch(path.name))
        if shards:
            _require_all(shards)
            return shards
    raise DataError(
        f"{folder / split}.jsonl does not exist, and no other file of the split, such as {split}.parquet or "
        f"{split}-00000-of-00001.parquet, in {folder.absolute()} or its folders {config} and data"
    )


def _require_all(shards: Sequence[Path]) -> None:
    parts = [cast("re.Match[str]", _SHARD.fullmatch(path.name)) for path in shards]
    numbers, count = [int(part["number"]) for part in parts], int(parts[0]["count"])
    if numbers != list(range(count)):
        missing = sorted(set(range(count)) - set(numbers))
        problem = f"shard {missing[0]} of {count} is missing" if missing else "shards of several versions lie together"
        raise DataError(f"{shards[0]}: {problem}; its folder has {', '.join(path.name for path in shards[:10])}")


def read_files(patterns: Sequence[str | Path]) -> list[Row]:
    """Yield the rows of all files, in order.

    Raises:
        DataError: see :func:`expand_files` and :func:`read_rows`.
    """
    return [row for path in expand_files(patterns) for row in read_rows(path)]


def read_rows(path: Path) -> list[Row]:
    """Yield the rows of one file; its extension determines the format.

    Raises:
        DataError: unknown extension, empty file, a line that is not a JSON object (with its
            number), or a Parquet file that does not open.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path} has the extension {path.suffix!r}; known ones: {', '.join(_READERS)}")
    if not path.is_file():
        raise DataError(_missing_file(path))
    rows = reader(path)
    if not rows:
        raise DataError(f"{path} holds no rows")
    return rows


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    # Read as bytes, so that a line that is not UTF-8 can be named by its number.
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_ROW + 1), b""), 1):
            if not line.strip():
                continue
            if len(line) > _LONGEST_ROW:
                raise DataError(
                    f"{path}:{number}: the row has more than {_LONGEST_ROW >> 20} MiB; each row is a line of its own"
                )
            try:
                value = json.loads(line)
                _require_shallow(value)
            except RecursionError as error:
                raise DataError(f"{path}:{number}: the row is nested more than {_DEEPEST_ROW} levels deep") from error
            except ValueError as error:
                raise DataError(f"{path}:{number}: not JSON: {error}; the line is {_excerpt(line)}") from error
            if not isinstance(value, dict):
                raise DataError(
                    f"{path}:{number}: a row has to be a JSON object, this is {type(value).__name__}: {_excerpt(line)}"
                )
            _require_text(value, line, f"{path}:{number}")
            rows.append(Row(value, path, number))
    return rows


def _read_json(path: Path) -> list[Row]:
    """Read a file that is one list of objects, or has an object in each line, as many files of this name do."""
    with path.open("rb") as file:
        start = next((line.lstrip()[:1] for line in file if line.strip()), b"")
    if start != b"[":
        return _read_jsonl(path)
    try:
        values = json.loads(path.read_bytes())
        _require_shallow(values)
    except RecursionError as error:
        raise DataError(f"{path}: a row is nested more than {_DEEPEST_ROW} levels deep") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    for number, value in enumerate(values, 1):
        if not isinstance(value, dict):
            raise DataError(f"{path}:{number}: a row has to be a JSON object, this is {type(value).__name__}")
        _require_text(value, b"\\u", f"{path}:{number}")
    return [Row(value, path, number) for number, value in enumerate(values, 1)]


def _require_shallow(value: Any) -> None:
    """Raise RecursionError for a value that is nested too deeply."""
    level, depth = [value], 0
    while level := [
        item
        for file in level
        if isinstance(file, dict | list)
        for item in (file.values() if isinstance(file, dict) else file)
        if isinstance(item, dict | list)
    ]:
        depth += 1
        if depth >= _DEEPEST_ROW:
            raise RecursionError


def _require_text(value: Any, line: bytes, location: str) -> None:
    r"""Reject strings that cannot be encoded: a lone surrogate such as ``\ud800`` is valid JSON but no character."""
    if b"\\u" not in line:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{location}: the row has a lone surrogate, {error.object[error.start]!r}, which is half of a character; "
            "repair the text, or leave the row out"
        ) from error


def _excerpt(line: bytes) -> str:
    text = line.strip().decode("utf-8", errors="replace")
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            _require_small_rows(path, file.metadata)
        table = parquet.read_table(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} does not open as Parquet: {error}") from error
    return [Row(values, path, number, fills_structs=True) for number, values in enumerate(table.to_pylist(), 1)]


def _require_small_rows(path: Path, metadata: Any) -> None:
    first = 1
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if group.total_byte_size > _LONGEST_ROW * max(group.num_rows, 1):
            last = first + group.num_rows - 1
            raise DataError(
                f"{path}:{first}: rows {first} to {last} have {group.total_byte_size >> 20} MiB, more than "
                f"{_LONGEST_ROW >> 20} MiB a row"
            )
        first += group.num_rows


#: Readers by the extension of a file.
_READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as JSON lines (UTF-8), atomically; return their number.

    Raises:
        DataError: a row has a value without a JSON form.
    """
    count = 0
    with _replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            try:
                line = json.dumps(dict(row), ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise DataError(f"row {count + 1} for {path} cannot be written as JSON: {error}") from error
            file.write(line + "\n")
            count += 1
    return count


def write_parquet(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as Parquet, atomically; return their number.

    Column types are inferred over all rows.

    Raises:
        DataError: a column has values of different types.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = pa.Table.from_pylist([dict(row) for row in rows])
    except (pa.ArrowException, TypeError) as error:
        raise DataError(f"the rows for {path} do not fit one table: {error}") from error
    with _replacing(path) as temporary:
        parquet.write_table(table, temporary)
    return int(table.num_rows)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` and rename it to ``path`` if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp creates files that only their owner can read; a data set has the usual permissions.
        temporary.chmod(0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
