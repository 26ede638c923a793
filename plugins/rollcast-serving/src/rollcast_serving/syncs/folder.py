"""A folder of safetensors files that trainer and replicas share, by a path or an fsspec URL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from rollcast.contracts.storage import explain_url
from rollcast.errors import WeightSyncError

__all__ = ["SharedFolder"]


class SharedFolder:
    """Files in one folder.

    Args:
        url: path, or URL of a file system that fsspec supports, such as ``s3://bucket/weights``.

    Raises:
        WeightSyncError: no file system for the URL is installed; the message names the package.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._files, self._path = url_to_fs(url)
        except (ImportError, OSError, TypeError, ValueError) as error:
            reason = explain_url(url, error, "the environments of the trainer and of the replicas")
            raise WeightSyncError(f"rollout.sync_folder={url} cannot be opened: {reason}") from error
        self._is_local = isinstance(self._files, LocalFileSystem)

    def make(self) -> None:
        """Create the folder and its parents."""
        self._files.makedirs(self._path, exist_ok=True)

    def remove(self) -> None:
        """Remove the folder with its files."""
        if self._files.exists(self._path):
            self._files.rm(self._path, recursive=True)

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        """Write tensors to a file; return their size in bytes."""
        held = {key: tensor.detach().contiguous().cpu() for key, tensor in tensors.items()}
        if self._is_local:
            save_file(held, self._local(name))
        else:
            self._files.pipe_file(f"{self._path}/{name}", save(held))
        return sum(tensor.numel() * tensor.element_size() for tensor in held.values())

    def load(self, name: str) -> dict[str, Tensor]:
        """Return a file's tensors."""
        if self._is_local:
            return load_file(self._local(name))
        return load(self._files.cat_file(f"{self._path}/{name}"))

    def write_text(self, name: str, text: str) -> None:
        """Write a text file."""
        self._files.pipe_file(f"{self._path}/{name}", text.encode())

    def read_text(self, name: str) -> str:
        """Return the content of a text file."""
        content: Any = self._files.cat_file(f"{self._path}/{name}")
        return bytes(content).decode()

    def _local(self, name: str) -> Path:
        return Path(self._path) / name
