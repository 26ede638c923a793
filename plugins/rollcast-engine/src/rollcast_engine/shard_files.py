"""Reading and writing the shards of torch.distributed.checkpoint: sums as files are written, no code from an index."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter

from rollcast_engine.metadata import read_metadata

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["CheckedReader", "SummingWriter"]


class _SummingStream(io.BufferedIOBase):
    """A file that is written from start to end, and the CRC-32 of what was written."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self.size = 0
        self.checksum = 0

    def write(self, data: Any) -> int:
        # Summed before it is written: the data is in the processor's cache only once.
        self.checksum = zlib.crc32(data, self.checksum)
        self.size += memoryview(data).nbytes
        return self._file.write(data)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
        super().close()


class _SummingFiles(FileSystem):
    """A file system that keeps size and checksum of each file that it writes, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, tuple[int, int]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as file:
            if mode != "wb" or not isinstance(file, io.BufferedWriter):
                yield file
                return
            with _SummingStream(file) as stream:
                yield stream
            self.sums[Path(path).name] = (stream.size, stream.checksum)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        if (known := self.sums.pop(Path(path).name, None)) is not None:
            self.sums[Path(new_path).name] = known


class SummingWriter(FileSystemWriter):
    """A writer of shards that sums each file while it writes it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files = _SummingFiles()
        self.fs = self._files

    @property
    def sums(self) -> dict[str, tuple[int, int]]:
        """Size in bytes and CRC-32 of each file written so far, by name."""
        return self._files.sums


class CheckedReader(FileSystemReader):
    """A reader of shards that runs no code that the index names; torch's own unpickles anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # as torch calls it
        """Return the index.

        Raises:
            CheckpointError: it is damaged or names code.
        """
        metadata = read_metadata(Path(self.path) / ".metadata")
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata
